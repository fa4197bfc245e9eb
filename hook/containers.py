"""Proof that dicts and lists hold the objects that they held: a few calls whatever their number, none per object.

All comparisons are of identity, and what was seen is kept alive, so that no new object can look like an old one.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import is_, methodcaller, not_
from typing import Any, cast

Table = Mapping[Any, object]

_LIVE = {dict, OrderedDict, defaultdict}
"""Of these a view of the values, made once, shows what there is whenever it is read."""

_values_of = cast("Callable[[Table], Iterable[object]]", methodcaller("values"))


def same(found: Iterable[object], seen: Iterable[object]) -> bool:
    """Tell whether as many objects are the same, each with its own: no list is made of them, which would touch each."""
    return all(map(is_, found, seen))


def _is_never(value: object) -> bool:
    del value
    return False


class Contents:
    """What dicts held when this was made."""

    def __init__(self, tables: Iterable[Table], *, is_loose: Callable[[object], bool] = _is_never) -> None:
        """Look at the dicts. Values for which `is_loose` holds may become others for which it holds too."""
        self._is_loose = is_loose
        self.tables = list(tables)
        self._sizes = list(map(len, self.tables))
        self._full = list(filter(None, self.tables))  # most of a model's are empty
        is_live = set(map(type, self._full)) <= _LIVE
        self._views = list(map(_values_of, self._full)) if is_live else None
        self._keys = list[object](chain.from_iterable(self._full))
        # Equal strings are equal names; keys of other kinds (tensors) may not even compare.
        self._are_texts = all(type(key) is str for key in self._keys)
        values = list(self._values())
        self._loose = list(map(is_loose, values))
        self._fixed = list(map(not_, self._loose))
        self._seen = list(compress(values, self._fixed))
        self._any_loose = any(self._loose)

    def hold(self) -> bool:
        """Tell whether the dicts have the same keys in the same order and the same values."""
        if list(map(len, self.tables)) != self._sizes:
            return False
        keys = chain.from_iterable(self._full)
        if not (list(keys) == self._keys if self._are_texts else same(keys, self._keys)):
            return False
        if not self._any_loose:
            return same(self._values(), self._seen)
        loose = compress(self._values(), self._loose)
        fixed = compress(self._values(), self._fixed)
        return same(fixed, self._seen) and all(map(self._is_loose, loose))

    def _values(self) -> Iterable[object]:
        return chain.from_iterable(self._views if self._views is not None else map(_values_of, self._full))


class Lists:
    """What lists held when this was made."""

    def __init__(self, lists: Iterable[Sequence[object]]) -> None:
        """Look at the lists."""
        found = list(lists)
        self._sizes = list(map(len, found))
        self._seen = list(chain.from_iterable(found))

    def hold(self, lists: Iterable[Sequence[object]]) -> bool:
        """Tell whether these lists, new or the same, hold the same objects."""
        found = list(lists)
        return list(map(len, found)) == self._sizes and same(chain.from_iterable(found), self._seen)

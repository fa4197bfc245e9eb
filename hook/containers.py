"""Proof that dicts and lists hold the objects that they held: a few calls whatever their number, none per object.

All comparisons are of identity, and what was seen is kept alive, so that no new object can look like an old one.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from gc import get_referents
from itertools import chain, compress
from operator import methodcaller, not_
from typing import Any, cast

from .identity import same

Table = Mapping[Any, object]

_LIVE = {dict, OrderedDict, defaultdict}
"""Of these a view of the values, made once, shows what there is whenever it is read."""

_values_of = cast("Callable[[Table], Iterable[object]]", methodcaller("values"))


def _is_never(value: object) -> bool:
    del value
    return False


class Contents:
    """What dicts held when this was made."""

    def __init__(self, tables: Iterable[Table], *, is_loose: Callable[[object], bool] = _is_never) -> None:
        """Look at the dicts. Values for which `is_loose` holds may become others for which it holds too."""
        self._is_loose = is_loose
        self.tables = list(tables)
        self._empty = list(filter(not_, self.tables))  # most of a model's
        self._full = list(filter(None, self.tables))
        self._sizes = list(map(len, self._full))
        self._keys = tuple[object, ...](chain.from_iterable(self._full))
        # Equal strings are equal names; keys of other kinds (tensors) may not even compare.
        self._are_texts = all(type(key) is str for key in self._keys)
        self._values = _reader(self._full)
        values = tuple(self._values())
        self._loose = list(map(is_loose, values))
        self._fixed = list(map(not_, self._loose))
        self._seen = tuple(compress(values, self._fixed))
        self._any_loose = any(self._loose)

    def hold(self) -> bool:
        """Tell whether the dicts have the same keys in the same order and the same values."""
        if any(self._empty) or list(map(len, self._full)) != self._sizes:
            return False
        keys = chain.from_iterable(self._full)
        if not (tuple(keys) == self._keys if self._are_texts else same(keys, self._keys)):
            return False
        if not self._any_loose:
            return same(self._values(), self._seen)
        loose = compress(self._values(), self._loose)
        fixed = compress(self._values(), self._fixed)
        return same(fixed, self._seen) and all(map(self._is_loose, loose))


def _reader(tables: Sequence[Table]) -> Callable[[], Iterable[object]]:
    """Return what reads the values of all tables, as they are whenever it is called.

    What garbage collection sees of plain dicts whose keys are all texts are their values, in order, in one call. That
    is proven of these, and where it ceases to be true (another kind of key came and went) they look changed.
    """
    kinds = set(map(type, tables))
    views = list(map(_values_of, tables)) if kinds <= _LIVE else None

    def by_views() -> Iterable[object]:
        return chain.from_iterable(map(_values_of, tables) if views is None else views)

    if kinds == {dict} and same(get_referents(*tables), tuple(by_views())):
        return lambda: get_referents(*tables)
    return by_views


class Lists:
    """What lists held when this was made."""

    def __init__(self, lists: Iterable[Sequence[object]]) -> None:
        """Look at the lists."""
        found = list(lists)
        self._sizes = list(map(len, found))
        self._seen = tuple(chain.from_iterable(found))

    def hold(self, lists: Iterable[Sequence[object]]) -> bool:
        """Tell whether these lists, new or the same, hold the same objects."""
        found = list(lists)
        return list(map(len, found)) == self._sizes and same(chain.from_iterable(found), self._seen)

"""A stored state as other tools expect it: one state dict for each object, tensors by reference.

What `torch.load(..., weights_only=True)` refuses becomes its nearest plain value: a deque a list, a frozenset a set, or
a tuple where it is a key or in a set, numpy's numbers Python's, its arrays tensors or lists, its dates text. The exact
documents stand in the manifest and beside an export.
"""

import base64
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..checkpoint.value_format import decode_value
from ..core.errors import StateTypeError
from .document import Document
from .object_tree import decode_array, decode_numpy_scalar, decode_torch

_INT_BITS_MAX = 255 * 8 - 1
"""An int of more has an opcode in a pickle that `weights_only` does not know."""
_NARROWER = {"g": "d", "G": "D"}
"""Numpy's long double and its complex numbers, by their character -> what torch has."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a stored tensor."""

    name: str
    rows: int | None = None
    """So many rows of it; None: all."""


@dataclass(frozen=True, slots=True)
class SparseRef:
    """Stands for a sparse tensor; indices before values."""

    layout: torch.layout
    parts: tuple[object, ...]
    size: tuple[int, ...]
    is_coalesced: bool


class StateTree:
    """Makes state dicts from the documents of a checkpoint's components."""

    def __init__(
        self, documents: Mapping[str, object], read_bytes: Callable[[str], bytes], *, by_name: bool
    ) -> None:
        """Read the documents of one rank.

        Args:
            documents: by component, as `load_values` returns them.
            read_bytes: returns all bytes of a leaf, for arrays and byte strings that are leaves.
            by_name: optimizers have their parameters by name, as torch.distributed.checkpoint wants them, instead of
                by number as `load_state_dict` does.
        """
        self._documents = documents
        self._read_bytes = read_bytes
        self._by_name = by_name
        self._makers: dict[str, Callable[[str, Document], object]] = {
            "module": self._module,
            "optimizer": self._optimizer,
            "scaler": self._scaler,
            "rng": self._rng,
            "history": self._history,
        }

    def components(self) -> dict[str, object]:
        """Return the state dict of each component, in the order in which they were attached.

        Raises:
            CorruptDataError: a document is not what a component writes.
            StateTypeError: two keys of a dict, or items of a set, have one plain value; the message names whose.
        """
        return {name: self._named_component(name, document) for name, document in self._documents.items()}

    def _named_component(self, name: str, content: object) -> object:
        try:
            return self._component(name, content)
        except StateTypeError as error:
            raise StateTypeError(f"{name}: {error.message}", hint=error.hint) from error

    def _component(self, name: str, content: object) -> object:
        document = Document(name, content)
        if "kind" not in document:
            return self._plain(content)
        make = self._makers.get(document.text("kind"))
        if make is not None:
            return make(name, document)
        return self._plain(document.value("state"))

    def _module(self, name: str, document: Document) -> dict[str, object]:
        caches, sparse = set(document.texts("caches")), document.mapping("sparse")
        found: dict[str, object] = {
            fqn: TensorRef(f"{name}.{fqn}") for fqn in document.texts("tensors") if fqn not in caches
        }
        found |= {fqn: self._plain(encoded) for fqn, encoded in sparse.items()}
        for prefix, encoded in document.mapping("extra").items():
            found[f"{prefix}_extra_state"] = self._plain(encoded)
        return found

    def _optimizer(self, name: str, document: Document) -> dict[str, object]:
        groups = [Document(name, group) for group in document.items("groups")]
        parameters = [parameter for group in groups for parameter in group.texts("params")]
        keys: dict[str, object] = {
            parameter: parameter if self._by_name else number for number, parameter in enumerate(parameters)
        }
        state: dict[object, object] = {}
        for parameter, saved in document.mapping("state").items():
            own = Document(name, saved)
            made: dict[object, object] = {
                key: TensorRef(f"{name}.state.{parameter}.{key}") for key in own.texts("tensors")
            }
            if "rest" in own:
                made |= cast(dict[object, object], self._plain(own.value("rest")))
            state[keys.get(parameter, parameter)] = made
        for pair in document.items("shared"):
            key, value = cast(list[object], pair)
            kept = self._plain_key(key)
            if kept in state:  # where parameters are numbers, it may be one of them
                raise _one_for_two(kept)
            state[kept] = self._plain(value)
        tree: dict[str, object] = {"state": state}
        tree["param_groups"] = [self._group(group, keys) for group in groups]
        if "own" in document and (names := document.texts("own")):  # load_state_dict passes it by
            tree["own"] = {each: TensorRef(f"{name}.params.{each}") for each in names}
        return tree

    def _group(self, group: Document, keys: Mapping[str, object]) -> dict[str, object]:
        options = cast(dict[str, object], self._plain(group.value("options")))
        return {**options, "params": [keys[parameter] for parameter in group.texts("params")]}

    def _scaler(self, name: str, document: Document) -> dict[str, object]:
        numbers = cast(dict[str, object], self._plain(document.value("numbers")))
        return numbers | {key: TensorRef(f"{name}.{key}") for key in document.texts("tensors")}

    def _rng(self, name: str, document: Document) -> dict[str, object]:
        found: dict[str, object] = {"torch_cpu": TensorRef(f"{name}.torch_cpu")}
        found |= {key: self._plain(document.value(key)) for key in ("python", "numpy") if key in document}
        if "cuda" in document:
            count = Document(name, document.value("cuda")).count("count")
            found["torch_cuda"] = [TensorRef(f"{name}.torch_cuda.{index}") for index in range(count)]
        return found

    def _history(self, name: str, document: Document) -> dict[str, object]:
        """A series has spare room in its tensors; only what was logged is shown."""
        return {
            key: {part: TensorRef(f"{name}.{key}.{part}", rows=count) for part in ("steps", "values")}
            for key, count in cast(list[tuple[str, int]], document.items("counts"))
        }

    def _plain(self, encoded: object) -> Any:  # whatever was encoded
        return plain(decode_value(encoded, self._decode_other))

    def _plain_key(self, encoded: object) -> object:
        return plain_key(decode_value(encoded, self._decode_other))

    def _decode_other(self, tag: str, content: object) -> object:
        match tag:
            case "$leaf":
                return TensorRef(cast(str, content[0] if isinstance(content, list) else content))
            case "$rawbytes":
                name, kind = cast(list[str], content)
                data = self._read_bytes(name)
                return bytearray(data) if kind == "bytearray" else data
            case "$ndarray":
                fields = cast(dict[str, Any], content)
                inline = fields.get("data")
                data = (
                    self._read_bytes(fields["leaf"])
                    if inline is None
                    else base64.b64decode(inline, validate=True)
                )
                return decode_array(fields["dtype"], tuple(fields["shape"]), data, fields["order"])
            case "$npscalar":
                dtype, text = cast(list[str], content)
                return decode_numpy_scalar(dtype, base64.b64decode(text, validate=True))
            case "$npdtype":
                return str(content)
            case "$torch":
                kind, found = cast(list[object], content)
                return decode_torch(kind, found)
            case "$sparse_coo" | "$sparse_csr":
                return self._sparse(tag, cast(dict[str, Any], content))
            case "$modulestate":
                pairs = cast(list[list[object]], cast(list[object], content)[0])
                keys = _plain_keys(decode_value(key, self._decode_other) for key, _ in pairs)
                return OrderedDict(zip(keys, (self._plain(item) for _, item in pairs), strict=True))
            case _:
                return NotImplemented

    def _sparse(self, tag: str, content: dict[str, Any]) -> SparseRef:
        names = ("indices", "values") if tag == "$sparse_coo" else ("crow", "col", "values")
        return SparseRef(
            layout=torch.sparse_coo if tag == "$sparse_coo" else torch.sparse_csr,
            parts=tuple(self._plain(content[name]) for name in names),
            size=tuple(content["size"]),
            is_coalesced=bool(content.get("coalesced", True)),
        )


def plain(value: object) -> object:
    """Return a value that `weights_only` takes, equal to this one or as near as there is.

    Raises:
        StateTypeError: two keys of a dict, or items of a set, have one such value.
    """
    if isinstance(value, TensorRef | SparseRef | torch.Size):
        return value
    if isinstance(value, dict):
        held = cast(dict[object, object], value)
        items = dict(zip(_plain_keys(held), map(plain, held.values()), strict=True))
        if isinstance(value, Counter):
            return Counter(cast(dict[object, int], items))
        return OrderedDict(items) if isinstance(value, OrderedDict) else items
    if isinstance(value, tuple):
        return tuple(plain(item) for item in cast(tuple[object, ...], value))
    if isinstance(value, list | deque):
        return [plain(item) for item in cast(list[object], value)]
    if isinstance(value, set | frozenset):
        return {*_plain_keys(cast(set[object], value))}
    if type(value) is bytes and not value:  # pickled as a call of `bytes`, which is refused
        return bytearray()
    if type(value) is int and value.bit_length() > _INT_BITS_MAX:
        return hex(value)
    return _without_numpy(value)


def plain_key(value: object) -> object:
    """Return the same of a key, or of what is in a set: something with a hash."""
    if isinstance(value, frozenset):
        return tuple(sorted((plain_key(item) for item in cast(frozenset[object], value)), key=repr))
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(plain_key(item) for item in cast(tuple[object, ...], value))
    made = plain(value)
    return "" if isinstance(made, bytearray) else made


def _plain_keys(keys: Iterable[object]) -> list[object]:
    """Return the plain values of a dict's keys, or of what is in a set: as many."""
    found: dict[object, None] = {}
    for key in keys:
        made = plain_key(key)
        if made in found:
            raise _one_for_two(made)
        found[made] = None
    return [*found]


def _one_for_two(made: object) -> StateTypeError:
    return StateTypeError(
        f"two keys of a dict, or items of a set, become {made!r:.80} in the export, and one of them would be lost",
        hint="export --to safetensors has every value beside the tensors as it is; or save it under other keys",
    )


def _without_numpy(value: Any) -> object:
    if type(value).__module__ != "numpy":
        return value
    kind = value.dtype.kind
    if kind in "mM":  # Python's dates are refused, too
        value = value.astype(str)
    elif kind in "biufc":
        value = value.astype(_NARROWER.get(value.dtype.char, value.dtype.newbyteorder("=")), copy=False)
        if value.shape:
            return cast(Callable[[object], object], torch.from_numpy)(value)
    return plain(value.tolist())  # empty bytes

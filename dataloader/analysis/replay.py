"""A few batches, handed out again and again as if each were new."""

import copy
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, cast

import torch

BATCHES_MAX = 8
BYTES_MAX = 256 * 1024 * 1024
"""Of all kept batches together, beyond the one that must be."""


class Replay:
    """The last batches of a loop.

    Containers are made anew each time, since loops take entries out of them; tensors are the same objects, so that
    pinned memory stays pinned, unless the loop has changed one in place: then it gets a copy.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[object, int]] = deque()
        self._next = 0

    def keep(self, batch: object) -> None:
        """Keep a batch, as it was before the loop got it, and let the oldest go."""
        self._kept.append((_map(batch, _wrapped), _size_bytes(batch)))
        while len(self._kept) > BATCHES_MAX or (
            len(self._kept) > 1 and sum(size for _, size in self._kept) > BYTES_MAX
        ):
            self._kept.popleft()

    def __len__(self) -> int:
        """Return the number of batches kept."""
        return len(self._kept)

    def next(self) -> object:
        """Return the next batch."""
        batch, _ = self._kept[self._next % len(self._kept)]
        self._next += 1
        return _map(batch, _unwrapped)


class _Versioned:
    """A tensor, and its version when it was kept."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = _version(tensor)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]


def _wrapped(item: object) -> object:
    return _Versioned(item) if isinstance(item, torch.Tensor) else item


def _unwrapped(item: object) -> object:
    if not isinstance(item, _Versioned):
        return item
    return item.tensor if _version(item.tensor) == item.version else item.tensor.detach().clone()


def _map(item: Any, leaf: Callable[[object], object]) -> Any:
    """Return the item with containers made anew and `leaf` of all else; other classes of containers are leaves."""
    kind = cast(Any, type)(item)
    if kind is dict:
        return {key: _map(value, leaf) for key, value in cast(dict[object, object], item).items()}
    if kind is list or kind is tuple:
        return cast(object, kind([_map(value, leaf) for value in item]))
    if isinstance(item, tuple) and hasattr(kind, "_fields"):
        return kind(*[_map(value, leaf) for value in cast(tuple[object, ...], item)])
    if isinstance(item, MutableMapping):  # such as transformers' BatchEncoding
        mapping = cast("MutableMapping[object, object]", cast(Any, item))
        made = copy.copy(mapping)
        for key, value in list(made.items()):
            made[key] = _map(value, leaf)
        return made
    return leaf(cast(Any, item))


def _size_bytes(item: object) -> int:
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, Mapping):
        return sum(map(_size_bytes, cast(Mapping[object, object], item).values()))
    if isinstance(item, list | tuple):
        return sum(map(_size_bytes, cast(list[object], item)))
    return 0

"""torchdata's loaders, which go back to where they were only when they are iterated the next time."""

from collections.abc import Callable, Mapping
from typing import Protocol, cast

from .rng_state import generators_kept

_MAKES = "_get_iterator"


class _Replaying(Protocol):
    """What `StatefulDataLoader` has besides torch's."""

    next_iter_state: object
    """What it was given by `load_state_dict`, until an iterator was made from it."""
    _get_iterator: Callable[[], object]


def draw_nothing_when_replayed(objects: Mapping[str, object]) -> None:
    """Let loaders that have just been given their state draw from no global generator when they make that iterator.

    The undisturbed run has made it, and drawn for it, before the boundary that was restored. What a loader draws for
    the iterator behind it, if that one has come to its end, it draws in both.
    """
    for each in objects.values():
        if getattr(each, "next_iter_state", None) is not None and hasattr(each, _MAKES):
            _draw_nothing_once(cast(_Replaying, each))


def _draw_nothing_once(loader: _Replaying) -> None:
    make = loader._get_iterator  # pyright: ignore[reportPrivateUsage]  nothing public is called only then

    def make_once() -> object:
        del vars(loader)[_MAKES]  # the class's own is seen again
        with generators_kept():
            return make()

    vars(loader)[_MAKES] = make_once

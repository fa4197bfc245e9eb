"""The one loader whose position the epochs of a run follow."""

from collections.abc import Callable, Mapping
from typing import Any

from ..dataloader.ledger import Ledger
from ..dataloader.loader import DataLoader
from ..dataloader.shared.shared_loader import SharedLoader

AnyLoader = DataLoader[Any] | SharedLoader[Any]
Place = tuple[int, int]
"""Of a loader: its epoch, and how much of that was handed out."""
LOADERS = (DataLoader, SharedLoader)
"""What is restored to the sample, with a ledger."""


def all_loaders(objects: Mapping[str, object]) -> dict[str, AnyLoader]:
    """Return the attached everstep loaders by name."""
    return {name: value for name, value in objects.items() if isinstance(value, LOADERS)}  # pyright: ignore[reportUnknownVariableType]


def position_loader(objects: Mapping[str, object]) -> AnyLoader | None:
    """Return the attached everstep loader that leads: the one named `loader`, or the only one."""
    named = objects.get("loader")
    if isinstance(named, LOADERS):
        return named  # pyright: ignore[reportUnknownVariableType]
    loaders = list(all_loaders(objects).values())
    return loaders[0] if len(loaders) == 1 else None


def note_on_leading(objects: Mapping[str, object]) -> str:
    """Return, for the log and the report, that nobody says which loader the epochs of the run are; else nothing."""
    names = list(all_loaders(objects))
    if position_loader(objects) is not None or not names:
        return ""
    named = ", ".join(map(repr, names))
    return (
        f"none of the loaders {named} is attached as 'loader': a restart does not know in which epoch they are; attach "
        f"the one that run.epochs() counts under that name, e.g. attach(..., loader={names[0]})"
    )


def loop_of(objects: Mapping[str, object]) -> str | None:
    """Return the name of the loader in whose loop training is, empty for none; None where no loader has moved yet.

    It is that of the leading one, or of another one that has handed out batches since a loop over that has ended.
    """
    loaders, leading = all_loaders(objects), position_loader(objects)
    if not any(loader.moves.has_moved for loader in loaders.values()):
        return None
    begun = {name: loader for name, loader in loaders.items() if not loader.is_at_begin}
    for name, loader in begun.items():
        if loader is leading:
            return name
    since = 0 if leading is None else leading.moves.ended_at
    last = max(begun, key=lambda name: begun[name].moves.handed_at, default="")
    return last if last and begun[last].moves.handed_at > since else ""


def forget_looks(objects: Mapping[str, object]) -> None:
    """Let loaders at their begin count from nothing: somebody may have looked at a batch, and called reset()."""
    for loader in all_loaders(objects).values():
        if loader.place == (0, 0) and loader.in_loop is None:
            loader.ledger = Ledger(loader.seed)


class Unmoved:
    """What is to happen once as training goes on where it was restored: at a loop's first batch, before any boundary.

    What a script draws between restore() and the first batch (any torch DataLoader's iterator does), the undisturbed
    run did not. An inner loop over another loader, which has come to its end, belonged to the batch before the outer
    one's first; in a zip both have begun.
    """

    def __init__(self) -> None:
        self._removers: list[Callable[[], None]] = []

    def on_first_batch(self, loader: AnyLoader, act: Callable[[], object]) -> None:
        """Call `act`, once, when the loader is asked for its next batch."""

        def once() -> None:
            if remove in self._removers:
                self._removers.remove(remove)
                remove()
                act()

        remove = loader.add_first_batch_callback(once)
        self._removers.append(remove)

    def passed(self) -> None:
        """A boundary has passed: what did not happen does not any more."""
        while self._removers:
            self._removers.pop()()

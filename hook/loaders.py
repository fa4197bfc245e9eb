"""The one loader whose position the epochs of a run follow."""

from collections.abc import Mapping
from typing import Any

from ..dataloader.loader import DataLoader
from ..dataloader.shared.shared_loader import SharedLoader
from .rng_state import RngState

AnyLoader = DataLoader[Any] | SharedLoader[Any]
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


def pass_ends(objects: Mapping[str, object]) -> None:
    """Have no loader go on with an empty rest: that of the epoch before.

    One that runs beside the one that leads, in a zip or by next(), is never told that its epoch is over.
    """
    for loader in all_loaders(objects).values():
        loader.pass_end()


def pass_ends_on_first_batch(leading: AnyLoader, objects: Mapping[str, object]) -> None:
    """Do so, once, when the one that leads hands out its next batch.

    An inner loop over another one, which has come to its end, belonged to the batch before. In a zip both have begun.
    """

    def once() -> None:
        remove()
        pass_ends(objects)

    remove = leading.add_first_batch_callback(once)


def put_back_on_first_batch(loader: AnyLoader, rng: RngState) -> None:
    """Set the random generators, once, to what was restored when the loader hands out its next batch.

    Between restore() and the first batch a script draws from them (any torch DataLoader's iterator does), which the
    undisturbed run did not.
    """

    def once() -> None:
        remove()
        rng.apply_again()

    remove = loader.add_first_batch_callback(once)

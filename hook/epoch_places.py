"""The epochs of a run, told from where its loaders stand: in turns, side by side, over and over, or not at all."""

from collections.abc import Mapping

from .loaders import all_loaders, loop_of, position_loader
from .run_state import Places, RunState


def begin_epochs(state: RunState, objects: Mapping[str, object]) -> None:
    """Find the epoch of the run that training is in, and have the loops that the script comes by be what is left of it.

    A loop over the leading loader that has ended since the epoch began is the end of the epoch, unless training was in
    the loop over another one behind it. In its middle it is not, however often that was: a script may train or evaluate
    on all of it several times in an epoch of the run.
    """
    loaders, leading = all_loaders(objects), position_loader(objects)
    has_ended = False
    if leading is not None:
        if state.loader_epoch is None:
            state.epoch, state.loader_epoch = max(state.epoch, leading.epoch), leading.epoch
            if all(each.is_at_begin for each in loaders.values()):
                state.begun = _places(objects)
        has_ended = leading.is_at_begin and leading.epoch > state.loader_epoch
        loop = loop_of(objects)
        if has_ended and loaders.get(state.loop if loop is None else loop, leading) is not leading:
            leading.pass_over()
            return
    if has_ended:
        next_epoch(state, objects)
    for name, loader in loaders.items():
        begun, is_between = state.begun.get(name), leading is not None and leading.is_at_begin
        has_stayed = is_between if begun is None else begun == loader.place
        if has_ended or state.finished or has_stayed:
            loader.pass_end()


def next_epoch(state: RunState, objects: Mapping[str, object]) -> None:
    """The epoch is over, and the next one begins."""
    leading = position_loader(objects)
    state.next_epoch(None if leading is None else leading.epoch, _places(objects))


def _places(objects: Mapping[str, object]) -> Places:
    return {name: loader.place for name, loader in all_loaders(objects).items()}

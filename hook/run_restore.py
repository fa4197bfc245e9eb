"""Bringing the newest complete checkpoint back into the objects of a run, and what its controller had learnt."""

import contextlib
import gc
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..checkpoint.frequency_types import FailureKind
from ..checkpoint.lineage_plan import WENT_BACK_NOTE, Goal, Turn, note_of, turns_of
from ..core.errors import CorruptDataError
from ..proto import frames
from .ledger_merge import adopt_ledgers
from .link import Link
from .load_hooks import call_load_hooks
from .loaders import Unmoved, all_loaders, position_loader
from .pace import Pace
from .rank_protocol import Ranks
from .replayed_loaders import draw_nothing_when_replayed
from .restore import OWN_COMPONENTS, Fetched, Restored, RestoreSearch
from .restore_plan import differing
from .rng_state import RngState
from .run_messages import say_goes_on, say_nothing_restored, say_restored, say_went_back
from .run_state import RunState
from .shard_stream import StreamEvents
from .snapshot import Snapshotter
from .state_protocol import Component


@dataclass(slots=True, kw_only=True)
class RunRestore:
    """One restore of one rank's run, on its training thread."""

    name: str
    attempt: int
    link: Link
    ranks: Ranks
    objects: Mapping[str, object]
    components: Sequence[Component]
    state: RunState
    rng: RngState
    pace: Pace
    snapshotter: Snapshotter
    events: StreamEvents
    unmoved: Unmoved
    goal: Goal | None
    """Where the run goes back to, unless it did."""
    notes: dict[str, str]
    """Of the checkpoints to come."""
    mixture: CorruptDataError | None = None
    """Why the objects are of no use any more; None: they are what they were, or what was restored."""

    def run(self) -> Restored | None:
        """Return what was restored; None when there is nothing. Errors as of `Run.restore`.

        Tensors that it makes are training's, though the script may restore in inference mode.
        """
        with _without_garbage_collector(), torch.inference_mode(mode=False):
            return self._run()

    def _run(self) -> Restored | None:
        began_s = time.perf_counter()
        search = RestoreSearch(
            link=self.link,
            ranks=self.ranks,
            components=self.components,
            attempt=self.attempt,
            events=self.events,
            goal=self.goal,
        )
        found = self._bring_back(search)
        if found is None:
            say_nothing_restored(self.name, self.link)
            return None
        self._note_turn(found, goes_back=search.goes_back)
        self._learn_from(found, goes_back=search.goes_back)
        restored = Restored(
            checkpoint=found.choice.checkpoint,
            step=self.state.step,
            epoch=self.state.epoch,
            source="memory" if found.is_in_memory else "disk",
            restore_s=time.perf_counter() - began_s,
            world_size=found.choice.world_size,
            skipped=tuple(text for each, text in search.skipped.items() if each > found.choice.checkpoint),
            left_as_given=tuple(each.name for each in self.components if found.lacks(each.name)),
            not_attached=tuple(set(found.stored.components) - {each.name for each in self.components}),
        )
        own_values = differing([found.manifest, *found.others], {*OWN_COMPONENTS, *all_loaders(self.objects)})
        say_restored(self.name, restored, found.manifest.notes, self.ranks.world_size, own_values)
        return restored

    def _bring_back(self, search: RestoreSearch) -> Fetched | None:
        found = None
        try:
            found = search.run()
            if found is not None:
                search.is_mixed = True  # until all of it is in its place: an object may refuse its part
                self._apply(found, search)
                search.is_mixed = False
                chosen = found.choice.checkpoint
                restored = frames.Restored(
                    in_memory=found.is_in_memory,
                    checkpoint=(chosen.attempt, chosen.step),
                    goes_back=search.goes_back,
                )
                self.link.tell(restored)  # once its arena is known here: slots come free
        finally:
            if search.is_mixed:
                if found is not None:
                    search.give_back(found)
                self.mixture = CorruptDataError(
                    "restore() failed: the objects hold parts of a checkpoint that could not be restored to its end",
                    hint="build them anew in a new process",
                )
        return found

    def _apply(self, found: Fetched, search: RestoreSearch) -> None:
        same_size = found.choice.world_size == self.ranks.world_size
        for component in self.components:
            if (component is not self.rng or same_size) and not found.lacks(component.name):
                component.apply(found.stored)
        restored = {name: each for name, each in self.objects.items() if not found.lacks(name)}
        call_load_hooks(restored)
        draw_nothing_when_replayed(restored)
        if not same_size:
            loaders = {
                name: loader for name, loader in all_loaders(self.objects).items() if not found.lacks(name)
            }
            adopt_ledgers(loaders, found.others, rank=self.ranks.rank)
        self.rng.apply_again()  # objects may have drawn
        self._await_first_batch()
        if found.is_in_memory:
            found.stored.close()
            self.snapshotter.adopt(found.arena)
        else:
            search.give_back(found)

    def _await_first_batch(self) -> None:
        loaders, leading = all_loaders(self.objects), position_loader(self.objects)
        if (going_on := loaders.get(self.state.loop, leading)) is not None:
            self.unmoved.on_first_batch(going_on, self.rng.apply_again)
        if leading is not None:
            for each in loaders.values():
                self.unmoved.on_first_batch(leading, each.pass_end)

    def _note_turn(self, found: Fetched, *, goes_back: bool) -> None:
        """Let the next checkpoints say where their lineage has gone back."""
        turns = turns_of(found.manifest.notes)
        if goes_back:
            assert self.goal is not None
            turns = (*turns, Turn(attempt=self.attempt, goal=self.goal))
            say_went_back(self.name, self.goal)
        elif self.goal is not None:
            say_goes_on(self.name, self.goal, found.choice.checkpoint)
        if turns:
            self.notes[WENT_BACK_NOTE] = note_of(turns)

    def _learn_from(self, found: Fetched, *, goes_back: bool) -> None:
        """Go on with what the controller has learnt, of what checkpoints cost only if as many ranks wrote it.

        An attempt that did not end by itself has died, and so have all that began after it: they left no checkpoint.
        """
        kind = FailureKind.TRAINER if found.is_in_memory else FailureKind.NODE
        died = self.attempt - found.choice.checkpoint.attempt - self.state.restored_last
        if goes_back:
            died = 0  # nobody knows: some of them have left newer ones
        self.pace.restored(
            self.state.restored_learnt,
            kind if died else None,
            attempts=max(died, 1),
            grown=self.ranks.world_size / found.choice.world_size,
        )


@contextlib.contextmanager
def _without_garbage_collector() -> Generator[None]:
    """Of ten thousand leaves a million objects are made, none of them garbage: looking through them takes long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

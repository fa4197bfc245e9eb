"""Stores whose daemon died in the middle of something: what a recovery finds."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from everstep.checkpoint.collect import collect_garbage
from everstep.checkpoint.collect_plan import plan_collection
from everstep.checkpoint.device_change import retire
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.store import Store
from everstep.checkpoint.testing import (
    CrashedError,
    FaultyStorage,
    Mode,
    State,
    make_state,
    opened,
    save,
    save_again,
)
from everstep.core.errors import StorageError
from everstep.core.ids import CheckpointId

RUN_NAME = "torn"
_NEWEST = CheckpointId(1, 4)
_NEXT = CheckpointId(1, 5)
_KEEP = Keep(last=2)
_CALLS_MAX = 60
"""A scene makes 40 to 60 calls on three devices; a few are over before they are torn."""


@dataclass(slots=True)
class Expected:
    """What must be there afterwards and what may, as `states` says."""

    states: dict[CheckpointId, State] = field(default_factory=dict[CheckpointId, State])
    must: set[CheckpointId] = field(default_factory=set[CheckpointId])
    may: set[CheckpointId] = field(default_factory=set[CheckpointId])

    def unsure(self, checkpoints: set[CheckpointId]) -> None:
        """Nobody promises these any more."""
        self.may |= checkpoints
        self.must -= checkpoints


def tear(directories: Sequence[Path], scene: "Scene", source: random.Random) -> Expected:
    """Make a store in these empty directories, let its daemon die at some call of the scene; return what must hold."""
    expected, storage = Expected(), FaultyStorage(RealStorage())
    with opened(directories, ops=storage.as_ops()) as (store, _):
        run = store.run(os.geteuid(), RUN_NAME, create=True)
        run.begin_attempt(1, fresh=False)
        for step in range(1, _NEWEST.step + 1):
            checkpoint = CheckpointId(1, step)
            expected.states[checkpoint] = make_state(store, step)
            save(run, expected.states[checkpoint], checkpoint)
            run.set_complete_floor(checkpoint)
            expected.must.add(checkpoint)
        storage.arm(source.randint(1, _CALLS_MAX), Mode.CRASH)
        with suppress(CrashedError):
            _PLAY[scene](store, run, expected, source)
        storage.arm(0)
    return expected


class Scene(Enum):
    """What was under way."""

    GENERATION = "a shard was being written"
    SUCCESSION = "a shard was being written again, without a device that failed"
    COLLECTION = "checkpoints were being removed"
    RETIREMENT = "a device was leaving"


def _generation(store: Store, run: RunStore, expected: Expected, _: random.Random) -> None:
    expected.states[_NEXT] = make_state(store, _NEXT.step)
    expected.may.add(_NEXT)
    save(run, expected.states[_NEXT], _NEXT)
    expected.must.add(_NEXT)


def _succession(store: Store, run: RunStore, expected: Expected, source: random.Random) -> None:
    store.mark_suspect(source.choice(store.devices).device_id, StorageError("it failed"))
    save_again(run, expected.states[_NEWEST], _NEWEST)


def _collection(_store: Store, run: RunStore, expected: Expected, _: random.Random) -> None:
    gone = {*plan_collection(run.checkpoints(), floor=run.complete_floor(), keep=_KEEP)}
    expected.unsure(gone)
    collect_garbage(run, keep=_KEEP)
    expected.may -= gone


def _retirement(store: Store, run: RunStore, expected: Expected, source: random.Random) -> None:
    device_id = source.choice(store.devices).device_id
    expected.unsure({*run.held_bytes(device_id)})
    retire(store, device_id, force=True, now_unix_s=1e9)


_PLAY: Mapping[Scene, Callable[[Store, RunStore, Expected, random.Random], None]] = {
    Scene.GENERATION: _generation,
    Scene.SUCCESSION: _succession,
    Scene.COLLECTION: _collection,
    Scene.RETIREMENT: _retirement,
}

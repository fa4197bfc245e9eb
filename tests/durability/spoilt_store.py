"""Stores in which something is spoilt: what must be there all the same, and what fsck must find."""

import os
import random
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from corruptions import Places

from everstep.checkpoint.findings import Severity
from everstep.checkpoint.fsck import FsckReport, fsck
from everstep.checkpoint.leaf import LeafSpec
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import HOLDER, SMALL_LEAVES, State, load, make_state, opened, save
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.errors import DataError, EverstepError, StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()
FIRST, SECOND = CheckpointId(1, 1), CheckpointId(1, 2)
TIME_MAX_S = 5.0
"""For opening, verifying and reading; a loaded machine needs some of it."""

Checkpoints = frozenset[CheckpointId]


@dataclass(frozen=True, slots=True)
class Template:
    """A closed store that is copied for each case."""

    folder: Path
    names: tuple[str, ...]
    states: dict[CheckpointId, State]

    @property
    def original(self) -> Places:
        """What is copied."""
        return Places(tuple(self.folder / "template" / name for name in self.names))

    @contextmanager
    def copy(self) -> Generator[Places]:
        """Give a fresh copy."""
        target = self.folder / "store"
        shutil.copytree(self.folder / "template", target)
        try:
            yield Places(tuple(target / name for name in self.names))
        finally:
            shutil.rmtree(target)


def make_template(
    folder: Path,
    *,
    device_count: int = 2,
    checkpoint_count: int = 2,
    leaves: Sequence[LeafSpec] = SMALL_LEAVES,
    seed: int = 0,
) -> Template:
    """Make a store below a folder, with the checkpoints 1.1, 1.2, ... complete."""
    names = tuple("abcdefgh"[:device_count])
    dirs = [folder / "template" / name for name in names]
    for path in dirs:
        path.mkdir(parents=True)
    states: dict[CheckpointId, State] = {}
    with opened(dirs) as (store, _):
        run = store.run(UID, "demo", create=True)
        run.begin_attempt(1, fresh=False)
        for step in range(1, checkpoint_count + 1):
            checkpoint = CheckpointId(1, step)
            states[checkpoint] = make_state(store, seed + step, leaves)
            save(run, states[checkpoint], checkpoint)
            run.set_complete_floor(checkpoint)
    return Template(folder, names, states)


def is_there(template: Template, run: RunStore, checkpoint: CheckpointId) -> bool:
    """Tell whether a checkpoint is offered and reads back; what verifying and reading say must be the same."""
    if checkpoint not in run.offered():
        return False
    is_intact = verify_checkpoint(run, checkpoint).is_intact
    try:
        content = load(run, run.manifest(checkpoint, 0))
    except (DataError, StorageError):
        assert not is_intact
        return False
    assert content == template.states[checkpoint].content
    assert is_intact
    return True


def survivors(template: Template, places: Places) -> set[CheckpointId] | None:
    """Return the checkpoints that are still there; None when the store is refused."""
    started_s = time.thread_time()
    try:
        with opened(places.dirs) as (store, _):
            runs = store.runs()
            found = {each for each in template.states for run in runs if is_there(template, run, each)}
    except EverstepError:
        found = None
    assert time.thread_time() - started_s < TIME_MAX_S
    return found


def check_opened(template: Template, places: Places, stay: Checkpoints | None, name: str) -> None:
    """Never believed: what is spoilt is not there, `stay` is; None: the whole store may be refused."""
    found = survivors(template, places)
    if stay is not None:
        assert found is not None, name
        assert stay <= found, name
    # Again, as mending has left it.
    again = survivors(template, places) or set[CheckpointId]()
    assert again <= (found or set()), name
    assert stay is None or stay <= again, name


def fsck_of(places: Places, *, repair: bool = False) -> FsckReport:
    """Inspect every byte of a store, or repair it."""
    return fsck(places.dirs, ops=RealStorage(), holder=HOLDER, uid=UID, repair=repair, data=True)


def check_fsck(template: Template, places: Places, stay: Checkpoints | None, name: str) -> None:
    """Found, repaired as far as that goes, and what could be restored before still can."""
    found = fsck_of(places)
    assert found.worst is not Severity.NOTE, name
    assert not found.is_repaired
    repaired = fsck_of(places, repair=True)
    assert repaired.worst is found.worst, name
    again = fsck_of(places)
    repairable = [finding for finding in again.findings if finding.severity is Severity.REPAIRABLE]
    assert not repairable or not repaired.is_repaired, (name, repairable)
    left = survivors(template, places)
    if stay is not None:
        assert left is not None, name
        assert stay <= left, name


@dataclass(frozen=True, slots=True)
class Spot:
    """A file that is spoilt, and which checkpoints must be there all the same."""

    files: Callable[[Places], Sequence[Path]]
    stay: Checkpoints | None
    """None: the whole store may be refused."""


BOTH = frozenset((FIRST, SECOND))


def _small(name: str, devices: Sequence[int], stay: Checkpoints = BOTH) -> Spot:
    return Spot(lambda places: [places.small(each, name) for each in devices], stay)


def _segments(device: int, step: int, stay: Checkpoints) -> Spot:
    return Spot(lambda places: places.segments(device, step), stay)


def _manifests(devices: Sequence[int], step: int, stay: Checkpoints) -> Spot:
    return Spot(lambda places: [places.manifest(each, step) for each in devices], stay)


DISK_ID = Spot(lambda places: [places.small(0, "disk.id")], None)

SPOTS = {
    "segment on a": _segments(0, 2, frozenset((FIRST,))),
    "segment on b": _segments(1, 2, frozenset((FIRST,))),
    "older segment": _segments(0, 1, frozenset((SECOND,))),
    "manifest on a": _manifests([0], 2, BOTH),
    "manifest on b": _manifests([1], 2, BOTH),
    "both manifests": _manifests([0, 1], 2, frozenset((FIRST,))),
    "run.json": _small("run.json", [0]),
    "both run.json": _small("run.json", [0, 1]),
    "attempt": _small("attempts/1", [1]),
    "both attempts": _small("attempts/1", [0, 1]),
    "floor": _small("floor.json", [0]),
    "both floors": _small("floor.json", [0, 1]),
    "disk.id": DISK_ID,
}


def spots(places: Places, steps: Sequence[int]) -> dict[str, Spot]:
    """Return the files of a store of any size: segments, and small files with one or all of their copies."""
    devices = range(len(places.dirs))
    everything = frozenset(CheckpointId(1, step) for step in steps)
    found = {"disk.id": DISK_ID}
    for name in ("run.json", "attempts/1", "floor.json"):
        found[name] = _small(name, devices[-1:], everything)
        found[f"every {name}"] = _small(name, devices, everything)
    for step in steps:
        others = everything - {CheckpointId(1, step)}
        found[f"every manifest of {step}"] = _manifests(devices, step, others)
        for device in devices:
            found[f"manifest of {step} on {device}"] = _manifests([device], step, everything)
            if places.segments(device, step):
                found[f"segments of {step} on {device}"] = _segments(device, step, others)
    return found


def spoil(
    spots_hit: Sequence[Spot],
    changes: Sequence[Callable[[Path, random.Random], None]],
    places: Places,
    source: random.Random,
) -> None:
    """Change the files of each spot by its change; the files are looked for before the first one is changed."""
    found = [
        (path, change) for spot, change in zip(spots_hit, changes, strict=True) for path in spot.files(places)
    ]
    for path, change in dict(found).items():
        change(path, source)

"""Closed stores that are copied for each call that is to fail: plain, with a device that leaves, with one that left."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from everstep.checkpoint.device_change import drain, find_device, retire
from everstep.checkpoint.leaf import LeafSpec, whole_leaf
from everstep.checkpoint.tags import add_tag
from everstep.checkpoint.testing import SMALL_LEAVES, State, make_state, opened, save
from everstep.core.ids import CheckpointId

UID = os.geteuid()
RUN_NAME = "demo"
OLD = tuple(CheckpointId(1, step) for step in range(1, 5))
FLOOR, NEWEST = OLD[2], OLD[3]
NEW = CheckpointId(1, 5)
LEAVES = (*SMALL_LEAVES, *(whole_leaf(f"layer.{number}", "int16", (2500,)) for number in range(4)))


class Kind(Enum):
    """What is the matter with the last device."""

    PLAIN = "nothing"
    LEAVING = "it drains, and may have a part of the first two checkpoints"
    RETIRED = "it has left with them, and is there"


@dataclass(frozen=True, slots=True)
class Template:
    """A store with the checkpoints `OLD`, of which `FLOOR` is complete and has the tag "kept"."""

    folder: Path
    names: tuple[str, ...]
    states: dict[CheckpointId, State]
    """Of `NEW`, too, which is not there yet."""
    whole: frozenset[CheckpointId]
    """What is offered."""

    @property
    def dirs(self) -> list[Path]:
        """The devices that are used."""
        return [self.folder / name for name in self.names]

    def copy(self) -> None:
        """Put all devices back."""
        for path in self.dirs:
            if path.exists():
                shutil.rmtree(path)
            shutil.copytree(self.folder / "template" / path.name, path)


def make_template(
    folder: Path,
    kind: Kind = Kind.PLAIN,
    *,
    device_count: int = 2,
    leaves: Sequence[LeafSpec] = LEAVES,
    seed: int = 0,
) -> Template:
    """Make a store below an empty folder; one device more than `device_count`, unless it is a plain one."""
    names = tuple("abcdefgh"[: device_count + (kind is not Kind.PLAIN)])
    dirs = [folder / name for name in names]
    states: dict[CheckpointId, State] = {}
    for path in dirs:
        path.mkdir(parents=True)
    with opened(dirs) as (store, _):
        run = store.run(UID, RUN_NAME, create=True)
        run.begin_attempt(1, fresh=False)
        last = find_device(store, str(dirs[-1]))
        for checkpoint in (*OLD, NEW):
            states[checkpoint] = make_state(store, seed + checkpoint.step, leaves)
            if checkpoint != NEW:
                save(run, states[checkpoint], checkpoint)
            if checkpoint == OLD[1] and kind is not Kind.PLAIN:
                drain(store, last)
        run.set_complete_floor(OLD[1])
        run.set_complete_floor(FLOOR)
        add_tag(run, "kept", FLOOR)
        if kind is Kind.RETIRED:
            retire(store, last, force=True, now_unix_s=1.0)
        whole = frozenset(run.offered())
    for path in dirs:
        shutil.copytree(path, folder / "template" / path.name)
    assert whole >= set(OLD[2:])
    return Template(folder, names, states, whole)

"""Structures that no write leaves behind: refused with a declared error, or made good by a copy; never believed."""

import os
import random
import re
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from corruptions import (
    CHANGES,
    NEEDS_ROOT,
    Change,
    Places,
    replace_segment,
    resign,
    rewrite_manifests,
    swap,
)
from places import memory_folder

from everstep.checkpoint.findings import Severity
from everstep.checkpoint.fsck import FsckReport, fsck
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import HOLDER, State, load, make_state, opened, save
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.errors import DataError, EverstepError, StorageError
from everstep.core.ids import CheckpointId, random_id

UID = os.geteuid()
FIRST, SECOND = CheckpointId(1, 1), CheckpointId(1, 2)
TIME_MAX_S = 5.0
"""For opening, verifying and reading; a loaded machine needs some of it."""


@dataclass(frozen=True, slots=True)
class Template:
    """A closed store that is copied for each case."""

    folder: Path
    states: dict[CheckpointId, State]

    @contextmanager
    def copy(self) -> Generator[Places]:
        """Give a fresh copy."""
        target = self.folder / "store"
        shutil.copytree(self.folder / "template", target)
        try:
            yield Places((target / "a", target / "b"))
        finally:
            shutil.rmtree(target)


@pytest.fixture(scope="module")
def template() -> Generator[Template]:
    with memory_folder() as folder:
        dirs = [folder / "template" / name for name in "ab"]
        for path in dirs:
            path.mkdir(parents=True)
        with opened(dirs) as (store, _):
            run = store.run(UID, "demo", create=True)
            run.begin_attempt(1, fresh=False)
            states = {checkpoint: make_state(store, checkpoint.step) for checkpoint in (FIRST, SECOND)}
            for checkpoint, state in states.items():
                save(run, state, checkpoint)
                run.set_complete_floor(checkpoint)
        yield Template(folder, states)


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


@dataclass(frozen=True, slots=True)
class Spot:
    """A file that is spoilt, and which checkpoints must be there all the same."""

    files: Callable[[Places], Sequence[Path]]
    stay: frozenset[CheckpointId] | None
    """None: the whole store may be refused."""


def small(name: str, *devices: int) -> Spot:
    return Spot(lambda places: [places.small(device, name) for device in devices], frozenset((FIRST, SECOND)))


SPOTS = {
    "segment on a": Spot(lambda places: [places.segment(0, 2)], frozenset((FIRST,))),
    "segment on b": Spot(lambda places: [places.segment(1, 2)], frozenset((FIRST,))),
    "older segment": Spot(lambda places: [places.segment(0, 1)], frozenset((SECOND,))),
    "manifest on a": Spot(lambda places: [places.manifest(0, 2)], frozenset((FIRST, SECOND))),
    "manifest on b": Spot(lambda places: [places.manifest(1, 2)], frozenset((FIRST, SECOND))),
    "both manifests": Spot(lambda places: [places.manifest(each, 2) for each in (0, 1)], frozenset((FIRST,))),
    "run.json": small("run.json", 0),
    "both run.json": small("run.json", 0, 1),
    "attempt": small("attempts/1", 1),
    "both attempts": small("attempts/1", 0, 1),
    "floor": small("floor.json", 0),
    "both floors": small("floor.json", 0, 1),
    "disk.id": Spot(lambda places: [places.small(0, "disk.id")], None),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_spoilt_file_is_never_believed(template: Template, change: Change) -> None:
    if change in NEEDS_ROOT and os.geteuid() != 0:
        pytest.skip("needs root: device nodes")
    source = random.Random(change.__name__)
    for name, spot in SPOTS.items():
        with template.copy() as places:
            for path in spot.files(places):
                change(path, source)
            found = survivors(template, places)
            if spot.stay is not None:
                assert found is not None, name
                assert spot.stay <= found, name
            # Again, as mending has left it.
            assert (survivors(template, places) or set()) <= (found or set()), name


def swap_checkpoints(places: Places) -> None:
    swap(places.segment(0, 1), places.segment(0, 2))


def swap_devices(places: Places) -> None:
    swap(places.segment(0, 2), places.segment(1, 2))


def old_segment_under_the_new_name(places: Places) -> None:
    shutil.copy(places.segment(0, 1), places.segment(0, 2))


def hard_link_to_another_segment(places: Places) -> None:
    old, new = places.segment(0, 1), places.segment(0, 2)
    new.unlink()
    new.hardlink_to(old)


def old_manifest_under_the_new_name(places: Places) -> None:
    for device in (0, 1):
        shutil.copy(places.manifest(device, 1), places.manifest(device, 2))


def hard_link_to_another_manifest(places: Places) -> None:
    for device in (0, 1):
        new = places.manifest(device, 2)
        new.unlink()
        new.hardlink_to(places.manifest(device, 1))


def another_stamp(field: str, value: str) -> Callable[[Places], None]:
    def change(places: Places) -> None:
        content = places.segment(0, 2).read_bytes()
        pattern = rf'"{field}":"[0-9a-z-]+"'.encode()
        new = f'"{field}":"{value}"'.encode()
        replace_segment(places, 0, 2, re.sub(pattern, new, content, count=1))

    return change


def another_header(old: bytes, new: bytes) -> Callable[[Places], None]:
    """Change the header's text, with a manifest that has the changed file's checksum; its size stays."""

    def change(places: Places) -> None:
        for device in (0, 1):
            content = places.segment(device, 2).read_bytes()
            size = int.from_bytes(content[:8], "little")
            text, count = re.subn(old, new, content[8 : 8 + size].rstrip(), count=1)
            if count and len(text) <= size:
                replace_segment(places, device, 2, content[:8] + text.ljust(size) + content[8 + size :])
                return
        pytest.fail("nothing was changed")

    return change


def another_manifest(old: bytes, new: bytes) -> Callable[[Places], None]:
    def change(places: Places) -> None:
        def substitute(content: bytes) -> bytes:
            changed, count = re.subn(old, new, content[56:], count=1)
            assert count
            return content[:56] + changed

        rewrite_manifests(places, 2, substitute)

    return change


def nested_values(places: Places) -> None:
    rewrite_manifests(
        places, 2, lambda content: content.replace(b'{"epoch":1}', b"[" * 100_000 + b"]" * 100_000)
    )


def manifest_without_end(places: Places) -> None:
    rewrite_manifests(places, 2, lambda content: content + b" " * 1_000 + content[56:])


def manifests_that_differ(places: Places) -> None:
    path = places.manifest(1, 2)
    path.write_bytes(resign(path.read_bytes().replace(b'{"epoch":1}', b'{"epoch":2}')))


STRANGE_ID = random_id().encode()
STRUCTURES: dict[str, Callable[[Places], None]] = {
    "segments of two checkpoints swapped": swap_checkpoints,
    "segments of two devices swapped": swap_devices,
    "old segment under the new name": old_segment_under_the_new_name,
    "hard link to another segment": hard_link_to_another_segment,
    "old manifest under the new name": old_manifest_under_the_new_name,
    "hard link to another manifest": hard_link_to_another_manifest,
    "manifests differ": manifests_that_differ,
    "stamp of another generation": another_stamp("generation", "f" * 32),
    "stamp of another run": another_stamp("run_id", "f" * 32),
    "stamp of another attempt": another_stamp("attempt", f"{2:020d}"),
    "stamp of another step": another_stamp("step", f"{3:020d}"),
    "stamp of another rank": another_stamp("rank", f"{1:020d}"),
    "stamp of another segment": another_stamp("segment", f"{9:020d}"),
    "stamp beyond 63 bits": another_stamp("step", "9" * 20),
    "newer segment format": another_stamp("format", "everstep-segment-v2"),
    "entries overlap": another_header(rb'"data_offsets":\[([1-9]\d*),', rb'"data_offsets":[0,'),
    "entries leave a hole": another_header(rb'"data_offsets":\[0,', rb'"data_offsets":[8,'),
    "entry ends before it begins": another_header(rb'"data_offsets":\[0,\d+\]', rb'"data_offsets":[0,-1]'),
    "entry of an unknown dtype": another_header(rb'"dtype":"\w+"', rb'"dtype":"Q9"'),
    "entry of another shape": another_header(rb'"shape":\[\d+', rb'"shape":[1'),
    "entry of an absurd shape": another_header(rb'"shape":\[', rb'"shape":[9223372036854775807,'),
    "entry of another name": another_header(rb'\},"(\w)', rb'},"_\1'),
    "header is no JSON": another_header(rb"\}\}$", rb"}]"),
    "header is nested": another_header(rb"\}\}$", rb"}," + b'"x":' + b"[" * 2000),
    "no segments": another_manifest(rb'"segments":\[.*\],"values"', rb'"segments":[],"values"'),
    "segment of an unknown device": another_manifest(
        rb'("segments":\[\{"segment":\d+,"device_id":)"\w+"', rb'\1"' + STRANGE_ID + rb'"'
    ),
    "segment of another size": another_manifest(rb'"file_size":\d+', rb'"file_size":4097'),
    "segment of an absurd size": another_manifest(rb'"file_size":\d+', rb'"file_size":9223372036854775807'),
    "no checksums": another_manifest(rb'"xxh3":"\w+"', rb'"xxh3":""'),
    "more checksums": another_manifest(rb'"xxh3":"', rb'"xxh3":"0123456789abcdef'),
    "segment of another generation": another_manifest(
        rb'("segments":\[\{"segment":\d+,"device_id":"\w+","generation":)"\w+"', rb'\1"' + STRANGE_ID + rb'"'
    ),
    "world of nobody": another_manifest(rb'"world_size":\d+', rb'"world_size":0'),
    "another rank": another_manifest(rb'"rank":0', rb'"rank":1'),
    "another run": another_manifest(rb'"run_name":"demo"', rb'"run_name":"other"'),
    "a piece twice": another_manifest(rb'"pieces":\[(\{[^}]+\})', rb'"pieces":[\1,\1'),
    "a piece of nothing": another_manifest(rb'"key":"', rb'"key":"_'),
    "a leaf twice": another_manifest(rb'"name":"model.half"', rb'"name":"model.weight"'),
    "nested values": nested_values,
    "two payloads": manifest_without_end,
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_that_no_write_makes_is_refused(template: Template, name: str) -> None:
    with template.copy() as places:
        STRUCTURES[name](places)
        found = survivors(template, places)
        assert found is not None
        assert SECOND not in found
        assert FIRST in found or name == "segments of two checkpoints swapped"


# --- fsck finds and repairs them -------------------------------------------------------------------------------------


def fsck_of(places: Places, *, repair: bool = False) -> FsckReport:
    return fsck(places.dirs, ops=RealStorage(), holder=HOLDER, uid=UID, repair=repair, data=True)


def check_fsck(template: Template, places: Places, stay: frozenset[CheckpointId] | None, name: str) -> None:
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


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_fsck_finds_a_spoilt_file(template: Template, change: Change) -> None:
    if change in NEEDS_ROOT and os.geteuid() != 0:
        pytest.skip("needs root: device nodes")
    source = random.Random(change.__name__)
    for name, spot in SPOTS.items():
        with template.copy() as places:
            for path in spot.files(places):
                change(path, source)
            check_fsck(template, places, spot.stay, name)


@pytest.mark.parametrize("name", STRUCTURES)
def test_fsck_finds_a_structure_that_no_write_makes(template: Template, name: str) -> None:
    stay = frozenset[CheckpointId]() if name == "segments of two checkpoints swapped" else frozenset((FIRST,))
    with template.copy() as places:
        STRUCTURES[name](places)
        check_fsck(template, places, stay, name)


def test_these_are_two_hundred() -> None:
    assert len(CHANGES) * len(SPOTS) + len(STRUCTURES) >= 200

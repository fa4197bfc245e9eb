"""New segments over files of deleted checkpoints: which files, how many, for whom, and what never happens to others."""

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from everstep.checkpoint.collect import collect_garbage, remove_checkpoint
from everstep.checkpoint.commit import FailedTry
from everstep.checkpoint.device_change import drain
from everstep.checkpoint.findings import Severity
from everstep.checkpoint.fsck import fsck
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.publication import PersistResult
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.segment_format import align_up
from everstep.checkpoint.space_ledger import SPACE_MARGIN_BYTES
from everstep.checkpoint.store import Store
from everstep.checkpoint.testing import HOLDER, FaultyStorage, Mode, State, load, make_state, opened, save
from everstep.core.errors import NoSpaceError, StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()
SEGMENT_COUNT = 4


def at(step: int) -> CheckpointId:
    return CheckpointId(1, step)


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    """As many devices as segments: none takes over what another one waits with."""
    made = [tmp_path / name for name in "abcd"]
    for path in made:
        path.mkdir()
    return made


@pytest.fixture
def faulty() -> FaultyStorage:
    return FaultyStorage(RealStorage())


@pytest.fixture
def store(dirs: list[Path], faulty: FaultyStorage) -> Generator[Store]:
    """Write over old files."""
    with opened(dirs, ops=faulty.as_ops(), recycles=True) as (store, _):
        yield store


@pytest.fixture
def run(store: Store) -> RunStore:
    made = store.run(UID, "demo", create=True)
    made.begin_attempt(1, fresh=False)
    return made


def state(run: RunStore, step: int, elements: int = 21_000) -> State:
    leaves = [whole_leaf(f"weight.{index}", "float32", (elements,)) for index in range(SEGMENT_COUNT)]
    return make_state(run.store, step, leaves, segment_count=SEGMENT_COUNT)


def step(run: RunStore, number: int, elements: int = 21_000) -> PersistResult:
    """Save a checkpoint, complete it, and collect what is older than the one before it."""
    result = save(run, state(run, number, elements), at(number))
    run.set_complete_floor(at(number))
    collect_garbage(run, keep=Keep(last=1))
    return result


def recycled(result: PersistResult) -> tuple[int, int]:
    """Return the bytes written over old files, and all."""
    return sum(write.recycled_bytes for write in result.writes), sum(
        write.size_bytes for write in result.writes
    )


def pool_files(dirs: Sequence[Path]) -> list[Path]:
    return sorted(path for folder in dirs for path in folder.glob("pool/*"))


def segments(run: RunStore, number: int) -> list[Path]:
    return [run.segment_path(ref) for ref in run.shard(at(number), 0).segments]


def test_a_checkpoint_is_written_over_the_files_of_a_deleted_one(run: RunStore, dirs: list[Path]) -> None:
    for number in (1, 2, 3):
        assert recycled(step(run, number))[0] == 0
    inodes = {path.stat().st_ino for path in pool_files(dirs)}
    assert len(inodes) == 4
    assert all(path.stat().st_mode & 0o777 == 0o700 for folder in dirs for path in folder.glob("pool"))
    assert sum(run.store.pool.size_bytes(device.device_id) for device in run.store.devices) == sum(
        align_up(path.stat().st_size) for path in pool_files(dirs)
    )
    again, total = recycled(step(run, 4))
    assert again == total > 0
    assert {path.stat().st_ino for path in segments(run, 4)} == inodes
    for number in (3, 4):
        assert load(run, run.manifest(at(number), 0)) == state(run, number).content


@pytest.mark.parametrize("elements", [20_500, 21_000, 22_000])
def test_a_file_of_nearly_the_same_size_is_cut_or_extended(run: RunStore, elements: int) -> None:
    for number in (1, 2, 3):
        step(run, number)
    again, total = recycled(step(run, 4, elements))
    assert again == total
    assert load(run, run.manifest(at(4), 0)) == state(run, 4, elements).content
    assert sum(path.stat().st_size for path in segments(run, 4)) == total


def test_a_file_of_another_size_is_not_used_and_goes_in_the_end(run: RunStore, dirs: list[Path]) -> None:
    for number in (1, 2, 3):
        step(run, number)
    assert recycled(step(run, 4, 80_000))[0] == 0
    for number in (5, 6):
        step(run, number, 80_000)
    sizes = {path.stat().st_size for path in pool_files(dirs)}
    assert min(sizes) > 40_000


def test_no_more_waits_than_the_last_collected_checkpoint_had(run: RunStore, dirs: list[Path]) -> None:
    for number in range(1, 7):
        save(run, state(run, number), at(number))
    run.set_complete_floor(at(6))
    size_bytes = run.info(at(1)).size_bytes
    assert len(collect_garbage(run, keep=Keep(last=1)).removed) == 4
    assert sum(path.stat().st_size for path in pool_files(dirs)) == size_bytes


def test_without_the_setting_nothing_waits(dirs: list[Path]) -> None:
    with opened(dirs) as (store, _):
        run = store.run(UID, "demo", create=True)
        run.begin_attempt(1, fresh=False)
        for number in (1, 2, 3):
            step(run, number)
    assert not any((folder / "pool").exists() for folder in dirs)


def test_another_users_run_gets_none_of_it(store: Store, run: RunStore) -> None:
    for number in (1, 2, 3):
        step(run, number)
    other = store.run(UID + 1, "theirs", create=True)
    other.begin_attempt(1, fresh=False)
    assert recycled(save(other, state(other, 1), at(1)))[0] == 0
    again, total = recycled(step(run, 4))
    assert again == total


# --- who else has a file ------------------------------------------------------------------------------------------

HOLD_MAPPED = """
import hashlib, mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("mapped", flush=True)
for _ in sys.stdin:
    print(hashlib.sha256(mapped).hexdigest(), flush=True)
"""


def test_what_is_mapped_or_linked_over_a_collection_keeps_its_content(
    run: RunStore, dirs: list[Path], tmp_path: Path
) -> None:
    """A process has a segment mapped, another segment has a second name: both are unlinked, never written over."""
    for number in (1, 2):
        step(run, number)
    mapped, linked, *_ = segments(run, 1)
    mapped_inode, linked_content = mapped.stat().st_ino, linked.read_bytes()
    mapped_sum = hashlib.sha256(mapped.read_bytes()).hexdigest()
    (tmp_path / "backup").hardlink_to(linked)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_MAPPED, mapped],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mapped\n"
        step(run, 3)
        assert not mapped.exists()
        assert not linked.exists()
        waiting = {path.stat().st_ino for path in pool_files(dirs)}
        assert len(waiting) == 2
        assert waiting.isdisjoint({mapped_inode, (tmp_path / "backup").stat().st_ino})
        for number in range(4, 9):
            step(run, number)
            holder.stdin.write("\n")
            assert holder.stdout.readline().strip() == mapped_sum
            assert (tmp_path / "backup").read_bytes() == linked_content
        holder.stdin.close()


def test_what_is_opened_while_it_waits_is_not_written_over(run: RunStore, dirs: list[Path]) -> None:
    """As by a process that had looked the name up before the file moved, and had to wait for the lease."""
    for number in (1, 2, 3):
        step(run, number)
    waiting = pool_files(dirs)
    with waiting[0].open("rb") as held:
        before = held.read()
        again, total = recycled(step(run, 4))
        assert 0 < again < total
        held.seek(0)
        assert held.read() == before
        assert os.fstat(held.fileno()).st_nlink == 0
    assert load(run, run.manifest(at(4), 0)) == state(run, 4).content


@pytest.mark.root
def test_another_user_cannot_enter_the_pool(run: RunStore, dirs: list[Path]) -> None:
    for number in (1, 2, 3):
        step(run, number)
    path = pool_files(dirs)[0]
    dirs[0].chmod(0o755)  # as the user who named it may have it
    code = (
        "import os, sys\n"
        "os.chdir(sys.argv[1])\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for call in (lambda: os.listdir('pool'), lambda: os.open(sys.argv[2], os.O_RDONLY)):\n"
        "    try: call(); print('entered')\n"
        "    except PermissionError: print('refused')\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, dirs[0], f"pool/{path.name}"], capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == ["refused", "refused"]


# --- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_had_is_replaced_by_a_new_one(
    run: RunStore, faulty: FaultyStorage, dirs: list[Path]
) -> None:
    for number in (1, 2, 3):
        step(run, number)
    for path in pool_files(dirs):
        path.unlink()
    assert recycled(step(run, 4))[0] == 0
    for path in pool_files(dirs):
        path.unlink()
    (dirs[0] / "pool").rmdir()
    (dirs[0] / "pool").write_text("in the way")
    for number in (5, 6):
        step(run, number)
    assert run.store.is_whole
    assert load(run, run.manifest(at(6), 0)) == state(run, 6).content


@pytest.mark.parametrize("mode", [Mode.NOT_DONE, Mode.DONE])
def test_a_failed_write_over_old_files_ends_like_any_other(
    run: RunStore, faulty: FaultyStorage, dirs: list[Path], mode: Mode
) -> None:
    """The files of an abandoned generation are unlinked: whoever wrote them may not have finished."""
    for number in (1, 2, 3):
        step(run, number)
    faulty.arm(1, mode, only=lambda call: call.name == "sync_data")
    saved = save(run, state(run, 4), at(4))
    faulty.arm(0)
    assert pool_files(dirs) == []
    assert load(run, saved.manifest) == state(run, 4).content
    assert len(list(dirs[0].parent.glob("?/runs/*/*/data/*/*"))) == 3 * 4


def test_what_a_crash_left_is_never_written_over(run: RunStore, dirs: list[Path]) -> None:
    """Neither orphans nor the files that waited: a process that was killed may still have them open."""
    for number in (1, 2, 3):
        step(run, number)
    kept = {path: path.read_bytes() for path in pool_files(dirs)}
    run.store.close()
    assert pool_files(dirs) == []
    for path, content in kept.items():
        path.write_bytes(content)
    orphan = run.generation_path(run.store.devices[0], "ab" * 16)
    orphan.mkdir()
    (orphan / "0.safetensors").write_bytes(b"x" * 100_000)
    (dirs[0] / "pool" / "notes.txt").write_text("somebody's own")
    with opened(dirs, recycles=True) as (store, report):
        assert report.orphan_count == 1
        assert pool_files(dirs) == [dirs[0] / "pool" / "notes.txt"]
        assert not orphan.exists()
        assert not any(store.pool.size_bytes(device.device_id) for device in store.devices)
        again = store.run(UID, "demo")
        assert recycled(step(again, 4))[0] == 0


def test_fsck_finds_what_a_crash_left_and_removes_it(run: RunStore, dirs: list[Path]) -> None:
    for number in (1, 2, 3):
        step(run, number)
    names = {path: path.read_bytes() for path in pool_files(dirs)}
    run.store.close()
    for path, content in names.items():
        path.write_bytes(content)
    found = fsck(dirs, ops=RealStorage(), holder=HOLDER, uid=UID)
    assert {(finding.severity, finding.path) for finding in found.findings} == {
        (Severity.REPAIRABLE, str(folder / "pool")) for folder in dirs
    }
    assert len(pool_files(dirs)) == len(names)
    fsck(dirs, ops=RealStorage(), holder=HOLDER, uid=UID, repair=True)
    assert pool_files(dirs) == []
    assert fsck(dirs, ops=RealStorage(), holder=HOLDER, uid=UID).findings == ()


def test_a_store_that_is_only_looked_at_keeps_its_pool(run: RunStore, dirs: list[Path]) -> None:
    for number in (1, 2, 3):
        step(run, number)
    before = pool_files(dirs)
    with opened(dirs, read_only=True, recycles=True) as (_, report):
        assert report.findings == []
    assert pool_files(dirs) == before


def test_a_device_that_drains_gets_no_files(store: Store, run: RunStore, dirs: list[Path]) -> None:
    for number in (1, 2):
        step(run, number)
    drain(store, next(each.device_id for each in store.devices if each.path == dirs[1]))
    step(run, 3)
    assert {path.parent.parent for path in pool_files(dirs)} == {dirs[0], *dirs[2:]}


def test_a_full_device_gets_rid_of_files_all_the_same(run: RunStore, faulty: FaultyStorage) -> None:
    for number in (1, 2, 3):
        save(run, state(run, number), at(number))
    faulty.arm(
        1, times=100, number=errno.ENOSPC, only=lambda call: call.name in ("make_directory", "recycle")
    )
    gone = segments(run, 1)
    remove_checkpoint(run, at(1))
    faulty.arm(0)
    assert not any(path.exists() for path in gone)
    assert run.store.may_delete


# --- room ---------------------------------------------------------------------------------------------------------


class FixedSpace(RealStorage):
    """A file system of which so many bytes are free, less what its pools have given back since."""

    def __init__(self) -> None:
        self.free = 1 << 40

    def free_bytes(self, path: Path) -> int:
        return self.free

    def unlink(self, path: Path) -> bool:
        size_bytes = path.stat().st_size if path.exists() else 0
        self.free += size_bytes if path.parent.name == "pool" else 0
        return super().unlink(path)


@pytest.fixture
def space() -> FixedSpace:
    return FixedSpace()


@pytest.fixture
def scarce(dirs: list[Path], space: FixedSpace) -> Generator[RunStore]:
    """A run with files that wait, on devices that are full to the margin but for them."""
    with opened(dirs, ops=space, recycles=True) as (store, _):
        run = store.run(UID, "demo", create=True)
        run.begin_attempt(1, fresh=False)
        for number in (1, 2, 3):
            step(run, number)
        space.free = SPACE_MARGIN_BYTES
        yield run


def test_what_waits_counts_as_room_and_is_written_over(scarce: RunStore, space: FixedSpace) -> None:
    again, total = recycled(save(scarce, state(scarce, 4), at(4)))
    assert again == total
    assert space.free == SPACE_MARGIN_BYTES
    with pytest.raises(NoSpaceError):
        save(scarce, state(scarce, 5), at(5))


def test_what_waits_is_given_back_to_a_new_file_that_needs_the_room(
    scarce: RunStore, space: FixedSpace, dirs: list[Path]
) -> None:
    small = [whole_leaf("weight", "float32", (2000,))]
    assert recycled(save(scarce, make_state(scarce.store, 4, small, segment_count=1), at(4)))[0] == 0
    assert space.free >= SPACE_MARGIN_BYTES + 12_096
    assert len(pool_files(dirs)) == 3


def test_the_margin_for_small_files_stays_free(scarce: RunStore, space: FixedSpace, dirs: list[Path]) -> None:
    space.free = SPACE_MARGIN_BYTES - 1
    with pytest.raises(NoSpaceError):  # a byte is missing, whatever waits
        save(scarce, state(scarce, 4), at(4))
    scarce.store.space.make_room(scarce.store.devices[0])
    assert space.free >= SPACE_MARGIN_BYTES
    assert len(pool_files(dirs)) == 3


def test_a_reservation_that_fails_is_tried_again_without_what_waits(
    run: RunStore, faulty: FaultyStorage, dirs: list[Path]
) -> None:
    for number in (1, 2, 3):
        step(run, number)
    other, failed = state(run, 4, 80_000), list[FailedTry]()
    faulty.arm(1, number=errno.ENOSPC, only=lambda call: call.name == "reserve")
    save(run, other, at(4), on_failed_try=failed.append)
    faulty.arm(0)
    assert failed == []
    assert load(run, run.manifest(at(4), 0)) == other.content
    assert pool_files(dirs) == []
    faulty.arm(1, number=errno.ENOSPC, times=9, only=lambda call: call.name == "reserve")
    with pytest.raises(StorageError):
        save(run, state(run, 5), at(5))

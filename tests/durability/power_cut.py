"""Power cuts under load on the real kernel: write, cut, unmount, mount, recover, compare with what was acknowledged.

Three drives; each cycle is one of `Trial`.
"""

import itertools
import math
import os
import random
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path

from loop_disk import LoopDisk
from oracle import NOBODY, Oracle, Shard
from oracle_members import DRAIN, RETIRE
from places import memory_folder
from power_cut_load import RUN_NAME, WORLD_SIZE, Order, content_of
from power_cut_process import Writer
from summary import Summary

from everstep.checkpoint.catalogue import ShardRecord
from everstep.checkpoint.device import QUARANTINE_NAME
from everstep.checkpoint.manifest_format import decode_manifest_head
from everstep.checkpoint.readmission import RETIRED_SUFFIX
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.recovery_devices import RecoveryReport
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.store import Store
from everstep.checkpoint.testing import load, opened
from everstep.core.errors import EverstepError
from everstep.core.ids import CheckpointId

WRITER = Path(__file__).with_name("power_cut_writer.py")
_DEVICE_COUNT = 3
_FAILURES_MAX = 10
_CYCLES_FOR_ALL = 200
"""After so many cycles, everything that a search should reach was reached."""
_SHARDS_MAX = 12
"""More than a store has whose collections keep up."""
_FLOORS_MAX = 4
"""Acknowledged in one cycle, and nothing was removed: while a device is absent nothing may be."""
_DAWDLING_SHARE = 0.3
"""Of the cycles."""
_DOWN = "down"
_NOT_OFFERED = "is not offered"


class Trial(Enum):
    """What happens in a cycle."""

    TOGETHER = "all drives lose their power, at once or up to 3 ms apart"
    ALONE = "one drive does, the others go on; then they do too"
    CHANGE = (
        "a drive drains, leaves or comes back; meanwhile all lose their power, or one and then the others"
    )


def power_cut(
    kind: str, *, seed: int, cycles: int = sys.maxsize, duration_s: float = math.inf, program: Path = WRITER
) -> Summary:
    """Cut the power again and again, until so many cycles or seconds have passed, and return what was lost."""
    started_s = time.monotonic()
    with _disks(kind) as disks, _writer(program) as writer, ThreadPoolExecutor(_DEVICE_COUNT) as pool:
        session = _Session(disks, writer, random.Random(seed), pool)
        while session.cycle_count < cycles and time.monotonic() - started_s < duration_s:
            session.cycle()
            if len(session.failures) > _FAILURES_MAX:
                break
    counts = session.counts()
    if session.cycle_count >= _CYCLES_FOR_ALL:
        session.failures += [f"never reached: {what}" for what, count in counts.items() if not count]
    return Summary(
        what=f"power cuts on {kind}",
        count=session.cycle_count,
        failures=tuple(session.failures),
        seed=seed,
        counted=counts,
        spent_s=session.spent_s,
    )


class _Session:
    """One store over all cycles, so that its history grows with them; its drives are mounted between them."""

    def __init__(
        self, disks: Sequence[LoopDisk], writer: Writer, source: random.Random, pool: ThreadPoolExecutor
    ) -> None:
        self.oracle = Oracle(WORLD_SIZE)
        self.failures: list[str] = []
        self.cycle_count = 0
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        """Seconds of all cycles, by what they were spent on."""
        self._doing = ""
        self._heard: list[str] = []
        """What the writer has said in this cycle, and when drives were cut."""
        self._read_count = 0
        self._shard_count = 0
        """Of the store, when it was checked last."""
        self._went_on_count = 0
        self._without_count = 0
        self._cut_retirement_count = 0
        self._disks, self._writer, self._random, self._pool = disks, writer, source, pool
        self._is_down = False
        self._directories = tuple((disk.path / "everstep").resolve() for disk in disks)
        for path in self._directories:
            path.mkdir()
            RealStorage().sync_directory(path.parent)  # the user's directories are no part of the promise

    def cycle(self) -> None:
        """Write, cut, mount and check once.

        The drives stay mounted for the next cycle: what recovery mended must be durable by its own doing.
        """
        self.cycle_count += 1
        self._is_down = False
        self._heard = []
        trial = self._random.choice(list(Trial))
        order = self._order(trial)
        self._doing = f"{trial.name} {order.readmit=} {order.changes=} {order.dawdles=}"
        first: int | None = None
        with self._spending("writing"):
            self._writer.start(order)
            if trial is Trial.CHANGE:
                self._wait_for_change()
            else:
                self._wait()
            if trial is Trial.ALONE or (trial is Trial.CHANGE and self._random.random() < 0.3):
                first = self._cut_alone()
        with self._spending("cutting"):
            self._cut(first)
            self._hear_until(lambda _: False)
        with self._spending("mounting"):
            absent = self._mount(first)
        with self._spending("checking"):
            self._check_all(absent)

    @contextmanager
    def _spending(self, what: str) -> Generator[None]:
        started_s = time.monotonic()
        yield
        self.spent_s[what] += time.monotonic() - started_s

    def counts(self) -> dict[str, int]:
        """Return what was reached how often."""
        return {
            "acknowledged": self.oracle.acknowledged_count,
            "shards read back": self._read_count,
            "times the others went on": self._went_on_count,
            "shards written again": self.oracle.again_count,
            "openings without the drive": self._without_count,
            "changes of devices": self.oracle.change_count,
            "retirements cut": self._cut_retirement_count,
            "bytes over files of deleted ones": self.oracle.recycled_bytes,
        }

    # --- the writing process ------------------------------------------------------------------------------------

    def _order(self, trial: Trial) -> Order:
        """Return what the writing process is to do: in a change, the next one that makes sense."""
        members, changes = self.oracle.members, ()
        readmit: int | None = None
        if trial is Trial.CHANGE:
            number = self._random.randrange(_DEVICE_COUNT)
            if members.out:
                readmit = min(members.out)
            elif members.draining:
                changes = ((self._random.choice((RETIRE, RETIRE, "cancel")), min(members.draining)),)
            else:
                both = ((DRAIN, number), (RETIRE, number))
                changes = self._random.choice((both, both[:1], both[1:]))
        dawdles = self._random.random() < _DAWDLING_SHARE
        return Order(directories=self._directories, readmit=readmit, changes=changes, dawdles=dawdles)

    def _wait(self) -> None:
        """Let the writer go on for a random time: from its start, its first acknowledgement, or a collection on.

        Without collections on a busy machine the store would grow, and with it what is read back: of a store that has
        grown something is removed before the cut, or would have been.
        """
        begin = self._random.random()
        if self._shard_count > _SHARDS_MAX:
            floors = itertools.count(1)
            self._hear_until(
                lambda line: (
                    line.startswith("gone") or (line.startswith("floor") and next(floors) == _FLOORS_MAX)
                )
            )
        elif begin < 0.3:
            self._hear_until(lambda line: line.startswith("floor"))
        elif begin < 0.7:
            self._hear_until(lambda _: True)
        time.sleep(self._random.uniform(0, 0.04))

    def _wait_for_change(self) -> None:
        """Let the writer come to a random moment of a change of the devices, or after one."""
        self._hear_until(lambda line: line.startswith("changing"))
        if self._random.random() < 0.4:
            self._hear_until(lambda line: line.startswith(("changed", "failed")))
        time.sleep(self._random.uniform(0, self._random.choice((0.002, 0.03))))

    def _hear_until(self, is_it: Callable[[str], bool]) -> bool:
        """Hear the writer until it says what is meant, or is down; return whether it said that."""
        while not self._is_down:
            line = self._writer.next_line()
            self._note(line)
            if line.startswith(_DOWN):
                self._is_down = True
                if line.split()[1] not in ("StorageError", "DeviceMissingError"):
                    self._fail(line)
                return False
            self.oracle.hear(line)
            if is_it(line):
                return True
        return False

    def _note(self, what: str) -> None:
        self._heard.append(f"{time.monotonic():.4f} {what}")

    # --- the power ----------------------------------------------------------------------------------------------

    def _cut_alone(self) -> int:
        """Cut one drive, let the writer go on without it, and return its number."""
        number = self._random.randrange(_DEVICE_COUNT)
        self._disks[number].cut()
        self._note(f"drive {number} is cut")
        if self._random.random() < 0.8:
            self._went_on_count += self._hear_until(lambda line: _is_saved_without(line, number))
        time.sleep(self._random.uniform(0, 0.02))
        return number

    def _cut(self, first: int | None) -> None:
        """Cut all drives but `first`, which is: at once, or one a little after the other."""
        gap_s = self._random.choice((0.0, 0.0, self._random.uniform(0, 0.003)))
        for disk in self._random.sample(self._disks, len(self._disks)):
            if first is None or disk is not self._disks[first]:
                disk.cut()
                self._note(f"{disk.path.name} is cut")
                time.sleep(gap_s)

    # --- what is there afterwards -------------------------------------------------------------------------------

    def _mount(self, first: int | None) -> frozenset[int]:
        """Mount all drives, sometimes without the one that was cut first; return what is absent then."""
        absent = NOBODY if first is None or self._random.random() < 0.5 else frozenset([first])
        self._cut_retirement_count += bool(self.oracle.members.leaving)
        for _ in self._pool.map(LoopDisk.unmount, self._disks):
            pass
        there = [disk for number, disk in enumerate(self._disks) if number not in absent]
        for _ in self._pool.map(LoopDisk.mount, there):
            pass
        return absent

    def _check_all(self, absent: frozenset[int]) -> None:
        """Check with what is there; when something is absent, then with all drives again."""
        is_born = self.oracle.acknowledged_count > 0
        if absent and is_born and not absent & self.oracle.members.out:
            self._without_count += 1
            self._check(absent)
        for number in absent:
            self._disks[number].mount()
        self._check(NOBODY)
        for path in self._directories:
            for aside in (path / QUARANTINE_NAME).glob(f"*{RETIRED_SUFFIX}"):
                shutil.rmtree(aside)  # what a device held that came back as a new one: nobody needs it

    def _check(self, absent: Collection[int]) -> None:
        try:
            self._compare(absent)
        except EverstepError as exc:
            self._fail(f"without {sorted(absent)}: {exc.code}: {exc}")

    def _compare(self, absent: Collection[int]) -> None:
        with opened(self._directories) as (store, report):
            run = store.run(os.geteuid(), RUN_NAME, create=True)
            if not absent:
                out, draining = self._out(store), self._draining(store)
                for problem in self.oracle.settle(out=out, draining=draining, device_count=_DEVICE_COUNT):
                    self._fail(problem)
            shards = run.shards()
            self._shard_count = len(shards)
            intact: set[Shard] = {
                (shard.checkpoint, shard.rank)
                for shard in shards
                if not shard.problem and self._reads_back(run, shard.checkpoint, shard.rank)
            }
            problems = self.oracle.problems(
                attempt=run.highest_attempt(),
                floor=run.complete_floor(),
                listed=[shard.checkpoint for shard in shards],
                intact=intact,
                absent=absent,
            )
            found = [*problems, *_unexpected(store, report, shards), *_leftovers(run)]
            if found:
                self._fail("; ".join([*_put_aside(self._directories), *self._heard]))
            for problem in found:
                self._fail(problem)

    def _out(self, store: Store) -> set[int]:
        members = {Path(path) for path in store.membership.members.values()}
        return {number for number, path in enumerate(self._directories) if path not in members}

    def _draining(self, store: Store) -> set[int]:
        membership = store.membership
        return {self._directories.index(Path(membership.members[key])) for key in membership.draining}

    def _reads_back(self, run: RunStore, checkpoint: CheckpointId, rank: int) -> bool:
        self._read_count += 1
        if load(run, run.manifest(checkpoint, rank)) == content_of(checkpoint, rank):
            return True
        self._fail(f"rank {rank} of checkpoint {checkpoint} is not what was written")
        return False

    def _fail(self, problem: str) -> None:
        members = self.oracle.members
        self.failures.append(
            f"cycle {self.cycle_count}, {self._doing}, out {sorted(members.out)}, leaving {sorted(members.leaving)}: "
            f"{problem}"
        )


def _is_saved_without(line: str, number: int) -> bool:
    """Tell whether a line acknowledges a shard that does without a device."""
    match line.split():
        case "shard", _, _, devices, _:
            return str(number) not in devices.split(",")
        case _:
            return False


def _unexpected(store: Store, report: RecoveryReport, shards: Sequence[ShardRecord]) -> list[str]:
    """Return what recovery complains of, but for shards with a part on a device that is no member or not there."""
    found = [problem for problem in report.problems if _NOT_OFFERED not in problem]
    found += [
        f"rank {shard.rank} of {shard.checkpoint} is not offered: {shard.problem}"
        for shard in shards
        if shard.problem and all(store.device(ref.device_id) is not None for ref in shard.segments)
    ]
    return [*found, *(["something was put in quarantine"] if report.quarantined_count else [])]


def _put_aside(directories: Sequence[Path]) -> list[str]:
    """Return what the manifests in quarantine say of themselves."""
    found: list[str] = []
    for path in directories:
        for each in sorted((path / QUARANTINE_NAME).glob("*.mf.*")):
            try:
                head = decode_manifest_head(each.read_bytes())
                places = [(part.segment, part.device_id[:4], part.generation[:4]) for part in head.segments]
                said = f"generation {head.generation} of {head.created_unix_s:.4f}, {head.notes}, segments {places}"
            except EverstepError as exc:
                said = str(exc)
            found.append(f"{path.parent.name} {each.name}: {said}")
    return found


def _leftovers(run: RunStore) -> list[str]:
    """Return what nothing refers to: generations that recovery with all devices must have removed, and pools."""
    pools = [path for device in run.store.devices for path in device.pool_path.glob("*")]
    if not run.store.may_delete:
        return [f"{path} is left over" for path in pools]
    kept = {ref.generation for shard in run.shards() for ref in shard.segments}
    return [f"{path} is left over" for path in pools] + [
        f"generation {name} is left over on {device.path}"
        for device in run.store.devices
        for name in run.store.ops.list_directory(run.data_path(device))
        if name not in kept
    ]


@contextmanager
def _disks(kind: str) -> Generator[list[LoopDisk]]:
    with memory_folder() as folder, ExitStack() as stack:
        made: list[LoopDisk] = []
        for number in range(_DEVICE_COUNT):
            made.append(LoopDisk(folder, kind, f"drive{number}"))
            stack.callback(made[-1].remove)
            made[-1].mount()
        yield made


@contextmanager
def _writer(program: Path) -> Generator[Writer]:
    writer = Writer(program, _DEVICE_COUNT)
    try:
        yield writer
    finally:
        writer.close()

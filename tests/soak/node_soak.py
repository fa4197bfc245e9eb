"""A node with trainers under a schedule of faults, watched from outside by the oracle."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from account import unsaid
from drive_filler import empty, fill
from fault_plan import NEEDS_DRIVES, Fault, FaultKind, plan_faults
from holdings import read_holding
from jobs import SPECS, Job
from leak_plan import Holding, held_throughout, leaks
from loop_disk import LoopDisk, missing_tools
from oracle_client import OracleClient
from paired import origin
from places import memory_folder
from scraping import scrape
from soak_record import SoakRecord
from soak_train import digest_of
from summary import Summary

from everstep.checkpoint.catalogue import CheckpointState
from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.events.event_types import EventKind, EventQuery

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parent / "support"
POLL_S = 0.1
READY_S = 60.0
ATTACH_S = 240.0
CALM_AFTER_S = 5.0
"""After a fault, before anybody looks at what the daemon holds."""
SAVED_EACH = 8
"""By then a daemon has all that its trainers need: arenas, staging, kept snapshots."""
LOOKS, LOOK_EVERY_S = 20, 0.05
"""Whatever a daemon holds in all of them."""
EVENTS_S = 10.0
KIND = "ext4"
CALM_TRIES = 200


def drives_reason() -> str:
    """Return why this machine can be given no drives of a soak's own; empty when it can."""
    if os.geteuid():
        return "needs root"
    missing = missing_tools(KIND)
    return f"needs {', '.join(missing)}" if missing else ""


class NodeSoak:
    """One node: two drives, a daemon, its trainers and the oracle."""

    def __init__(self, folder: Path, duration_s: float, seed: int) -> None:
        self._folder, self._seed = folder, seed
        reason = drives_reason()
        kinds = [kind for kind in FaultKind if not reason or kind not in NEEDS_DRIVES]
        self.record = SoakRecord(
            seed=seed,
            duration_s=duration_s,
            origin=origin(),
            left_out=tuple(f"{kind.value} ({reason})" for kind in FaultKind if kind not in kinds),
        )
        self._plan = plan_faults(seed, duration_s, kinds)
        self._drives: list[LoopDisk] = []
        self._directories: list[Path] = []
        self._has_drives = not reason
        # A socket's path ends at 107 bytes.
        self._sockets = Path(tempfile.mkdtemp(prefix="es-soak-"))
        self._socket, self._oracle_socket = self._sockets / "data.sock", self._sockets / "oracle.sock"
        self._stop, self._faults = folder / "stop", folder / "faults"
        self._config = folder / "node.toml"
        self._daemon: subprocess.Popen[bytes] | None = None
        self._daemon_starts = 0
        self._jobs: list[Job] = []
        self._clock_s = 0.0
        self._began_s = 0.0

    # -- the node

    @contextlib.contextmanager
    def _node(self) -> Generator[OracleClient]:
        """Drives, oracle, daemon and trainers; all gone with the block."""
        with contextlib.ExitStack() as held:
            held.callback(shutil.rmtree, self._sockets)
            self._make_drives(held)
            self._faults.mkdir()
            devices = "".join(f'nvme{n} = "{path}"\n' for n, path in enumerate(self._directories))
            self._config.write_text(f'[daemon]\nsocket = "{self._socket}"\n[devices]\n{devices}')
            oracle = held.enter_context(self._oracle())
            held.callback(self._end_all)
            self._start_daemon(oracle)
            storage = [f"nvme{n}" for n in range(len(self._directories))]
            for number, spec in enumerate(SPECS):
                common = ["--oracle", str(self._oracle_socket), "--stop", str(self._stop)]
                # Jobs that share batches have one order, and so one seed.
                seed = 7 if "--group" in spec.arguments else number
                self._jobs.append(
                    Job(spec, [*common, "--seed", str(seed), "--storage", *storage], self._folder)
                )
                self._jobs[-1].start()
            yield oracle

    def _make_drives(self, held: contextlib.ExitStack) -> None:
        for number in range(2):
            name = f"d{number}"
            if self._has_drives:
                drive = LoopDisk(self._folder, KIND, name)
                held.callback(drive.remove)
                drive.mount()
                self._drives.append(drive)
                self._directories.append(drive.path / name)
            else:
                self._directories.append(self._folder / name)
            self._directories[-1].mkdir()

    @contextlib.contextmanager
    def _oracle(self) -> Generator[OracleClient]:
        arguments = [str(HERE / "oracle_process.py"), str(self._oracle_socket), str(self._folder / "journal")]
        with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                client = OracleClient(self._oracle_socket)
                try:
                    yield client
                finally:
                    client.close()
            finally:
                process.kill()

    def _start_daemon(self, oracle: OracleClient) -> None:
        environment = {**os.environ, "SOAK_FAULTS": str(self._faults), "PYTHONPATH": str(SUPPORT)}
        os.environ["EVERSTEP_SOCKET"] = str(self._socket)
        with (self._folder / "daemon.log").open("ab") as log:
            began = log.tell()
            self._daemon = subprocess.Popen(
                [sys.executable, "-P", str(HERE / "soak_daemon.py"), "daemon", "--config", str(self._config)],
                stdout=log,
                stderr=log,
                env=environment,
            )
        self._daemon_starts += 1
        deadline_s = time.monotonic() + READY_S
        while b"daemon_ready" not in (self._folder / "daemon.log").read_bytes()[began:]:
            if self._daemon.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"the daemon does not start:\n{self._daemon_log()}")
            time.sleep(0.02)
        oracle.say("daemon_started")

    def _daemon_log(self) -> str:
        return (self._folder / "daemon.log").read_text(errors="replace")[-4000:]

    def _end_daemon(self, number: int = signal.SIGTERM) -> None:
        assert self._daemon is not None
        self._daemon.send_signal(number)
        self._daemon.wait(READY_S)

    def _end_all(self) -> None:
        for job in self._jobs:
            job.kill()
        if self._daemon is not None and self._daemon.poll() is None:
            self._end_daemon(signal.SIGKILL)

    # -- the soak

    def run(self) -> SoakRecord:
        """Do what the plan says, and return what came of it."""
        with self._node() as oracle:
            self._wait_for_trainers()
            self._began_s = time.monotonic()
            is_calm_at_s = self._now() + CALM_AFTER_S
            for fault in [*self._plan, None]:
                until_s = self.record.duration_s if fault is None else fault.at_s
                self._watch(oracle, until_s, is_calm_at_s)
                if fault is not None:
                    self._do(fault, oracle)
                    self.record.faults.append(fault)
                    is_calm_at_s = self._now() + CALM_AFTER_S
            self._finish(oracle)
            summary = oracle.say("summary")
            self.record.counts, self.record.violations = summary["counts"], summary["violations"]
        self.record.leaks = leaks(self.record.holdings)
        self.record.starts = {job.spec.name: job.starts for job in self._jobs} | {
            "daemon": self._daemon_starts
        }
        return self.record

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _watch(self, oracle: OracleClient, until_s: float, is_calm_at_s: float) -> None:
        """Keep the trainers running; look once at what the daemon holds and lists, when it is calm."""
        has_looked = False
        while self._now() < until_s:
            restarted = [job.keep_running() for job in self._jobs]
            if any(restarted):
                is_calm_at_s = self._now() + CALM_AFTER_S
            if not has_looked and self._now() >= is_calm_at_s and self._all_attached(SAVED_EACH):
                has_looked = True
                self._look(oracle)
            assert self._daemon is not None
            if self._daemon.poll() is not None:
                oracle.say("finding", text=f"the daemon ended by itself:\n{self._daemon_log()}")
                self._start_daemon(oracle)
            time.sleep(POLL_S)

    def _wait_for_trainers(self) -> None:
        """Return when all train: importing torch takes long beside others, and faults are meant for trainers."""
        deadline_s = time.monotonic() + ATTACH_S
        while not self._all_attached():
            assert time.monotonic() < deadline_s, "\n".join(job.log_end() for job in self._jobs)
            for job in self._jobs:
                job.keep_running()
            time.sleep(POLL_S)

    def _all_attached(self, saved_each: int = 0) -> bool:
        """Tell whether every rank is attached and has, on average, saved so often with this daemon.

        With `saved_each`: and has let go of what it kept in memory of an attempt before its own.
        """
        with connected(self._socket) as client:
            status = client.status()
        if saved_each and any(
            slot.checkpoint is not None and slot.checkpoint.attempt < run.attempt
            for run in status.runs
            for rank in run.ranks
            for slot in rank.slots
        ):
            return False
        attached = sum(bool(rank.pid) for run in status.runs for rank in run.ranks)
        wanted = sum(job.spec.ranks for job in self._jobs)
        return attached == wanted and status.daemon.persisted_count >= saved_each * wanted

    def _look(self, oracle: OracleClient) -> None:
        """Compare what the daemon lists and counts with what was acknowledged, and see what it holds."""
        assert self._daemon is not None
        for job in self._jobs:
            oracle.say("listing", run=job.spec.name)
        with connected(self._socket) as client:
            listed = client.checkpoints("")
            for job in self._jobs:
                mine = [each for each in listed if each.run_name == job.spec.name and not each.problems]
                marks = [[each.checkpoint.attempt, each.checkpoint.step] for each in mine]
                oracle.say("listed", run=job.spec.name, complete=marks)
            samples: dict[str, float] = {}
            for _ in range(CALM_TRIES):
                before = client.status().daemon
                samples = scrape(before.metrics_port)
                if client.status().daemon.persisted_count == before.persisted_count:
                    persisted = samples["everstep_shards_persisted_total"]
                    oracle.say("metrics", shards_persisted=persisted, shards_counted=before.persisted_count)
                    break
        self._look_at_events(oracle)
        if samples["everstep_internal_errors_total"]:
            oracle.say(
                "finding", text=f"the daemon has met errors that nobody expected:\n{self._daemon_log()}"
            )
        looks = list[Holding]()
        for _ in range(LOOKS):
            looks.append(read_holding(self._daemon.pid, self._now()))
            time.sleep(LOOK_EVERY_S)
        self.record.holdings.append(held_throughout(looks))

    def _look_at_events(self, oracle: OracleClient) -> None:
        """Compare the daemon's events with what was acknowledged before; the newest may come a moment later."""
        expected: dict[str, list[list[int]]] = oracle.say("expected_events")
        deadline_s = time.monotonic() + EVENTS_S
        # After number 0: a log that has dropped its oldest events says so.
        query = EventQuery(since=0, kinds=frozenset({EventKind.CHECKPOINT_COMPLETE}))
        while True:
            with connected(self._socket) as client:
                events = list(client.events(query))
            is_whole = not any(each.kind is EventKind.MISSED for each in events)
            complete = {
                name: [
                    [each.checkpoint.attempt, each.checkpoint.step]
                    for each in events
                    if each.run_name == name and each.checkpoint is not None
                ]
                for name in expected
            }
            if not any(unsaid(expected[name], complete[name], is_whole=is_whole) for name in expected):
                break
            if time.monotonic() > deadline_s:
                break  # which the oracle finds
            time.sleep(POLL_S)
        for name, marks in expected.items():
            oracle.say("events", run=name, expected=marks, complete=complete[name], is_whole=is_whole)

    # -- faults

    def _do(self, fault: Fault, oracle: OracleClient) -> None:
        """Do it, hold it, undo it."""
        job = self._jobs[fault.target % len(self._jobs)]
        rank = fault.target // len(self._jobs)
        drive = fault.target % len(self._directories)
        assert self._daemon is not None
        match fault.kind:
            case FaultKind.KILL_TRAINER:
                job.signal(signal.SIGKILL, rank)
            case FaultKind.KILL_DAEMON:
                self._end_daemon(signal.SIGKILL)
                self._hold(fault.hold_s)
                self._start_daemon(oracle)
            case FaultKind.STOP_TRAINER:
                job.signal(signal.SIGSTOP, rank)
                self._hold(fault.hold_s)
                job.signal(signal.SIGCONT, rank)
            case FaultKind.STOP_DAEMON:
                self._daemon.send_signal(signal.SIGSTOP)
                self._hold(fault.hold_s)
                self._daemon.send_signal(signal.SIGCONT)
            case FaultKind.FULL_DRIVE:
                fill(self._drives[drive].path)
                self._hold(fault.hold_s)
                empty(self._drives[drive].path)
            case FaultKind.SLOW_DRIVE:
                slow = self._faults / self._directories[drive].name
                slow.write_text(str(fault.amount))
                self._hold(fault.hold_s)
                slow.unlink()
            case FaultKind.LOST_DRIVE:
                self._lose_drive(self._drives[drive], fault.hold_s, oracle)
            case FaultKind.CLOCK_JUMP:
                self._clock_s += fault.amount
                new = self._faults / "clock.new"
                new.write_text(str(self._clock_s))
                new.rename(self._faults / "clock")

    def _lose_drive(self, drive: LoopDisk, hold_s: float, oracle: OracleClient) -> None:
        """It answers EIO from now on; then the node is repaired: the daemon ended, the drive back, a new daemon."""
        drive.cut()
        self._hold(hold_s)
        self._end_daemon()
        drive.unmount()
        drive.mount()
        self._start_daemon(oracle)

    @staticmethod
    def _hold(seconds: float) -> None:
        threading.Event().wait(seconds)

    # -- the end

    def _finish(self, oracle: OracleClient) -> None:
        """Kill the first and the last job, let the others end; then all that was acknowledged is there, bit for bit."""
        for job in (self._jobs[0], self._jobs[-1]):
            job.kill()
        self._stop.touch()
        for job in self._jobs[1:-1]:
            statuses = job.end()
            if any(statuses):
                oracle.say("finding", text=f"{job.spec.name} did not end well: {statuses}\n{job.log_end()}")
        for job in self._jobs:
            for text in job.ended_oddly:
                oracle.say("finding", text=f"{text}\n{job.log_end()}")
        self._end_daemon()
        for job in self._jobs:
            oracle.say("listing", run=job.spec.name)
        self._read_devices(oracle)
        self._start_daemon(oracle)
        for job in self._jobs:  # a restart gets it, too
            job.start("--check")
        for job in self._jobs:
            statuses = job.end()
            if any(statuses):
                oracle.say("finding", text=f"{job.spec.name} cannot be restored: {statuses}\n{job.log_end()}")
        oracle.say("end")

    def _read_devices(self, oracle: OracleClient) -> None:
        """Read every checkpoint without the daemon, and have each state compared."""
        with opened(self._directories, read_only=True) as (store, report):
            for problem in report.problems:
                oracle.say("finding", text=f"opening the store found: {problem}")
            for run in store.runs():
                complete: list[CheckpointId] = []
                for info in run.checkpoints():
                    if info.state is CheckpointState.DAMAGED or not info.is_offered:
                        continue
                    if len(info.ranks) == info.world_size:
                        complete.append(info.checkpoint)
                    for rank in info.ranks:
                        self._compare(
                            oracle,
                            run.name,
                            info.checkpoint,
                            rank,
                            load(run, run.manifest(info.checkpoint, rank)),
                        )
                marks = [[each.attempt, each.step] for each in complete]
                oracle.say("listed", run=run.name, complete=marks)

    @staticmethod
    def _compare(
        oracle: OracleClient, name: str, checkpoint: CheckpointId, rank: int, leaves: dict[str, bytes]
    ) -> None:
        state = {key: each for key, each in leaves.items() if key.startswith(("model.", "optimizer.state."))}
        oracle.say(
            "found",
            run=name,
            rank=rank,
            attempt=checkpoint.attempt,
            step=checkpoint.step,
            digest=digest_of(state),
        )


def soak_node(*, duration_s: float, seed: int, output: Path | None = None) -> Summary:
    """Run a soak for so long, and some seconds more for its end; write its record into `output`."""
    socket = os.environ.get("EVERSTEP_SOCKET")
    try:
        with memory_folder() as folder:
            record = NodeSoak(folder, duration_s, seed).run()
    finally:
        if socket is None:
            os.environ.pop("EVERSTEP_SOCKET", None)
        else:
            os.environ["EVERSTEP_SOCKET"] = socket
    if output is not None:
        record.write(output)
    kinds = Counter(fault.kind.value for fault in record.faults)
    return Summary(
        what="faults of a node that trains",
        count=len(record.faults),
        failures=record.failures,
        seed=seed,
        counted={
            "checkpoints acknowledged": record.counts.get("checkpoints acknowledged", 0),
            "states compared": record.counts.get("states compared", 0),
            "epochs checked": record.counts.get("epochs checked", 0),
            **kinds,
        },
    )

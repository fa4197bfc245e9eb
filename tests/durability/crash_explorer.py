"""Records workloads of the real code, and checks the real recovery on the states that a crash may leave.

python crash_explorer.py --seed 1 --duration 60        one line; exit 1 on any violation
"""

import argparse
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from random import Random

from crash_check import Checker, Recovered, image_text
from crash_plan import CutState, Image, Restart, Step, cuts, losses
from lanes import in_lanes
from model_storage import Fault, ModelStorage, Recorder
from player import Player
from promises import Promise, Witness
from remembered import remembered
from workloads import WORKLOADS, Workload

VIOLATIONS_MAX = 5
"""Told in full; the rest is only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much of what is legal is tried."""

    lanes_max: int = 150
    """Combinations of distances per parallel section."""
    losses_max: int = 20
    """Choices per cut, each also torn."""
    again_share: float = 0.06
    """States in which recovery itself is crashed (power)."""
    process_share: float = 0.7
    """Cuts at which the daemon alone dies first and recovers, and then the power goes."""
    inner_max: int = 8
    """Cuts tried of such a recovery, each with as many losses."""
    without_share: float = 0.25
    """States that are also opened without a device that shards were made independent of."""
    partial_share: float = 0.1
    """States that are also opened with a device missing or unreadable, where the workload asks for it."""


@dataclass(slots=True, kw_only=True)
class Summary:
    """What an exploration found."""

    seed: int
    state_count: int = 0
    """Distinct contents of the devices on which recovery ran."""
    check_count: int = 0
    """Recoveries compared with what was promised."""
    violation_count: int = 0
    violations: list[str] = field(default_factory=list[str])
    """The first few, with what stood on the devices."""
    duration_s: float = 0.0

    @property
    def line(self) -> str:
        """One line for people."""
        return f"crash states {self.state_count}, violations {self.violation_count}, seed {self.seed}"

    def add(self, other: "Summary") -> None:
        """Take another one's counts."""
        self.state_count += other.state_count
        self.check_count += other.check_count
        self.violation_count += other.violation_count
        self.violations = [*self.violations, *other.violations][:VIOLATIONS_MAX]


class Exploration:
    """One workload, recorded once; `run` may be called again with another seed and then tries other choices."""

    def __init__(self, workload: Workload, effort: Effort) -> None:
        self._workload = workload
        self._effort = effort
        self._witness = Witness()
        self._trace, self._start = self._record()
        self._checker = Checker(workload.device_count, self._witness)
        self._checked: set[tuple[int, object]] = set()
        self._images: set[int] = set()
        self._roots: tuple[int, ...] = ModelStorage(workload.device_count).roots
        self._summary = Summary(seed=0)

    def _record(self) -> tuple[list[Step], CutState]:
        """Play the workload; AssertionError or an error of the product when it does not go as it should."""
        storage = ModelStorage(self._workload.device_count)
        player = Player(self._workload, storage, self._witness)
        with in_lanes(storage.recorder, seed=1):
            if not self._workload.from_birth:
                player.open()
            image = storage.image.copy()
            storage.recorder.trace.clear()
            storage.mark(Promise())
            if self._workload.from_birth:
                player.open()
            player.play()
            player.close()
        return storage.recorder.trace, CutState(image, Promise())

    def run(
        self, seed: int, *, deadline_s: float | None = None, violations_max: int | None = None
    ) -> Summary:
        """Check the states that this seed draws; ends early at the deadline (monotonic) or after enough violations."""
        self._summary = Summary(seed=seed)
        rng = Random(f"{seed} {self._workload.name}")
        began_s = time.monotonic()
        with in_lanes(Recorder(), seed), remembered():
            for state in cuts(self._trace, self._start, rng, lanes_max=self._effort.lanes_max):
                self._cut(state, rng)
                found = self._summary.violation_count
                if violations_max is not None and found >= violations_max:
                    break
                if deadline_s is not None and time.monotonic() > deadline_s:
                    break
        self._summary.duration_s = time.monotonic() - began_s
        return self._summary

    def _cut(self, state: CutState, rng: Random) -> None:
        for image in losses(state, rng, count_max=self._effort.losses_max):
            self._state(image, state.promise, rng)
        if rng.random() < self._effort.process_share:
            self._process_crash(state, rng)

    def _state(self, image: Image, promise: object, rng: Random, *, depth: int = 1) -> None:
        """Power loss, recovery; sometimes power loss in that recovery too, or a recovery that sees only a part."""
        recovered = self._check(image, promise, depth)
        if recovered is None or recovered.violations:
            return
        assert isinstance(promise, Promise)
        if promise.dispensable and rng.random() < self._effort.without_share:
            self._without_devices(image, promise)
        if depth < 3 and recovered.trace and rng.random() < self._effort.again_share:
            told = self._told(promise, recovered)
            self._inside(CutState(image, promise), recovered.trace, told, rng, depth)
        if self._workload.partial_views and depth < 2 and rng.random() < self._effort.partial_share:
            for absent, fault in self._parts(rng):
                left, violations = self._checker.with_a_part(image, fault, absent)
                self._report(violations, image, "")
                self._check(left, promise, depth)

    def _without_devices(self, image: Image, promise: Promise) -> None:
        """Open it without each device that some shards can do without."""
        for device in sorted({device for _, device in promise.dispensable}):
            shards = [shard for shard, without in promise.dispensable if without == device]
            violations = self._checker.without(image, device, sorted(shards))
            self._report(violations, image, f"without device {device}, {promise}")

    def _parts(self, rng: Random) -> Iterator[tuple[int | None, Fault | None]]:
        device = rng.randrange(self._workload.device_count)
        yield device, None
        call, part = rng.choice(
            [
                ("list_directory", "/commits"),
                ("read_small", "/commits/"),
                ("list_directory", "/data"),
                ("list_directory", "/runs"),
                ("sync_directory", "/commits"),
            ]
        )
        yield None, Fault(call=call, device=device, part=part, times=1000)

    def _process_crash(self, state: CutState, rng: Random) -> None:
        """The daemon dies, restarts and recovers by what memory shows; then the power goes."""
        assert isinstance(state.promise, Promise)
        recovered = self._check(state.seen(), state.promise, 2, Recorder())
        if recovered is not None and not recovered.violations:
            begun = state.copy()
            begun.advance(Restart())
            self._inside(begun, recovered.trace, self._told(state.promise, recovered), rng, 2)

    def _told(self, promise: Promise, recovered: Recovered) -> Promise:
        return promise.offered(
            recovered.shards,
            recovered.lost,
            device_count=self._workload.device_count,
            out=recovered.out,
            attempt=recovered.attempt,
            floor=recovered.floor,
            tags=recovered.tags,
            damaged=recovered.damaged,
        )

    def _inside(self, start: CutState, trace: Sequence[Step], told: Promise, rng: Random, depth: int) -> None:
        """Cut a recovery that began at `start` somewhere; at its end it has told a trainer what there is."""
        states = list(cuts(trace, start, rng, lanes_max=self._effort.lanes_max))
        end = states.pop()
        end.promise = told
        chosen = rng.sample(states, min(len(states), self._effort.inner_max))
        for state in (*chosen, end):
            for image in losses(state, rng, count_max=self._effort.inner_max):
                self._state(image, state.promise, rng, depth=depth + 1)

    def _check(
        self, image: Image, promise: object, depth: int, recorder: Recorder | None = None
    ) -> Recovered | None:
        """Return the recovery of a state that was not checked before under this promise, else None."""
        assert isinstance(promise, Promise)
        number = image.key(self._roots)
        if recorder is None:
            if (number, promise) in self._checked:
                return None
            self._checked.add((number, promise))
        if number not in self._images:
            self._images.add(number)
            self._summary.state_count += 1
        self._summary.check_count += 1
        recovered = self._checker.check(image, promise, recorder)
        self._report(recovered.violations, image, f"depth {depth}, {promise}")
        return recovered

    def _report(self, violations: Sequence[str], image: Image, where: str) -> None:
        if not violations:
            return
        self._summary.violation_count += 1
        if len(self._summary.violations) < VIOLATIONS_MAX:
            text = image_text(ModelStorage(self._workload.device_count, image))
            self._summary.violations.append(
                f"{self._workload.name}: {'; '.join(violations)}\n {where}\n{text}"
            )


def explore(duration_s: float | None, seed: int, *, jobs: int = 2, effort: Effort | None = None) -> Summary:
    """Explore all workloads in `jobs` processes: once with this seed, or with it and the next ones for that long."""
    began_s = time.monotonic()
    command = [sys.executable, __file__, "--seed", str(seed), "--jobs", str(jobs), "--json"]
    if duration_s is not None:
        command += ["--duration", str(duration_s)]
    if effort is not None:
        command += ["--effort", json.dumps(asdict(effort))]
    running = [
        subprocess.Popen(
            [*command, "--part", str(part)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},  # the product goes through sets, and so does the trace
        )
        for part in range(jobs)
    ]
    summary = Summary(seed=seed)
    try:
        for process in running:
            output, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"an explorer process ended with {process.returncode}")
            summary.add(Summary(**json.loads(output)))
    finally:
        for process in running:  # those that are left when this was interrupted
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    summary.duration_s = time.monotonic() - began_s
    return summary


def explore_part(part: int, jobs: int, seed: int, effort: Effort, duration_s: float | None = None) -> Summary:
    """Explore every `jobs`-th workload, here and now."""
    logging.disable(logging.CRITICAL)  # every second state has something to say
    summary, began_s = Summary(seed=seed), time.monotonic()
    mine = WORKLOADS[part::jobs]
    first = seed % len(mine)  # where time is short, another seed begins with another workload
    explorations = [Exploration(workload, effort) for workload in (*mine[first:], *mine[:first])]
    deadline_s = None if duration_s is None else began_s + duration_s
    for current in itertools.count(seed):
        for exploration in explorations:
            if deadline_s is None or time.monotonic() < deadline_s:
                summary.add(exploration.run(current, deadline_s=deadline_s))
        if deadline_s is None or time.monotonic() >= deadline_s:
            break
    summary.duration_s = time.monotonic() - began_s
    return summary


def main() -> int:
    """Explore as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--duration", type=float, help="seconds; default: one pass over all workloads")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--part", type=int, help="explore this share of the workloads in this process")
    parser.add_argument("--effort", type=json.loads, default={}, help="JSON of Effort")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    given = parser.parse_args()
    effort = Effort(**given.effort)
    if given.part is None:
        summary = explore(given.duration, given.seed, jobs=given.jobs, effort=effort)
    else:
        summary = explore_part(given.part, given.jobs, given.seed, effort, given.duration)
    if given.json:
        print(json.dumps(asdict(summary)))
        return 0
    print(
        summary.line,
        f"recoveries {summary.check_count}, seconds {summary.duration_s:.1f}",
        *summary.violations,
        sep="\n",
    )
    return 1 if summary.violation_count else 0


if __name__ == "__main__":
    sys.exit(main())

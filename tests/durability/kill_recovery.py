"""kill -9 of a daemon that recovers, again and again, until one may finish: nothing is lost, nothing half is there.

Each cycle makes a store whose daemon died in the middle of something (torn_store.py), starts daemons on it that die at
a random call on a device or at a random moment (mortal_daemon.py), lets the last one live, and looks at what it left.
"""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from places import memory_folder
from summary import Summary
from torn_store import RUN_NAME, Expected, Scene, tear

from everstep.checkpoint.findings import Severity
from everstep.checkpoint.fsck import fsck
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.testing import HOLDER, load, opened

DAEMONS = Path(__file__).with_name("mortal_daemon.py")
_KILLS_MAX = 4
_MOMENT_S = 0.1
"""About as long as it takes."""


class _Daemons:
    """The process that starts daemons."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(DAEMONS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, fatal_call: int) -> int:
        """Start a daemon that dies at that call, and return its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(self._config), fatal_call]) + "\n")
        self._process.stdin.flush()
        return int(self.hear("pid")[1])

    def hear(self, *words: str) -> tuple[str, str]:
        """Return the next line with one of these words, and what it says."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            word, _, value = line.strip().partition(" ")
            if word in words:
                return word, value
        raise AssertionError(f"the process that starts daemons ended with {self._process.wait()}")

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class _Session:
    """One store after the other."""

    def __init__(self, folder: Path, source: random.Random) -> None:
        self.failures: list[str] = []
        self.cycle_count = 0
        self.kill_count = 0
        self.ready_count = 0
        """Daemons that were ready before they were to be killed."""
        self._random = source
        self._call_count = 200
        """That many calls on devices a daemon makes until it is ready: what the last one said."""
        self._directories = [folder / name for name in "abc"]
        config = folder / "everstep.toml"
        devices = "\n".join(f'{path.name} = "{path}"' for path in self._directories)
        config.write_text(
            f'[daemon]\nsocket = "{folder / "s" / "data.sock"}"\n[metrics]\nenabled = false\n[devices]\n{devices}\n'
        )
        self._log = config.with_suffix(".log")
        self.daemons = _Daemons(config)

    def cycle(self) -> None:
        """Tear a store, kill those who recover it, and check what the last one leaves."""
        self.cycle_count += 1
        for path in self._directories:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        scene = self._random.choice(list(Scene))
        expected = tear(self._directories, scene, self._random)
        for _ in range(self._random.randint(1, _KILLS_MAX)):
            self._kill_one(scene)
        self._let_one_live(scene)
        self._check(scene, expected)

    def _kill_one(self, scene: Scene) -> None:
        """Start a daemon that dies at one of its calls; sometimes at a moment that it does not know."""
        is_by_call = self._random.random() < 0.7
        pid = self.daemons.start(self._random.randint(1, self._call_count) if is_by_call else 0)
        if is_by_call:
            if self.daemons.hear("ended", "ready")[0] == "ended":
                self.kill_count += 1
                return
            self.ready_count += 1
        else:
            time.sleep(self._random.uniform(0, _MOMENT_S))
        os.kill(pid, signal.SIGKILL)
        _, status = self.daemons.hear("ended")
        self._fail(scene, [] if status == "-9" else [f"a daemon ended by itself with {status}"])
        self.kill_count += 1

    def _let_one_live(self, scene: Scene) -> None:
        pid = self.daemons.start(0)
        word, value = self.daemons.hear("ready", "ended")
        if word == "ended":
            self._fail(scene, [f"the last daemon ended: {self._log.read_text()[-500:]}"])
            return
        self._call_count = int(value)
        os.kill(pid, signal.SIGTERM)
        _, status = self.daemons.hear("ended")
        self._fail(scene, [] if status == "0" else [f"the last daemon ended with {status}"])

    def _check(self, scene: Scene, expected: Expected) -> None:
        uid = os.geteuid()
        report = fsck(self._directories, ops=RealStorage(), holder=HOLDER, uid=uid, data=True)
        is_excused = scene is Scene.RETIREMENT  # what lay on the device that left is lost, and fsck says so
        self._fail(
            scene,
            [
                f"fsck: {finding.problem}"
                for finding in report.findings
                if finding.severity is not Severity.NOTE and not (is_excused and "retired" in finding.problem)
            ],
        )
        with opened(self._directories, read_only=True) as (store, _):
            run = store.run(uid, RUN_NAME)
            offered = set(run.offered())
            found = [f"{checkpoint} is lost" for checkpoint in sorted(expected.must - offered)]
            found += [
                f"{checkpoint} is back" for checkpoint in sorted(offered - expected.must - expected.may)
            ]
            found += [
                f"{checkpoint} has other bytes"
                for checkpoint in sorted(offered)
                if load(run, run.manifest(checkpoint, 0)) != expected.states[checkpoint].content
            ]
        self._fail(scene, found)

    def _fail(self, scene: Scene, problems: Iterable[str]) -> None:
        self.failures += [f"cycle {self.cycle_count}, {scene.value}: {problem}" for problem in problems]


def kill_recovery(*, seed: int, cycles: int = sys.maxsize, duration_s: float = math.inf) -> Summary:
    """Kill daemons that recover, until so many cycles or seconds have passed, and return what was lost."""
    started_s = time.monotonic()
    with memory_folder() as folder:
        session = _Session(folder, random.Random(seed))
        try:
            while session.cycle_count < cycles and time.monotonic() - started_s < duration_s:
                session.cycle()
        finally:
            session.daemons.close()
    return Summary(
        what="kill -9 during recovery",
        count=session.kill_count,
        failures=tuple(session.failures),
        seed=seed,
        counted={"stores": session.cycle_count, "daemons were ready before": session.ready_count},
    )

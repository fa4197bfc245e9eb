"""A daemon that stops, or fails, at a call that a test names; see tests/scripts/pause.py."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Phase:
    """A call; `number` counts those whose printed arguments hold `match`."""

    place: str
    number: int = 1
    match: str = ""
    raises: str = ""
    """The call fails with this exception instead of stopping."""


class Stoppable(Protocol):
    """A process, however it was started."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...


class Pause:
    """Stops one process in a phase."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def environment(self, phase: Phase) -> dict[str, str]:
        return {
            "PAUSE_AT": phase.place,
            "PAUSE_CALL": str(phase.number),
            "PAUSE_MATCH": phase.match,
            "PAUSE_RAISES": phase.raises,
            "PAUSE_FOLDER": str(self.folder),
        }

    def reached(self, process: Stoppable) -> None:
        """Return when the process stands at the call."""
        wait_until(lambda: (self.folder / "reached").exists() or process.poll() is not None)
        assert process.poll() is None, f"it ended with {process.returncode} before the phase"

    def go(self) -> None:
        (self.folder / "go").touch()


def wait_until(reached: Callable[[], bool]) -> None:
    for _ in range(int(DEADLINE_S / 0.01)):
        if reached():
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"did not happen within {DEADLINE_S} s")


@contextlib.contextmanager
def pausing_daemon(
    pause: Pause, phase: Phase, config: Path | None = None
) -> Generator["subprocess.Popen[bytes]"]:
    """The daemon of this test's socket, which stops in the phase; a node daemon where there is a configuration."""
    path = Path(os.environ["EVERSTEP_SOCKET"])
    path.parent.mkdir(mode=0o700, exist_ok=True)
    arguments = ["--private", "--socket", path] if config is None else ["daemon", "--config", config]
    path.with_name("daemon.json").unlink(missing_ok=True)  # that of one before, which was killed
    with path.with_name("daemon.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", SCRIPTS / "pausing_daemon.py", *arguments],
            env=os.environ | pause.environment(phase),
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: path.with_name("daemon.json").exists() or process.poll() is not None)
        assert process.poll() is None, path.with_name("daemon.log").read_text()
        yield process
    finally:
        pause.go()
        if process.poll() is None:
            process.terminate()
        process.wait(DEADLINE_S)

"""`everstep daemon …` whose wall clock and drives a soak can change while it runs: the files of $SOAK_FAULTS.

`clock` holds seconds that are added to the wall clock as the product reads it; gRPC compares it with a clock of its own
below Python, which would not jump with it. Linux lets nobody change the monotonic clock, by which the daemon measures
and waits. A file with the name of a drive's directory holds the bytes per second that the drive moves.
"""

import os
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from bounded_drive import BoundedDrive, BoundedEngine

from everstep.checkpoint.engine_choice import EngineChoice, EngineRules, choose_engine
from everstep.daemon.cli.main import main
from everstep.daemon.devices import stores

FOLDER = Path(os.environ["SOAK_FAULTS"])


def _read(name: str, otherwise: float) -> float:
    try:
        return float((FOLDER / name).read_text() or otherwise)
    except FileNotFoundError:
        return otherwise


class SlowDrive(BoundedDrive):
    """As fast as its file says; without one, as it is."""

    def __init__(self, name: str) -> None:
        super().__init__(0.0)
        self._name = name

    def speed(self) -> float:
        return _read(self._name, 1e12)


class JumpingTime:
    """The module `time`, with a wall clock that has jumped."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def time() -> float:
        return time.time() + _read("clock", 0.0)


def jump_the_clock() -> None:
    """Give every module of the product the jumping clock, and no other module: gRPC compares clocks in C."""
    for name, module in list(sys.modules.items()):
        if name.startswith("everstep.") and getattr(module, "time", None) is time:
            setattr(module, "time", JumpingTime())  # noqa: B010 - a module's global


def choose(path: Path, rules: EngineRules | None = None) -> EngineChoice:
    """Return the engine that the device would have, in front of its drive."""
    choice, drive = choose_engine(path, rules), SlowDrive(path.name)
    return replace(choice, factory=lambda: BoundedEngine(drive, choice.factory()))


if __name__ == "__main__":
    import_module("everstep.daemon.main")  # and with it everything that a daemon runs
    stores.choose_engine = choose
    jump_the_clock()
    sys.exit(main())

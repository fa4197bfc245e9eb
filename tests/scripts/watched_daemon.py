"""`everstep daemon …` on drives that a test holds to a speed and watches; see tests/support/watched_drives.py."""

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

from bounded_drive import BoundedDrive, BoundedEngine

from everstep.checkpoint.engine import Transfer, TransferDone, TransferKind
from everstep.checkpoint.engine_choice import EngineChoice, EngineRules, choose_engine
from everstep.daemon.cli.main import main
from everstep.daemon.devices import stores, turns_machine
from everstep.daemon.devices.device_queue import DeviceQueue
from everstep.daemon.devices.turns_machine import Urgency

FOLDER = Path(os.environ["DRIVES"])
LOG = os.open(FOLDER / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def say(what: str, drive: str, transfer: Transfer) -> None:
    if transfer.kind is TransferKind.WRITE:
        words = what, drive, transfer.arena_fd, transfer.length_bytes, threading.get_ident()
        os.write(LOG, (" ".join(map(str, words)) + "\n").encode())


class WatchedDrive(BoundedDrive):
    def __init__(self, name: str) -> None:
        super().__init__(0.0)
        self._name = name

    def speed(self) -> float:
        while not (speed := float((FOLDER / self._name).read_text() or 0)):
            threading.Event().wait(0.01)
        return speed

    def served(self, transfer: Transfer) -> None:
        say("moved", self._name, transfer)


class WatchedQueue(DeviceQueue):
    def move(self, transfer: Transfer, urgency: Urgency) -> TransferDone:
        say("queued", self.choice.reason, transfer)
        return super().move(transfer, urgency)


def choose(path: Path, rules: EngineRules | None = None) -> EngineChoice:
    """Return the engine that the device would have, in front of its drive."""
    choice, drive = choose_engine(path, rules), WatchedDrive(path.name)
    return replace(choice, reason=path.name, factory=lambda: BoundedEngine(drive, choice.factory()))


if __name__ == "__main__":
    stores.choose_engine, stores.DeviceQueue = choose, WatchedQueue
    if "PIECE_BYTES" in os.environ:
        turns_machine.PIECE_BYTES = int(os.environ["PIECE_BYTES"])
    sys.exit(main())

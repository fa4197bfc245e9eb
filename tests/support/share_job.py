"""A job of a search, as a process of its own: does what it is told over a channel, and says what came of it.

The settings are {"loader": arguments, "log": path, "errors": path, "environment": variables, "hang": sample,
"die": path, "die_at": sample, "kills": sample, "scale": factor, "again_s": seconds}. {"take": n} hands out up to n
batches of the running epoch, {"epochs": n} whole epochs, {"close": True} leaves the group. Samples are (number, what
the random generators give for it); each that is prepared is noted in the log as "number value".

Processes are forked from one that has torch (`start`): importing it takes longer than all that they do.
"""

import logging
import multiprocessing
import os
import random
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from everstep.core.errors import EverstepError
from everstep.dataloader import Ledger, SharedLoader
from everstep.dataloader.shared import supply

SAMPLES = 38
BATCH_SIZE = 4


class Noted:
    """A dataset that writes down what it prepares."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.log = os.open(settings["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        value = random.random() * self.settings.get("scale", 1.0)
        if index == self.settings.get("die_at") and Path(self.settings["die"]).exists():
            Path(self.settings["die"]).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.settings.get("kills"):
            os.write(self.log, b"hangs\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.settings.get("hang"):
            os.write(self.log, b"hangs\n")
            while True:
                signal.pause()
        os.write(self.log, f"{index} {value!r}\n".encode())
        return index, torch.tensor([value], dtype=torch.float64)


def rows(batch: Any) -> list[list[float]]:
    ids, values = batch
    return [[int(i), float(v)] for i, v in zip(ids.tolist(), values[:, 0].tolist(), strict=True)]


def context() -> ForkServerContext:
    """Return what starts processes by forking one that has torch."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["share_job"])
    return found


def start(settings: dict[str, Any]) -> tuple[BaseProcess, Connection]:
    """Start a job; return its process and the channel to it."""
    mine, its = multiprocessing.Pipe()
    process = context().Process(target=run, args=(its, settings))
    process.start()
    its.close()
    return process, mine


def run(channel: Connection, settings: dict[str, Any]) -> None:
    """Do what comes until the channel is closed."""
    os.environ.update(settings["environment"])
    errors = os.open(settings["errors"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(errors, sys.stderr.fileno())
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s", force=True)
    defaults: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 5, "group": "search"}
    defaults["multiprocessing_context"] = "fork"
    loader: SharedLoader[Any] = SharedLoader(Noted(settings), **(defaults | settings["loader"]))
    supply.AGAIN_S = settings.get("again_s", supply.AGAIN_S)
    job = _Job(loader)
    try:
        while True:
            command = channel.recv()
            try:
                channel.send(job.do(command))
            except EverstepError as error:
                job.iterator = None
                channel.send({"error": str(error)})
    except EOFError:
        loader.close()


class _Job:
    def __init__(self, loader: SharedLoader[Any]) -> None:
        self.loader = loader
        self.iterator: Any = None

    def do(self, command: dict[str, Any]) -> object:
        if "take" in command:
            return self._take(command["take"])
        if "epochs" in command:
            return [[row for batch in self.loader for row in rows(batch)] for _ in range(command["epochs"])]
        if "close" in command:
            self.loader.close()
            self.iterator = None
            return None
        if "load" in command:
            self.loader.load_state_dict(command["load"]["state"])
            self.loader.ledger = Ledger.from_state(command["load"]["ledger"])
            return None
        return self._told()

    def _take(self, count: int) -> list[list[list[float]]]:
        self.iterator = self.iterator or iter(self.loader)
        taken: list[list[list[float]]] = []
        for _ in range(count):
            batch = next(self.iterator, None)
            if batch is None:
                self.iterator = None
                break
            taken.append(rows(batch))
        return taken

    def _told(self) -> dict[str, object]:
        state = self.loader.state_dict()
        is_plain = state["format"] == "everstep-loader/1"
        return {
            "state": state,
            "ledger": self.loader.ledger.state(),
            "problems": Ledger.verify([self.loader.ledger], state) if is_plain else [],
            "prepared": self.loader.prepared_count,
            "received": self.loader.received_count,
            "shared": self.loader.is_shared,
            "quarantined": [each.sample for each in self.loader.quarantined],
            "pid": os.getpid(),
        }

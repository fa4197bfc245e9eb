"""A job of a search, as a process of its own: does what it reads on stdin, says on stdout what came of it.

    python share_job.py '{"loader": {…arguments}, "log": path, "hang": sample, "die": path, "scale": 1.0}'

A line {"take": n} hands out up to n batches of the running epoch, {"epochs": n} whole epochs. Samples are (number, what
the random generators give for it); each one that is prepared is noted in the log as "number value process".
"""

import json
import logging
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any, cast

import torch

from everstep.core.errors import EverstepError
from everstep.dataloader import Ledger, SharedLoader

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
        die = self.settings.get("die")
        if index == self.settings.get("die_at") and os.path.exists(die):  # noqa: PTH110
            Path(die).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.settings.get("hang"):
            os.write(self.log, b"hangs\n")
            while True:
                signal.pause()
        os.write(self.log, f"{index} {value!r} {os.getpid()}\n".encode())
        return index, torch.tensor([value], dtype=torch.float64)


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def rows(batch: Any) -> list[list[float]]:
    ids, values = batch
    return [[int(i), float(v)] for i, v in zip(ids.tolist(), values[:, 0].tolist(), strict=True)]


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    settings = json.loads(sys.argv[1])
    defaults: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 5, "group": "search"}
    loader: SharedLoader[Any] = SharedLoader(Noted(settings), **(defaults | settings["loader"]))
    iterator: Any = None
    say("begun")
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "take" in command:
                iterator = iterator or iter(loader)
                taken = [
                    rows(batch) for _ in range(command["take"]) if (batch := next(iterator, None)) is not None
                ]
                iterator = iterator if len(taken) == command["take"] else None
                say(taken)
            elif "epochs" in command:
                say([[row for batch in loader for row in rows(batch)] for _ in range(command["epochs"])])
            elif "load" in command:
                loader.load_state_dict(command["load"]["state"])
                loader.ledger = Ledger.from_state(command["load"]["ledger"])
                say("loaded")
            else:
                state = cast(dict[str, object], loader.state_dict())
                say(
                    {
                        "state": state,
                        "ledger": loader.ledger.state(),
                        "problems": []
                        if state["format"] != "everstep-loader/1"
                        else Ledger.verify([loader.ledger], state),
                        "prepared": loader.prepared_count,
                        "received": loader.received_count,
                        "shared": loader.is_shared,
                    }
                )
        except EverstepError as error:
            iterator = None
            say({"error": str(error)})
    loader.close()


if __name__ == "__main__":
    main()

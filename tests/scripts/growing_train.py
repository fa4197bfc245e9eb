"""A run whose user objects change their size at each step, by the step alone: says what it restored."""

import argparse
import hashlib
import json
import logging
import signal
import sys

import numpy as np
import torch
from torch import nn

import everstep

ROWS = 3000
PEAK = 24
"""Steps after which a shrinking state has nothing left."""


class Growing:
    """A tensor, an array and long bytes, of `rows` rows."""

    def __init__(self) -> None:
        self.set(0, 0)

    def set(self, step: int, rows: int) -> None:
        self.step = step
        self.tensor = torch.arange(rows * ROWS, dtype=torch.float32).reshape(rows, ROWS) + step
        self.array = np.arange(rows * ROWS, dtype=np.int64) * (step + 1)
        self.text = bytes([step % 251]) * (rows * ROWS)

    def state_dict(self) -> dict[str, object]:
        return {"step": self.step, "tensor": self.tensor, "array": self.array, "text": self.text}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)

    @property
    def digest(self) -> str:
        parts = (str(self.step).encode(), self.tensor.numpy().tobytes(), self.array.tobytes(), self.text)
        return hashlib.sha256(b"|".join(parts)).hexdigest()


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--way", choices=["grows", "shrinks", "both"], default="grows")
    arguments = parser.parse_args()
    logging.basicConfig()
    rows_of = {
        "grows": lambda step: step,
        "shrinks": lambda step: PEAK - step,
        "both": lambda step: 8 + 4 * (step % 3),
    }[arguments.way]

    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    growing, expected = Growing(), Growing()
    run = everstep.attach(
        "growing", model=model, optimizer=optimizer, growing=growing, storage=arguments.storage, every=1
    )
    restored = run.restore()
    if restored is not None:
        expected.set(restored.step, rows_of(restored.step))
        say(
            restored=restored.step,
            source=restored.source,
            whole=growing.digest == expected.digest,
            model=model.weight.sum().item(),
        )
    for step in range(run.steps + 1, run.steps + 1 + arguments.steps):
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        growing.set(step, rows_of(step))
        run.step()
        assert run.wait(60)
        report = run.report()
        skipped = sum(each.count for each in report.skipped.values())
        say(
            step=step,
            complete=report.checkpoints_complete,
            skipped=skipped,
            notes=list(report.notes),
            examples=[each.example for each in report.skipped.values()],
            failures=list(report.failures),
            model=model.weight.sum().item(),
        )
    say(ready=True)
    signal.pause()


if __name__ == "__main__":
    main()

"""A run in whose boundaries real signals come at any moment; it trains on, and says what came of it.

The handler calls what waits, which may be refused.
"""

import argparse
import json
import logging
import random
import signal
import sys
import time

import torch
from torch import nn

import everstep
from everstep.core.errors import UsageError

PAUSE_MOST_S = 1.5e-3
DEADLINE_S = 45.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--signals", type=int, default=300)
    parser.add_argument("--handler", choices=["wait", "mutating", "lease"], required=True)
    arguments = parser.parse_args()
    logging.basicConfig()
    draw = random.Random(arguments.seed)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = everstep.attach("stormed", model=model, optimizer=optimizer, storage=arguments.storage, every=1)
    heard = {"answered": 0, "refused": 0}

    def handle(number: int, frame: object) -> None:
        del number, frame
        try:
            if arguments.handler == "wait":
                run.wait(0.01)
            elif arguments.handler == "lease":
                run.lease(3600, ends=False)
            else:
                with run.mutating():
                    pass
            heard["answered"] += 1
        except UsageError:
            heard["refused"] += 1

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()

    signal.signal(signal.SIGALRM, handle)
    until_s = time.monotonic() + DEADLINE_S
    while sum(heard.values()) < arguments.signals and time.monotonic() < until_s:
        before_step = draw.random() < 0.5  # on a slow machine none would come so late after training
        for is_next, part in ((not before_step, train), (before_step, run.step)):
            if is_next:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, PAUSE_MOST_S))
            part()
    signal.setitimer(signal.ITIMER_REAL, 0)

    before, until_s = run.report().checkpoints_complete, time.monotonic() + DEADLINE_S
    while run.report().checkpoints_complete < before + 3 and time.monotonic() < until_s:
        train()
        run.step()
        run.wait(1)
    report, began_s = run.report(), time.monotonic()
    run.close()
    sys.stdout.write(
        json.dumps(
            heard
            | {
                "done": report.checkpoints_complete - before,
                "rank": 0,
                "close_s": time.monotonic() - began_s,
                "skipped": str(report.skipped),
            }
        )
        + "\n"
    )


if __name__ == "__main__":
    main()

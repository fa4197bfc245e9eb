"""One rank of a worker group whose Store outlives it, as torchrun's does; one JSON line on stdout per event.

The process group moves nothing between ranks (torch's "fake" backend): gloo would find the addresses of the dead group
in the Store. What everstep says over the Store is the same.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # pyright: ignore[reportUnusedImport]  registers the backend
from torch import nn
from torch._C._distributed_c10d import TCPStore

import everstep
from everstep.hook import ranks
from everstep.hook.run_checkpoints import RunCheckpoints
from everstep.hook.trainer_testing import daemon_pid


def say(**fields: object) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())


def kill_daemon_at_last() -> None:
    """Kill the daemon at once when this rank has begun its last checkpoint; the next one lives."""
    take_last = RunCheckpoints.take_last
    victims = [daemon_pid]

    def take_and_kill(self: RunCheckpoints, until_s: float) -> bool:
        begun = take_last(self, until_s)
        if victims:
            os.kill(victims.pop()(), signal.SIGKILL)
        return begun

    RunCheckpoints.take_last = take_and_kill


def close_late(late_s: float) -> None:
    """Leave the Store that much later than the others, when all is said and heard."""
    close = ranks.StoreRanks.close

    def close_then(self: ranks.StoreRanks, *, stays: Callable[[], bool] | None = None) -> None:
        time.sleep(late_s)
        close(self, stays=stays)

    ranks.StoreRanks.close = close_then


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", nargs="+", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--late-s", type=float, default=0.0, help="attach that much later than the others")
    parser.add_argument("--until", type=int, default=-1, help="stop and sleep after this step of the lineage")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument(
        "--dies", type=int, nargs=2, default=(-1, -1), metavar=("RANK", "STEP"), help="by SIGKILL"
    )
    parser.add_argument("--serves", action="store_true", help="the Store, too, which ends with this process")
    parser.add_argument("--hears-late-s", type=float, help="look so seldom for what other ranks say")
    parser.add_argument("--closes-late-s", type=float, default=0.0, help="leave the Store that much later")
    parser.add_argument("--kills-daemon", action="store_true", help="as it has begun its last checkpoint")
    parser.add_argument(
        "--destroys-early", action="store_true", help="the process group, before the run ends"
    )
    parser.add_argument("--takes-over", action="store_true")
    parser.add_argument("--notice", help="a file that announces the end, a second before")
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", args.port, None, args.serves, timedelta(seconds=60), wait_for_workers=False)
    if args.serves:
        say(rank=args.rank, port=store.port)
    if args.hears_late_s is not None:
        setattr(ranks, "_POLL_S", args.hears_late_s)  # noqa: B010  what is private
    if args.closes_late_s:
        close_late(args.closes_late_s)
    if args.kills_daemon:
        kill_daemon_at_last()
    dist.init_process_group("fake", store=store, rank=args.rank, world_size=args.world_size)
    del store  # the process group has it
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    time.sleep(args.late_s)
    with everstep.attach(
        "group",
        model=model,
        optimizer=optimizer,
        storage=args.storage,
        every=args.every,
        replicated=True,
        takeover=args.takes_over,
        slots=3,
        preemption=everstep.Preemption(notice_file=args.notice, grace_s=1.0 if args.notice else 30.0),
    ) as run:
        restored = run.restore()
        say(
            rank=args.rank,
            attempt=run.attempt,
            restored=None if restored is None else str(restored.checkpoint),
        )
        for _ in run.epochs(1):
            while run.steps < args.steps:
                time.sleep(args.step_s)
                run.step()
                say(rank=args.rank, step=run.steps)
                if (args.rank, run.steps) == tuple(args.dies):
                    os.kill(os.getpid(), signal.SIGKILL)
                run.wait()
                if run.steps == args.until:
                    say(rank=args.rank, waiting=run.steps)
                    time.sleep(600)
        if args.destroys_early:
            dist.destroy_process_group()
    report = run.report()
    say(
        rank=args.rank,
        done=run.steps,
        complete=report.last_complete,
        failures=list(report.failures),
        skipped={reason.value: each.count for reason, each in report.skipped.items()},
    )
    if not args.destroys_early:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

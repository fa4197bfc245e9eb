"""Clients that never stop asking a daemon, each kind of question in a thread of its own.

    python bench/flood.py SOCKET                 # until it is ended; used by bench/storage.py in a process of its own
    python bench/flood.py SOCKET --count 50      # what each kind costs the daemon, one after the other

What one question of each kind takes of the daemon's processor time (`--count 50`, 2 cores, 2026-11-22):

    status       1 ms   what `everstep status` asks: a few messages, nothing parsed
    scrape       2 ms   Prometheus: the metrics as text
    show        32 ms   the wide checkpoint's overview: 5 MB read and their digest checked, the first leaf decoded
    manifest    28 ms   the same 5 MB for a trainer that restores, which decodes them: read, and their digest checked
"""

import argparse
import contextlib
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path

from meter import cpu_s

from everstep.checkpoint.leaf import whole_leaf
from everstep.core.ids import CheckpointId
from everstep.daemon.control_client import connected
from everstep.daemon.testing import FakeTrainer
from everstep.proto import frames

RUN = "wide"
LEAF_COUNT = 20_000
"""Their manifest has about 5 MB."""
CHECKPOINT = CheckpointId(1, 1)


@contextlib.contextmanager
def flooded(socket_path: Path) -> Generator[None]:
    """Flood the daemon, which has the wide checkpoint, while the block runs."""
    process = subprocess.Popen([sys.executable, __file__, str(socket_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the flood did not begin; its error stands above")
        yield
    finally:
        process.terminate()
        process.wait()


def save_wide(socket_path: Path, storage: list[Path]) -> None:
    """Save a checkpoint of many leaves on these devices of the node."""
    with FakeTrainer(socket_path) as trainer:
        opened = trainer.open_run(storage, name=RUN)
        assert isinstance(opened, frames.RunOpened), opened
        trainer.begin_attempt(1)
        leaves = tuple(whole_leaf(f"model.layers.{n}.weight", "float32", (4,)) for n in range(LEAF_COUNT))
        arena = trainer.make_arena(trainer.layout(leaves), slot_count=1)
        arena.save(CHECKPOINT, seed=1)
        trainer.event(frames.Persisted)
        trainer.ask(frames.Detach(request_id=trainer.number()))
        arena.close()


@contextlib.contextmanager
def questions(socket_path: Path) -> Generator[dict[str, Callable[[], object]]]:
    """Give each kind of question as a call."""
    with connected(socket_path) as client, FakeTrainer(socket_path) as trainer:
        port = client.status().daemon.metrics_port
        assert port, "the daemon serves no metrics: node(serves_metrics=True)"
        opened = trainer.open_run([Path("drive0")], name=RUN)
        assert isinstance(opened, frames.RunOpened), opened

        def scrape() -> int:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                return len(answer.read())

        def manifest() -> int:
            number = trainer.number()
            reply = trainer.ask(
                frames.GetManifest(
                    request_id=number, attempt=CHECKPOINT.attempt, step=CHECKPOINT.step, rank=0
                )
            )
            assert isinstance(reply, frames.ManifestBytes), reply
            return len(reply.manifest)

        yield {
            "status": client.status,
            "scrape": scrape,
            "show": lambda: client.detail(RUN, CHECKPOINT, leaf_count_max=1),
            "manifest": manifest,
        }


def costs(socket_path: Path, count: int) -> dict[str, float]:
    """Return the processor seconds that the daemon takes for one question of each kind."""
    found: dict[str, float] = {}
    with connected(socket_path) as client, questions(socket_path) as kinds:
        pid = client.status().daemon.pid
        for name, question in kinds.items():
            question()
            before_s = cpu_s(pid)
            for _ in range(count):
                question()
            found[name] = (cpu_s(pid) - before_s) / count
    return found


def main() -> None:
    """Ask without end, or so often."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("socket", type=Path)
    parser.add_argument("--count", type=int, default=0, help="ask so often, and say what it costs")
    args = parser.parse_args()
    if args.count:
        for name, each_s in costs(args.socket, args.count).items():
            print(f"{name}: {each_s * 1000:.1f} ms of the daemon's processor time")
        return
    with questions(args.socket) as kinds:
        for question in kinds.values():
            question()
        print("flooding", flush=True)
        threads = [
            threading.Thread(target=_forever, args=(question,), daemon=True) for question in kinds.values()
        ]
        for thread in threads:
            thread.start()
        threads[0].join()


def _forever(question: Callable[[], object]) -> None:
    while True:
        question()


if __name__ == "__main__":
    main()

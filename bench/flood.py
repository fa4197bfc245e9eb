"""Clients that never stop asking a daemon: its status, its metrics, and the description of a very wide checkpoint.

python bench/flood.py SOCKET RUN       # until it is ended; used by bench/storage.py in a process of its own
"""

import contextlib
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path

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
        process.stdout.readline()  # it has begun
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


def main() -> None:
    """Ask without end, each kind in a thread of its own."""
    with connected(Path(sys.argv[1])) as client:
        port = client.status().daemon.metrics_port

        def scrape() -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                answer.read()

        questions: list[Callable[[], object]] = [
            client.status,
            lambda: client.detail(RUN, CHECKPOINT, leaf_count_max=1),
        ]
        if port:
            questions.append(scrape)
        for question in questions:
            question()
        print("flooding", flush=True)
        threads = [threading.Thread(target=_forever, args=(question,), daemon=True) for question in questions]
        for thread in threads:
            thread.start()
        threads[0].join()


def _forever(question: Callable[[], object]) -> None:
    while True:
        question()


if __name__ == "__main__":
    main()

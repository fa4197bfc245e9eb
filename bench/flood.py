"""Clients that never stop asking a daemon, each kind of question in a thread of its own.

    python bench/flood.py SOCKET                 # until its input ends; a process of bench/storage.py
    python bench/flood.py SOCKET --count 50      # what each kind costs the daemon, one after the other

What one question of each kind takes of the daemon's processor time (`--count 50`, 2 cores, 2026-11-22):

    status       1 ms   what `everstep status` asks: a few messages, nothing parsed
    scrape       2 ms   Prometheus: the metrics as text
    show        32 ms   the wide checkpoint's overview: 5 MB read and their digest checked, the first leaf decoded
    manifest    28 ms   the same 5 MB for a trainer that restores, which decodes them: read, and their digest checked
    draft      437 ms   5 MB of JSON sealed, of a layout that is new each time: parsed whole, every leaf checked
                        (20:32 UTC, beside other work; `show` took 38 then)
"""

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meter import cpu_s

from everstep.checkpoint.draft_format import encode_draft
from everstep.checkpoint.leaf import LeafSpec, whole_leaf
from everstep.core.ids import CheckpointId, random_id
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer
from everstep.proto import frames

RUN, CHANGING_RUN = "wide", "changing"
LEAF_COUNT = 20_000
"""Their manifest has about 5 MB, and so has their draft."""
CHECKPOINT = CheckpointId(1, 1)
Questions = dict[str, Callable[[], object]]


@contextlib.contextmanager
def flooded(socket_path: Path, leaf_count: int = LEAF_COUNT) -> Generator[dict[str, int]]:
    """Flood the daemon, which has the wide checkpoint, while the block runs.

    Gives how many questions of each kind were answered, the one under way at the end too; empty until after the block.

    Raises:
        RuntimeError: it did not begin, or a kind of question failed: the process has said why.
    """
    counts: dict[str, int] = {}
    command = [sys.executable, __file__, str(socket_path), "--leaves", str(leaf_count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            if process.stdout.readline() != "flooding\n":
                raise RuntimeError("the flood did not begin; its error stands above")
            yield counts
            process.stdin.close()
            counts.update(json.loads(process.stdout.readline() or "{}"))
            if not counts:
                raise RuntimeError("the flood broke off; its error stands above")
        finally:
            process.terminate()


def wide_leaves(leaf_count: int) -> tuple[LeafSpec, ...]:
    """Return many leaves of a few bytes."""
    return tuple(whole_leaf(f"model.layers.{n}.weight", "float32", (4,)) for n in range(leaf_count))


def save_wide(socket_path: Path, storage: list[Path], leaf_count: int = LEAF_COUNT) -> None:
    """Save a checkpoint of many leaves on these devices of the node."""
    with _trainer(socket_path, RUN, storage) as trainer:
        arena = trainer.make_arena(trainer.layout(wide_leaves(leaf_count)), slot_count=1)
        arena.save(CHECKPOINT, seed=1)
        trainer.event(frames.Persisted)
        trainer.ask(frames.Detach(request_id=trainer.number()))
        arena.close()


@contextlib.contextmanager
def _trainer(socket_path: Path, run: str, storage: list[Path]) -> Generator[FakeTrainer]:
    with FakeTrainer(socket_path) as trainer:
        opened = trainer.open_run(storage, name=run)
        assert isinstance(opened, frames.RunOpened), opened
        trainer.begin_attempt(1)
        yield trainer


class DraftSealer:
    """Seals drafts of many leaves whose layout the daemon has never seen: it parses and checks each whole.

    Each is of another step than it is sealed as, which the daemon finds last and refuses it for: nothing is written,
    so that the drive has no more to do than without.
    """

    def __init__(self, trainer: FakeTrainer, leaf_count: int) -> None:
        self._trainer = trainer
        self._name = "0" * len(random_id())
        changing = whole_leaf(self._name, "float32", (4,))
        layout = trainer.layout((*wide_leaves(leaf_count), changing))
        self._arena = trainer.make_arena(layout, slot_count=1)
        self._draft = encode_draft(self._arena.draft(CheckpointId(1, 0)))

    def next_draft(self) -> bytes:
        """Return a draft in which one leaf, its piece and its place in the segment have a new name."""
        return self._draft.replace(self._name.encode(), random_id().encode())

    def seal(self) -> None:
        """Return when the daemon has read the next one."""
        self._arena.begin(CHECKPOINT)
        self._arena.seal_draft(CHECKPOINT, self.next_draft())
        failed = self._trainer.event(frames.PersistFailed)
        assert isinstance(failed, frames.PersistFailed)
        assert "the draft is of 1.0 " in failed.message, (
            failed
        )  # only one that holds together is asked of what it is
        self._trainer.event(frames.SlotFree)

    def close(self) -> None:
        """Give the arena back."""
        self._trainer.ask(frames.Detach(request_id=self._trainer.number()))
        self._arena.close()


@contextlib.contextmanager
def draft_sealer(
    socket_path: Path, storage: list[Path], leaf_count: int = LEAF_COUNT
) -> Generator[DraftSealer]:
    """Give a sealer with a run of its own on these devices of the node."""
    with (
        _trainer(socket_path, CHANGING_RUN, storage) as trainer,
        contextlib.closing(DraftSealer(trainer, leaf_count)) as made,
    ):
        yield made


@contextlib.contextmanager
def questions(socket_path: Path, leaf_count: int = LEAF_COUNT) -> Generator[Questions]:
    """Give each kind of question as a call."""
    storage = [Path("drive0")]
    with (
        connected(socket_path) as client,
        _trainer(socket_path, RUN, storage) as trainer,
        draft_sealer(socket_path, storage, leaf_count) as sealer,
    ):
        port = client.status().daemon.metrics_port
        assert port, "the daemon serves no metrics: node(serves_metrics=True)"

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
            "draft": sealer.seal,
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
    """Ask until the input ends, or so often."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("socket", type=Path)
    parser.add_argument("--count", type=int, default=0, help="ask so often, and say what it costs")
    parser.add_argument("--leaves", type=int, default=LEAF_COUNT, help="of the drafts")
    args = parser.parse_args()
    if args.count:
        for name, each_s in costs(args.socket, args.count).items():
            print(f"{name}: {each_s * 1000:.1f} ms of the daemon's processor time")
        return
    with questions(args.socket, args.leaves) as kinds:
        for question in kinds.values():
            question()
        counts = _flood(kinds)
    print(json.dumps(counts), flush=True)


def _flood(kinds: Questions) -> dict[str, int]:
    """Ask until standard input ends; return how often."""
    ended = threading.Event()

    def ask_on(question: Callable[[], object]) -> int:
        count = 0
        while True:  # at least once, however late its thread begins
            question()
            count += 1
            if ended.is_set():
                return count

    with ThreadPoolExecutor(len(kinds)) as pool:
        asking = {name: pool.submit(ask_on, question) for name, question in kinds.items()}
        print("flooding", flush=True)
        sys.stdin.read()
        ended.set()
        return {name: each.result() for name, each in asking.items()}


if __name__ == "__main__":
    main()

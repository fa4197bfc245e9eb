"""A block shuffle of real tar shards and Parquet row groups in a real loader: exactly once, and read block by block."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from source_checks import settle
from tars import archive

from everstep.dataloader import BlockShuffle, DataLoader, Ledger
from everstep.dataloader.sources import ParquetSource, SourceDataset, TarSource, open_files
from everstep.dataloader.sources.dataset import Bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning"),
]

BLOCK, BLOCKS, WINDOW, SEED = 16, 12, 3, 5
COUNT = BLOCK * BLOCKS - 2
"""The last block is shorter."""

HELD = 2 * WINDOW
"""Blocks that a process may hold: a batch can lie in two windows."""

PREFETCHED = 64
"""Samples that workers may be ahead of the loop: two ranks, two workers, two batches of 4 each; twice."""

TEXT_CHARS = 1000
Reads = Callable[[], list[tuple[int, str]]]


def number_of(data: Bytes) -> int:
    return int(bytes(data))


def parquet(folder: Path) -> SourceDataset[int]:
    texts = [f"{number:0{TEXT_CHARS}d}" for number in range(COUNT)]
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=BLOCK)
    return parquet_of(folder)


def parquet_of(folder: Path) -> SourceDataset[int]:
    source = ParquetSource(
        folder / "a.parquet", column="text", cache_bytes=HELD * BLOCK * (TEXT_CHARS + 8) + 1000
    )
    return SourceDataset(source, number_of)


def tar(folder: Path) -> SourceDataset[int]:
    for block in range(BLOCKS):
        numbers = range(block * BLOCK, min(COUNT, (block + 1) * BLOCK))
        entries = [(f"{number:06d}.txt", b"%d" % number) for number in numbers]
        (folder / f"{block:02d}.tar").write_bytes(archive(entries))
    settle(*folder.glob("*.tar"))
    return SourceDataset(TarSource(sorted(folder.glob("*.tar")), part="txt"), number_of)


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What was opened or decoded since the last call, by whom: (process, block)."""
    path = tmp_path / "reads"

    def note(block: str) -> None:
        with path.open("a") as file:
            file.write(f"{os.getpid()} {block}\n")

    decode, open_indexed = ParquetSource._decode, open_files.open_indexed

    def decoding(self: ParquetSource, group: int, index: int, opened: Any) -> Any:
        note(str(group))
        return decode(self, group, index, opened)

    def opening(name: str, size_bytes: int, index: int) -> Any:
        note(Path(name).name)
        return open_indexed(name, size_bytes, index)

    monkeypatch.setattr(ParquetSource, "_decode", decoding)
    monkeypatch.setattr(open_files, "open_indexed", opening)
    monkeypatch.setattr(open_files.OpenFiles.__init__, "__defaults__", (HELD,))

    def taken() -> list[tuple[int, str]]:
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [(int(line.split()[0]), line.split()[1]) for line in lines]

    return taken


SOURCES = pytest.mark.parametrize("make", [parquet, tar])


def loaders(dataset: object, ranks: int, workers: int, **more: Any) -> list[DataLoader[Any]]:
    build = cast(Callable[..., DataLoader[Any]], DataLoader)
    arguments: dict[str, Any] = {
        "batch_size": 4,
        "shuffle": BlockShuffle(window=WINDOW),
        "seed": SEED,
        "num_workers": workers,
        "multiprocessing_context": "fork" if workers else None,
    }
    return [build(dataset, rank=rank, world_size=ranks, **(arguments | more)) for rank in range(ranks)]


def steps_of(all_ranks: list[DataLoader[Any]], count: int | None = None) -> list[int]:
    """The ids that all ranks get in the next steps, or to the end of the epoch, less padding."""
    seen: list[int] = []
    iterators = [iter(loader) for loader in all_ranks]
    step = 0
    while step != count:
        step += 1
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            break
        for loader, batch in zip(all_ranks, batches, strict=True):
            seen += cast(torch.Tensor, batch).tolist() if loader.weight else []
    return seen


@SOURCES
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 1)])
def test_each_process_reads_each_block_once(
    tmp_path: Path, reads: Reads, make: Callable[[Path], SourceDataset[int]], ranks: int, workers: int
) -> None:
    dataset = make(tmp_path)
    reads()
    all_ranks = loaders(dataset, ranks, workers)
    assert sorted(steps_of(all_ranks)) == list(range(COUNT))
    assert Ledger.verify([each.ledger for each in all_ranks], all_ranks[0].state_dict()) == []
    blocked = reads()
    assert max(Counter(blocked).values()) == 1, "no process reads a block twice"
    assert len({block for _, block in blocked}) == BLOCKS
    processes = ranks * max(1, workers) if workers else 1
    assert BLOCKS <= len(blocked) <= processes * BLOCKS

    uniform = loaders(dataset, ranks, workers, shuffle=True)
    assert sorted(steps_of(uniform)) == list(range(COUNT))
    assert len(reads()) > 2 * processes * BLOCKS, "which is what the blocks are for"


@SOURCES
def test_other_ranks_and_workers_after_each_resume(
    tmp_path: Path, reads: Reads, make: Callable[[Path], SourceDataset[int]]
) -> None:
    """With a worker killed on the way. A resume in a window reads the window's blocks again, and none before it."""
    dataset = make(tmp_path)
    state, total, seen = loaders(dataset, 1, 0)[0].state_dict(), Ledger(SEED), list[int]()
    reads()
    for ranks, workers, count in [(2, 1, 5), (1, 2, 9), (3, 0, 3), (2, 2, None)]:
        all_ranks = loaders(dataset, ranks, workers, persistent_workers=workers > 0)
        for loader in all_ranks:
            loader.load_state_dict(json.loads(json.dumps(state)))
            loader.ledger = Ledger(SEED)
        all_ranks[0].ledger = total
        first = cast(int, state["cursor"]) // (WINDOW * BLOCK)
        seen += steps_of(all_ranks, count)
        if count is not None and workers:
            pool = all_ranks[0]._supply.pool
            assert pool is not None
            os.kill(pool.pids[0], signal.SIGKILL)
            with pytest.warns(UserWarning, match="goes on with epoch 0"):
                seen += steps_of(all_ranks, 1)
        state = all_ranks[0].state_dict()
        total = Ledger(SEED)
        for loader in all_ranks:
            total.merge(loader.ledger)
        read = {block for _, block in reads()}
        if state["epoch"] == 0:
            last = (cast(int, state["cursor"]) + PREFETCHED) // (WINDOW * BLOCK)
            assert len(read) <= (last - first + 1) * WINDOW
    assert sorted(seen) == list(range(COUNT))
    assert Ledger.verify([total], state) == []


SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from everstep.dataloader import BlockShuffle, DataLoader, Ledger
from everstep.dataloader.sources import ParquetSource, SourceDataset

data, stored, workers, fuse = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
loader = DataLoader(SourceDataset(ParquetSource(data, column="text"), lambda data: int(bytes(data))), batch_size=4,
                    shuffle=BlockShuffle(window=3), seed=5, num_workers=workers)
trained = []
if stored.exists():
    trained, state, ledger = json.loads(stored.read_text())
    loader.load_state_dict(state)
    loader.ledger = Ledger.from_state(ledger)
for step, batch in enumerate(loader):
    if step == fuse:
        os.kill(os.getpid(), signal.SIGKILL)
    trained += batch.tolist()
    new = stored.with_suffix(".new")
    new.write_text(json.dumps([trained, loader.state_dict(), loader.ledger.state()]))
    new.replace(stored)
stored.write_text(json.dumps([trained, loader.state_dict(), loader.ledger.state()]))
"""


def test_a_killed_trainer_goes_on(tmp_path: Path) -> None:
    (expected,) = loaders(parquet(tmp_path), 1, 0)
    order, stored = steps_of([expected]), tmp_path / "state"
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "a.parquet"), str(stored)]
    killed = subprocess.run([*command, "2", "17"], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert json.loads(stored.read_text())[0] == order[: 17 * 4]
    subprocess.run([*command, "0", "-1"], check=True, timeout=60)
    trained, state, ledger = json.loads(stored.read_text())
    assert trained == order
    assert Ledger.verify([Ledger.from_state(ledger)], state) == []

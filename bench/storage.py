"""make bench-storage: how near to the drives' own speed everstep writes and reads, beside what users pick instead.

Ratios taken in one run (bench/paired.py); fio is the drives' own speed: the best of its block sizes, depths and kinds
of memory. The rig (bench/rig.py, root) gives several drives of a known speed; without root only the disk is measured.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Sequence
from itertools import product
from pathlib import Path

import torch
from node import node
from paired import Row, interleaved, publish, ratios, row
from rich.console import Console
from rig import MB, RigError, fio, rig
from rivals import RIVALS, speed, state_of

import everstep
from everstep.daemon.testing import daemon_process

RIG_SPEEDS = {1: 200, 2: 200, 4: 200, 8: 100}
"""MB/s of each drive, by their number: what memory of this size can back for ten seconds."""
SAMPLE_S = 10
FIO_BLOCKS = ("1M", "4M")
FIO_DEPTHS = (8, 16, 32)
FIO_MEMORY = ("malloc", "mmapshared")

console = Console()


def best_fio(mounts: Sequence[Path], size_bytes: int) -> dict[str, object]:
    """Return the options with which fio writes fastest here."""
    found: dict[float, dict[str, object]] = {}
    for block, depth, memory in product(FIO_BLOCKS, FIO_DEPTHS, FIO_MEMORY):
        options: dict[str, object] = {"bs": block, "iodepth": depth, "iomem": memory}
        found[fio(mounts, size_bytes=size_bytes, options=options)] = options
    return found[max(found)]


@contextlib.contextmanager
def scratch(place: Path | None = None) -> Generator[Path]:
    """A folder that goes with the block."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def persist_rows(name: str, mounts: Sequence[Path], size_bytes: int, *, goal: float, pairs: int) -> list[Row]:
    """Compare persisting with fio on the same drives, new files against new files."""
    options = best_fio(mounts, size_bytes // len(mounts) // 4)
    console.print(f"{name}: fio is fastest with {options}")
    with scratch() as folder, node(mounts, size_bytes, folder) as ours:
        ours.persist()  # the engines' first use of the arena
        cpu_before_s = ours.cpu_s()
        found = interleaved(
            ours.persist,
            lambda: fio(mounts, size_bytes=ours.size_bytes // len(mounts), options=options),
            pairs,
        )
        cpu_s = (ours.cpu_s() - cpu_before_s) / (len(found) * ours.size_bytes / 1e9)
        memory = ours.memory_bytes()
    return [
        row(f"{name}: persist / fio", ratios(found), goal=goal),
        row(f"{name}: persist", [each / 1e9 for each, _ in found], goal=None, unit="GB/s"),
        row(f"{name}: daemon's CPU", [cpu_s], goal=0.25, at_most=True, unit="s/GB"),
        row(f"{name}: daemon's memory above the arena", [memory / 2**20], goal=128, at_most=True, unit="MiB"),
    ]


def rival_rows(name: str, mounts: Sequence[Path], size_bytes: int, *, pairs: int) -> list[Row]:
    """Compare persisting on all the drives with what writes to one directory, as each of these does."""
    rows: list[Row] = []
    state = state_of(size_bytes)
    with scratch() as folder, node(mounts, size_bytes, folder) as ours:
        ours.persist()
        for rival, save in RIVALS.items():
            found = interleaved(ours.persist, lambda save=save: speed(save, state, mounts[0]), pairs)
            rows.append(row(f"{name}: persist / {rival}", ratios(found), goal=1.0))
    return rows


class Holder(torch.nn.Module):
    """Parameters of a size together."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(state_of(size_bytes).values())


def restore_row(name: str, mounts: Sequence[Path], size_bytes: int, *, goal: float, pairs: int) -> Row:
    """Compare restore(), from the call to the last verified byte in the tensors, with fio's reading; caches cold."""
    model = Holder(size_bytes)
    stores = [mount / "everstep" for mount in mounts]
    for store in stores:
        store.mkdir()

    def restore() -> float:
        _drop_caches()
        with (
            scratch() as folder,
            _daemon(folder),
            everstep.attach("bench", model=model, storage=stores) as run,
        ):
            restored = run.restore()
            assert restored is not None
            assert restored.source == "disk"
            return size_bytes / restored.restore_s

    with scratch() as folder, _daemon(folder), everstep.attach("bench", model=model, storage=stores) as run:
        run.step()
    fio(mounts, size_bytes=size_bytes // len(mounts), keep=True)

    def read() -> float:
        _drop_caches()
        return fio(mounts, size_bytes=size_bytes // len(mounts), way="read", keep=True)

    found = interleaved(restore, read, pairs)
    for mount in mounts:
        (mount / "fio.tmp").unlink()
        shutil.rmtree(mount / "everstep")
    return row(f"{name}: restore / fio read", ratios(found), goal=goal)


@contextlib.contextmanager
def _daemon(folder: Path) -> Generator[None]:
    """A daemon that knows nothing from before, for the hook in this process."""
    socket = folder / "socket" / "data.sock"
    os.environ["EVERSTEP_SOCKET"] = str(socket)
    with daemon_process(socket):
        yield


def _drop_caches() -> None:
    os.sync()
    with contextlib.suppress(PermissionError):  # direct reads do not need it
        Path("/proc/sys/vm/drop_caches").write_text("3")


def on_disk(place: Path, *, gib: float, pairs: int) -> list[Row]:
    """Measure this machine's own disk."""
    size_bytes = int(gib * 2**30)
    with scratch(place) as folder:
        rows = persist_rows("disk", [folder], size_bytes, goal=0.90, pairs=pairs)
        rows.append(restore_row("disk", [folder], size_bytes, goal=0.85, pairs=pairs))
        rows += rival_rows("disk", [folder], size_bytes, pairs=pairs)
    return rows


def on_rig(drives: int, *, pairs: int) -> list[Row]:
    """Measure that many drives of a known speed."""
    mb_s = RIG_SPEEDS[drives]
    size_bytes = drives * mb_s * MB * SAMPLE_S
    name = f"rig {drives} x {mb_s} MB/s"
    with rig([mb_s * MB] * drives, size_bytes=int(size_bytes / drives * 2.2)) as made:
        mounts = [drive.mount for drive in made]
        rows = persist_rows(name, mounts, size_bytes, goal=0.97, pairs=pairs)
        rows.append(restore_row(name, mounts, size_bytes // 2, goal=0.95, pairs=pairs))
    return rows


def main() -> int:
    """Run the benchmark; exit status 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--place", type=Path, default=Path("/var/tmp"), help="a directory on the disk to measure"
    )
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state on the disk")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--drives", type=int, nargs="*", default=list(RIG_SPEEDS), help="rigs to measure")
    parser.add_argument("--output", type=Path, default=Path("build/bench/storage.json"))
    args = parser.parse_args()
    rows: list[Row] = []
    rows += on_disk(args.place, gib=args.gib, pairs=args.pairs)
    for drives in args.drives:
        try:
            rows += on_rig(drives, pairs=args.pairs)
        except RigError as error:
            console.print(f"rig of {drives}: left out: {error}")
    return 0 if publish("everstep bench-storage", rows, args.output) else 1


if __name__ == "__main__":
    sys.exit(main())

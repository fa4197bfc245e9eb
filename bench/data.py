"""make bench-data: what the loader, the cache and shared preparation save, beside torch's DataLoader on the same work.

Ratios taken in one run (bench/paired.py), with real JPEGs (bench/jpegs.py) and real decoding. Storage is one throttled
drive (bench/rig.py, root); without root its rows are left out and the table says so.
"""

import argparse
import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import analyze_rig
import cache_hits
import torch
from augment import augmented
from cached_rows import bytes_rows, epoch_rows
from child import ChildError, ended_by_sigterm
from image_drive import ImageDrive, Part, image_drive
from jpegs import IMAGES, PhotographsError, made
from loader_cpu import CASES, Images, compared
from node import hook_daemon
from nodes_rows import NodesError, nodes_rows
from paired import PAIRS_MIN, Row, publish, write
from peers_rows import peers_rows
from persist_rows import scratch
from plot import draw_results
from resume_rows import resume_rows
from rich.console import Console
from rig import RigError
from shared_rows import JOBS, shared_rows, unbuffered
from state_rows import TorchdataError, state_rows

from everstep.core.errors import EverstepError
from everstep.dataloader.sources import ImageFolderSource, SourceDataset

ROWS = ("cpu", "hits", "resume", "state", "bytes", "jobs", "epoch", "nodes", "peers", "analyze")
ON_DRIVE = {"bytes", "jobs", "epoch", "nodes", "peers"}
WORKERS = 2
BATCH, SMALL_BATCH = 64, 16
CPU_IMAGES, STATE_IMAGES, EPOCH_IMAGES, NODES_IMAGES, PEERS_IMAGES = 1920, 1280, 2400, 1500, 1200
"""Parts of the images, so that all rows but `jobs` together take less than 25 minutes on two cores."""
JOBS_IMAGES = IMAGES
"""What is once for a group, its start and a first batch of each job, counts for much in short epochs. An hour."""
PLAIN_CASE, PLAIN_BATCHES = "3x224x224 bytes, batch 64", 100
DRIVE_PAIRS = 3
"""Of what takes minutes a pair; 20 for `jobs` of 2, 4 and 8."""

console = Console()


@dataclass(slots=True)
class Bench:
    """What is measured on, and what was found."""

    images: Path
    source: ImageFolderSource
    pairs: int
    share: float
    """Of the usual number of images: 1 where there are IMAGES or more."""
    folder: Path
    jobs: Sequence[int] = JOBS
    jobs_images: int = JOBS_IMAGES
    drive: ImageDrive | None = None
    rows: list[Row] = field(default_factory=list[Row])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Why there are no rows of something."""
    failed: dict[str, str] = field(default_factory=dict[str, str])

    def part(self, count: int) -> Part:
        """Return a part of the images, smaller where there are fewer."""
        return Part(self.source, self.count(count))

    def count(self, usual: int) -> int:
        """Return how many images stand for the usual number."""
        return max(1, round(usual * self.share))

    def on_drive(self) -> ImageDrive:
        """Return the drive.

        Raises:
            RigError: there is none.
        """
        if self.drive is None:
            raise RigError("no throttled drive")
        return self.drive


def cpu(bench: Bench) -> list[Row]:
    """Processor time of the training process."""
    data = SourceDataset[torch.Tensor](bench.part(CPU_IMAGES), decode=augmented)
    rows = compared("JPEGs", data, batch_size=BATCH, workers=WORKERS, pairs=bench.pairs)
    shape, dtype, batch_size = CASES[PLAIN_CASE]
    plain = Images(bench.count(PLAIN_BATCHES) * batch_size, shape, dtype)
    return rows + compared("no work", plain, batch_size=batch_size, workers=WORKERS, pairs=bench.pairs)


def hits(bench: Bench) -> list[Row]:
    """One hit of the cache."""
    with scratch() as folder, hook_daemon(folder):
        return cache_hits.measured(
            bench.count(cache_hits.SAMPLES), cache_hits.SAMPLE_BYTES, max(bench.pairs, cache_hits.PAIRS)
        )


def resume(bench: Bench) -> list[Row]:
    """Far into a large dataset."""
    return resume_rows(bench.pairs)


def state(bench: Bench) -> list[Row]:
    """A state at every step."""
    data = SourceDataset[torch.Tensor](bench.part(STATE_IMAGES), decode=augmented)
    return state_rows(data, batch_size=SMALL_BATCH, workers=WORKERS, pairs=bench.pairs)


def read_bytes(bench: Bench) -> list[Row]:
    """Bytes of an epoch."""
    return bytes_rows(bench.on_drive())


def jobs(bench: Bench) -> list[Row]:
    """Shared preparation; without a drive its reads are not counted."""
    count = bench.count(bench.jobs_images)
    source = unbuffered(bench.drive, count) if bench.drive is not None else bench.part(bench.jobs_images)
    return shared_rows(source, drive=bench.drive, pairs=min(bench.pairs, DRIVE_PAIRS), jobs=bench.jobs)


def epoch(bench: Bench) -> list[Row]:
    """Time of an epoch."""
    pairs = min(bench.pairs, DRIVE_PAIRS)
    return epoch_rows(bench.on_drive(), images=bench.count(EPOCH_IMAGES), pairs=pairs)


def nodes(bench: Bench) -> list[Row]:
    """Two nodes' memory together."""
    pairs = min(bench.pairs, DRIVE_PAIRS)
    return nodes_rows(bench.on_drive(), images=bench.count(NODES_IMAGES), pairs=pairs)


def peers(bench: Bench) -> list[Row]:
    """Predictions of `everstep analyze` for another node's memory."""
    return peers_rows(bench.on_drive(), images=bench.count(PEERS_IMAGES))


def analyze(bench: Bench) -> list[Row]:
    """Predictions of `everstep analyze`."""
    return analyze_rig.rows(bench.count(analyze_rig.SAMPLES))


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "cpu": cpu, "hits": hits, "resume": resume, "state": state, "bytes": read_bytes, "jobs": jobs, "epoch": epoch,
    "nodes": nodes, "peers": peers, "analyze": analyze,
}  # fmt: skip


def run(bench: Bench, wanted: list[str], output: Path) -> None:
    """Measure what is wanted, and write all rows after each."""
    with contextlib.ExitStack() as held:
        if ON_DRIVE & set(wanted):
            try:
                bench.drive = held.enter_context(image_drive(bench.images, bench.folder))
            except RigError as error:
                bench.left_out["what needs a throttled drive"] = str(error)
        for name in [each for each in ROWS if each in wanted and each != "analyze"]:
            _measure(bench, name, output)
    bench.drive = None
    if "analyze" in wanted:  # on a drive of its own
        _measure(bench, "analyze", output)


def _measure(bench: Bench, name: str, output: Path) -> None:
    began_s = time.monotonic()
    try:
        bench.rows += PARTS[name](bench)
    except (RigError, TorchdataError, NodesError) as error:
        bench.left_out[name] = str(error)
    except (ChildError, EverstepError, OSError, RuntimeError) as error:
        console.print_exception()
        bench.failed[name] = f"failed: {type(error).__name__}"
    console.print(f"{name}: {time.monotonic() - began_s:.0f} s")
    write(bench.rows, output, {**bench.left_out, **bench.failed})


def main() -> int:
    """Run the benchmark; exit status 1 when a goal is missed, 2 when there are no photographs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--place", type=Path, default=Path("/var/tmp"), help="where the images are made and kept"
    )
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--pairs", type=int, default=PAIRS_MIN)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="what to measure")
    parser.add_argument("--jobs", type=int, nargs="+", default=list(JOBS), help="how many that share")
    parser.add_argument(
        "--jobs-images", type=int, default=JOBS_IMAGES, help="of all: what they share (default: all)"
    )
    parser.add_argument("--output", type=Path, default=Path("build/bench/data.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # they wait for the drive
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)  # torchdata's
    with ended_by_sigterm(), scratch() as folder:
        try:
            images = made(args.place, args.images)
        except PhotographsError as error:
            console.print(f"bench-data: {error}")
            return 2
        index = folder / "images"
        index.mkdir()
        bench = Bench(
            images=images,
            source=ImageFolderSource(images, index=index),
            pairs=args.pairs,
            share=min(1.0, args.images / IMAGES),
            jobs=args.jobs,
            jobs_images=args.jobs_images,
            folder=folder,
        )
        run(bench, args.rows, args.output)
    met = publish("everstep bench-data", bench.rows, args.output, {**bench.left_out, **bench.failed})
    draw_results([args.output], args.output.with_suffix(".png"))
    return 0 if met and not bench.failed else 1


if __name__ == "__main__":
    sys.exit(main())

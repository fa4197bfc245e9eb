"""Where the time goes of what bench-storage and bench-stall measure: what stands beside a row that misses its goal.

    python bench/profiles.py persist [--gib 2] [--count 8] [--place DIR]   # the daemon's processor time (needs perf)
    python bench/profiles.py flood                                          # the same beside clients that never stop
    python bench/profiles.py stall [--mib 64]                               # run.step() at a checkpoint, by function
    python bench/profiles.py restore [--mib 64]                             # run.restore() from memory, by function

A profiler makes what it looks at slower; shares are to be read, not times.
"""

import argparse
import contextlib
import cProfile
import os
import platform
import pstats
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import torch
from flood import flooded, save_wide
from gpt import job_of, new_job
from meter import cpu_s
from node import hook_daemon, node
from persist_rows import scratch
from stall import BATCHES, MIB, NEVER, SLOTS

import everstep

LINES = 25
PERCENT_MIN = 1


def main() -> None:
    """Print one profile."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("persist", "flood", "stall", "restore", "restoring"))
    parser.add_argument("--gib", type=float, default=2.0, help="of the state that is persisted")
    parser.add_argument(
        "--mib", type=int, choices=tuple(BATCHES), default=64, help="of the state that is trained"
    )
    parser.add_argument("--count", type=int, default=8, help="checkpoints")
    parser.add_argument(
        "--place", type=Path, default=Path("/var/tmp"), help="a directory on the disk to measure"
    )
    args = parser.parse_args()
    if args.what == "restoring":
        restoring(args.mib, args.place)
        return
    print(
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {os.cpu_count()} cores, Linux {platform.release()}"
    )
    print("$ python bench/profiles.py", *sys.argv[1:], "\n", flush=True)
    if args.what == "stall":
        stall(args.mib, args.count, args.place)
    elif args.what == "restore":
        restore(args.mib, args.place)
    else:
        persist(args.place, int(args.gib * 2**30), args.count, is_flooded=args.what == "flood")


def persist(place: Path, size_bytes: int, count: int, *, is_flooded: bool) -> None:
    """Persist again and again, and say what the daemon's processors did."""
    if shutil.which("perf") is None:
        raise SystemExit("perf is not here: apt-get install linux-perf")
    with (
        scratch(place) as mount,
        scratch() as folder,
        node([mount], size_bytes, folder, serves_metrics=True) as ours,
        tempfile.NamedTemporaryFile() as samples,
        contextlib.ExitStack() as beside,
    ):
        if is_flooded:
            save_wide(ours.socket, [Path("drive0")])
        for _ in range(2):
            ours.persist()
        if is_flooded:
            beside.enter_context(flooded(ours.socket))
        before_s, speeds = cpu_s(ours.pid), list[float]()
        with recorded(ours.pid, samples.name):
            speeds += [ours.persist() for _ in range(count)]
        used_s = cpu_s(ours.pid) - before_s
        speed = sorted(speeds)[count // 2] / 1e9
        print(f"{count} x {ours.size_bytes / 1e9:.2f} GB at {speed:.2f} GB/s: ", end="")
        print(f"{used_s / (count * ours.size_bytes / 1e9):.3f} s of processor time per GB\n", flush=True)
        report = [
            "perf",
            "report",
            "-i",
            samples.name,
            "--stdio",
            "--no-children",
            "-g",
            "none",
            "-F",
            "overhead,dso,sym",
        ]
        found = subprocess.run(
            [*report, "--percent-limit", str(PERCENT_MIN)], capture_output=True, text=True, check=True
        ).stdout
        print(*(line.rstrip() for line in found.splitlines() if line and not line.startswith("#")), sep="\n")


@contextlib.contextmanager
def recorded(pid: int, path: str) -> Generator[None]:
    """Take samples of a process while the block runs."""
    words = ["perf", "record", "-q", "-F", "499", "-p", str(pid), "-o", path]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as perf:
        time.sleep(1)  # it says nothing when it has begun
        yield
        perf.send_signal(signal.SIGINT)


def stall(mib: int, count: int, place: Path) -> None:
    """Train, and say what the training thread did at boundaries with a checkpoint."""
    job = job_of(mib * MIB, batch=BATCHES[mib])
    profile = cProfile.Profile()
    with (
        scratch(place) as folder,
        hook_daemon(folder),
        everstep.attach(
            "stall", model=job.model, optimizer=job.optimizer, storage=folder, every=NEVER, slots=SLOTS
        ) as run,
    ):
        for number in range(count + 3):
            run.checkpoint()
            job.step()
            if number >= 3:  # the arena is there, and everything has been done once
                profile.enable()
            run.step()
            profile.disable()
            job.step()
            run.step()
            run.wait()
        report = run.report()
        print(f"{report.checkpoints_complete} checkpoints of {job.size_bytes / MIB:.0f} MiB\n")
    pstats.Stats(profile).sort_stats("tottime").print_stats(LINES)


def restore(mib: int, place: Path) -> None:
    """Let a trainer leave a checkpoint in memory and die, and a second one say what its restore did."""
    with scratch(place) as folder, hook_daemon(folder):
        for _ in range(2):
            words = [sys.executable, __file__, "restoring", "--mib", str(mib), "--place", str(folder)]
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as trainer:
                assert trainer.stdout is not None
                for line in iter(trainer.stdout.readline, "kept\n"):
                    print(line, end="")
                trainer.send_signal(signal.SIGKILL)


def restoring(mib: int, storage: Path) -> None:
    """Restore what there is, leave a checkpoint in memory, and wait to be killed."""
    job = new_job(mib * MIB)
    profile = cProfile.Profile()
    with everstep.attach(
        "again", model=job.model, optimizer=job.optimizer, storage=storage, every=NEVER
    ) as run:
        profile.enable()
        restored = run.restore()
        profile.disable()
        if restored is not None:
            print(f"from {restored.source}")
            pstats.Stats(profile).sort_stats("tottime").print_stats(LINES)
        for _ in range(2):  # the arena is made at the first one
            job.step()
            run.checkpoint()
            run.step()
            assert run.wait()
        print("kept", flush=True)
        signal.pause()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

"""When each of N slow drives wrote while one checkpoint was persisted: where a speed-up of less than N goes.

    sudo python bench/drive_timeline.py --drives 1 32 [--times 3]

Looks at the block layer's own count of written bytes every 20 ms (/sys/block/loopN/stat), on the rig of bench/rig.py.
Means over the drives, in seconds: before the first byte, bytes beyond the state (headers, manifests, the file system's
own), below the drive's speed while it wrote, and after its last byte until the acknowledgement.
"""

import argparse
import os
import platform
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from child import ended_by_sigterm
from node import node
from persist_rows import scratch
from rig import MB, Drive, rig
from storage import RIG_SPEEDS, ROOM_BYTES, SAMPLE_S

EVERY_S = 0.02
SECTOR_BYTES = 512


@dataclass(slots=True)
class Timeline:
    """Written bytes of each drive, as they grow."""

    drives: Sequence[Drive]
    began_s: float = field(default_factory=time.perf_counter)
    seen: list[tuple[float, list[int]]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Look until `over`."""
        files = [Path("/sys/block") / Path(drive.loop).name / "stat" for drive in self.drives]
        while not self.over.wait(EVERY_S):
            written = [int(file.read_text().split()[6]) * SECTOR_BYTES for file in files]
            self.seen.append((time.perf_counter() - self.began_s, written))

    def spans(self) -> list[tuple[float, float, int]]:
        """Return (first byte, last byte, bytes) of each drive; seconds since the begin."""
        first = self.seen[0][1]
        found: list[tuple[float, float, int]] = []
        for index, start in enumerate(first):
            grown = [
                at_s
                for (at_s, now), (_, before) in zip(self.seen[1:], self.seen, strict=False)
                if now[index] != before[index]
            ]
            found.append((grown[0], grown[-1], self.seen[-1][1][index] - start))
        return found


def timeline(drives: int, mb_s: int, times: int) -> None:
    """Persist some times, a new store each, and print where the time went."""
    each_bytes = mb_s * MB * SAMPLE_S
    with rig([mb_s * MB] * drives, size_bytes=each_bytes + ROOM_BYTES) as made:
        mounts = [drive.mount for drive in made]
        for _ in range(times):
            with scratch() as folder, node(mounts, drives * each_bytes, folder, slot_count=1) as ours:
                seen = Timeline(made)
                watcher = threading.Thread(target=seen.watch)
                watcher.start()
                took_s = ours.size_bytes / ours.persist()
                seen.over.set()
                watcher.join()
                spans = seen.spans()
                ideal_s = ours.size_bytes / (drives * mb_s * MB)
                first = statistics.fmean(span[0] for span in spans)
                last = statistics.fmean(took_s - span[1] for span in spans)
                at_speed = statistics.fmean(span[2] for span in spans) / (mb_s * MB)
                print(f"{drives} x {mb_s} MB/s: {took_s:.2f} s, at the drives' speed {ideal_s:.2f}", end=" ")
                print(f"({ideal_s / took_s:.3f})")
                print(
                    f"  before the first byte {first:.2f} (most {max(span[0] for span in spans):.2f}), "
                    f"bytes beyond the state {(at_speed - ideal_s):.2f}, "
                    f"below the speed {took_s - first - last - at_speed:.2f}, after the last byte {last:.2f}",
                    flush=True,
                )


def main() -> None:
    """Print a few lines for each rig."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drives", type=int, nargs="+", choices=tuple(RIG_SPEEDS), default=[1, 32])
    parser.add_argument("--mb-s", type=int, help="of each drive; else as bench-storage")
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {os.cpu_count()} cores, Linux {platform.release()}"
    )
    with ended_by_sigterm():
        for drives in args.drives:
            timeline(drives, args.mb_s or RIG_SPEEDS[drives], args.times)


if __name__ == "__main__":
    main()

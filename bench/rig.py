"""N slow drives on one machine: loop devices over files in memory, held to a speed by the block layer's throttle.

    sudo python bench/rig.py up --drives 4 --mb-s 200 --gib 2     # prints the mount points
    sudo python bench/rig.py check --drives 4 --mb-s 200          # up, measure with fio, down
    sudo python bench/rig.py down                                 # removes what an earlier `up` left

The speed of many drives can be tested so on a machine that has one: N drives of 200 MB/s are N x 200 MB/s and no more.
The throttle is set on the root blkio group, too: buffered pages are written back by the kernel's own threads, which
belong to no other group. A rig that fio does not find within 3 % of its speed, writing direct and buffered and reading,
is refused; one whose drives are held to another speed for a part of the rows is checked again for that part.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

MB = 10**6
BLKIO = Path("/sys/fs/cgroup/blkio")
IMAGES = Path("/dev/shm/everstep-rig")
LOCK = IMAGES.with_suffix(".lock")
TOLERANCE = 0.03
CHECK_S = 10
"""The throttle lets the first moments pass: shorter samples are too fast."""
CHECK_TRIES = 3
"""Somebody else may use the machine in the moment."""


class RigError(Exception):
    """The rig cannot be made here, or is not as fast or as slow as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One throttled drive with a file system."""

    image: Path
    loop: str
    mount: Path
    bytes_per_s: int

    @property
    def numbers(self) -> str:
        """Major and minor number, as the throttle's files want them."""
        number = Path(self.loop).stat().st_rdev
        return f"{os.major(number)}:{os.minor(number)}"


def _run(*command: str | Path) -> str:
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RigError(f"{' '.join(map(str, command))}: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout.strip()


def groups() -> list[Path]:
    """Return the throttle's directories that count: the root group and that of this process."""
    if not (BLKIO / "blkio.throttle.write_bps_device").exists():
        raise RigError(f"no blkio controller of cgroup v1 at {BLKIO}: drives cannot be slowed down here")
    own = next(
        line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if "blkio" in line.split(":")[1].split(",")
    )
    return list(dict.fromkeys([BLKIO, BLKIO / own.lstrip("/")]))


def throttle(drive: Drive, bytes_per_s: int) -> None:
    """Hold a drive to a speed, for reading and for writing; 0 lets it go."""
    for group in groups():
        for way in ("read", "write"):
            (group / f"blkio.throttle.{way}_bps_device").write_text(f"{drive.numbers} {bytes_per_s}")


def up(speeds: Sequence[int], *, size_bytes: int, folder: Path, file_system: str = "xfs") -> list[Drive]:
    """Make and mount one drive per speed (bytes per second)."""
    if os.geteuid() != 0:
        raise RigError("loop devices, mounts and throttles need root")
    groups()
    needed, free = size_bytes * len(speeds), shutil.disk_usage(IMAGES.parent).free
    available = _available_memory_bytes()
    if needed > min(free, available * 0.8):
        raise RigError(
            f"{needed} bytes of drives do not fit: {free} free in {IMAGES.parent}, {available} of memory"
        )
    IMAGES.mkdir(exist_ok=True)
    return [
        _make(index, speed, size_bytes, folder / f"nvme{index}", file_system)
        for index, speed in enumerate(speeds)
    ]


def _available_memory_bytes() -> int:
    line = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")
    )
    return int(line.split()[1]) * 1024


def _make(index: int, speed: int, size_bytes: int, mount: Path, file_system: str) -> Drive:
    image = IMAGES / f"{index}.img"
    # Written, not sparse: a hole would be allocated at the first write and make it slower than the second.
    _run("dd", "if=/dev/zero", f"of={image}", "bs=4M", f"count={-(-size_bytes // 2**22)}", "status=none")
    loop = _run("losetup", "--find", "--show", image)
    no_discard = (
        ["-K"] if file_system == "xfs" else ["-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"]
    )
    _run(f"mkfs.{file_system}", "-q", *no_discard, loop)
    mount.mkdir(parents=True, exist_ok=True)
    _run("mount", loop, mount)
    drive = Drive(image=image, loop=loop, mount=mount, bytes_per_s=speed)
    throttle(drive, speed)
    return drive


def down() -> None:
    """Unmount, detach and delete every drive of the rig; none is nothing."""
    for line in _run("losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE").splitlines():
        loop, _, image = line.strip().partition(" ")
        if Path(image.strip().removesuffix(" (deleted)")).parent != IMAGES:
            continue
        for mounted in Path("/proc/mounts").read_text().splitlines():
            if mounted.split()[0] == loop:
                _run("umount", mounted.split()[1])
        with contextlib.suppress(OSError):  # a throttle of 0 where none was set
            throttle(Drive(image=Path(image), loop=loop, mount=Path(), bytes_per_s=0), 0)
        _run("losetup", "--detach", loop)
    shutil.rmtree(IMAGES, ignore_errors=True)


def fio(
    mounts: Sequence[Path],
    *,
    size_bytes: int,
    way: str = "write",
    direct: bool = True,
    keep: bool = False,
    options: Mapping[str, object] | None = None,
) -> float:
    """Return the bytes per second that fio reaches on all the mounts together, from first byte to last fsync."""
    shared: dict[str, object] = {
        "rw": way, "size": size_bytes, "bs": "1M", "ioengine": "libaio", "iodepth": 16, "direct": int(direct),
        "end_fsync": int(way == "write"), "fallocate": "native", **(options or {}),
    }  # fmt: skip
    jobs = [
        part
        for index, mount in enumerate(mounts)
        for part in (f"--name=d{index}", f"--filename={mount / 'fio.tmp'}")
    ]
    try:
        # Options that stand before the first --name hold for all jobs.
        text = _run(
            "fio", "--output-format=json", *[f"--{name}={value}" for name, value in shared.items()], *jobs
        )
    finally:
        if not keep:
            for mount in mounts:
                (mount / "fio.tmp").unlink(missing_ok=True)
    runtimes_ms = [job["job_runtime"] for job in json.loads(text)["jobs"]]  # they start together
    return size_bytes * len(mounts) / (max(runtimes_ms) / 1000)


def check(drives: Sequence[Drive]) -> dict[str, float]:
    """Return what fio measures in units of the rig's nominal speed.

    Raises:
        RigError: not within 3 %, so that nothing measured on it would mean anything.
    """
    nominal = min(drive.bytes_per_s for drive in drives)
    mounts = [drive.mount for drive in drives]
    fio(mounts, size_bytes=nominal // 4 // MB * MB, direct=False)  # what mkfs and mount left to the throttle
    size_bytes = nominal * CHECK_S // MB * MB
    # The kernel begins to write pages back only when many are dirty, and the drives would idle until then.
    early = {"ioengine": "psync", "iodepth": 1, "sync_file_range": "write:8", "thread": 1}
    ways: dict[str, Callable[[], float]] = {
        "writes direct": lambda: fio(mounts, size_bytes=size_bytes),
        "writes buffered": lambda: fio(mounts, size_bytes=size_bytes, direct=False, options=early),
        "reads": lambda: fio(mounts, size_bytes=size_bytes, way="read"),
    }
    return {name: _held(name, measure, nominal * len(drives)) for name, measure in ways.items()}


def held_to(drives: Sequence[Drive], bytes_per_s: int) -> list[Drive]:
    """Return the drives at another speed, checked; an unchecked throttle would be what their figures are compared with.

    Raises:
        RigError: they are not within 3 % of it.
    """
    changed = [replace(drive, bytes_per_s=bytes_per_s) for drive in drives]
    for drive in changed:
        throttle(drive, bytes_per_s)
    check(changed)
    return changed


def _held(name: str, measure: Callable[[], float], nominal: int) -> float:
    """Return what was measured in units of the nominal speed, in the first of some tries that holds."""
    found: list[float] = []
    while len(found) < CHECK_TRIES:
        found.append(measure() / nominal)
        if abs(found[-1] - 1) <= TOLERANCE:
            return found[-1]
    tries = ", ".join(f"{each:.3f}" for each in found)
    raise RigError(f"fio {name} at {tries} of the drives' speed together: the rig does not hold")


def _alike(drives: Sequence[Drive]) -> list[Sequence[Drive]]:
    """Return what is to be checked together: all drives, or each alone where their speeds differ."""
    return [drives] if len({drive.bytes_per_s for drive in drives}) == 1 else [[drive] for drive in drives]


@contextlib.contextmanager
def rig(
    speeds: Sequence[int], *, size_bytes: int, file_system: str = "xfs", checked: bool = True
) -> Generator[list[Drive]]:
    """The drives while the block runs; of one rig after the other where several are wanted at once."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _made(speeds, size_bytes=size_bytes, file_system=file_system, checked=checked)


def _made(
    speeds: Sequence[int], *, size_bytes: int, file_system: str, checked: bool
) -> Generator[list[Drive]]:
    down()
    folder = Path(tempfile.mkdtemp(prefix="everstep-rig-"))
    try:
        drives = up(speeds, size_bytes=size_bytes, folder=folder, file_system=file_system)
        if checked:
            for part in _alike(drives):
                check(part)
        yield drives
    finally:
        down()
        shutil.rmtree(folder)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["up", "check", "down"])
    parser.add_argument("--drives", type=int, default=4)
    parser.add_argument("--mb-s", type=int, default=200, help="speed of each drive in MB/s")
    parser.add_argument("--gib", type=float, default=2.0, help="size of each drive")
    parser.add_argument("--file-system", choices=["xfs", "ext4"], default="xfs")
    parser.add_argument(
        "--folder", type=Path, default=Path("/mnt/everstep-rig"), help="where `up` mounts them"
    )
    args = parser.parse_args()
    speeds, size_bytes = [args.mb_s * MB] * args.drives, int(args.gib * 2**30)
    try:
        if args.command == "down":
            down()
        elif args.command == "up":
            down()
            for drive in up(speeds, size_bytes=size_bytes, folder=args.folder, file_system=args.file_system):
                print(drive.mount)
        else:
            with rig(speeds, size_bytes=size_bytes, file_system=args.file_system, checked=False) as drives:
                for name, ratio in check(drives).items():
                    print(f"fio {name}: {ratio:.3f} of {args.drives} x {args.mb_s} MB/s")
    except RigError as error:
        print(f"rig: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

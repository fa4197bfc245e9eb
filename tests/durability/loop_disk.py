"""A drive for a test: a file in memory behind a loop device, with a file system whose power can be cut.

Mounting and unmounting are system calls made here, not programs: a cycle of power cut, unmount and mount takes
milliseconds. The cut is FS_IOC_SHUTDOWN without flushing the journal: what was not made durable is gone, and the file
system answers EIO until it is mounted again.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN (EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN)."""
NO_LOG_FLUSH = 2

SIZES_MIB = {"ext4": 64, "xfs": 300}
"""mkfs.xfs makes nothing below 300 MiB; the files are sparse."""

_LOOP_CONTROL = "/dev/loop-control"
_MNT_DETACH = 2
_BUSY_S = 120.0
_libc = ctypes.CDLL(None, use_errno=True)


def missing_tools(kind: str) -> list[str]:
    """Return what this machine lacks for a file system of this kind."""
    missing = [tool for tool in (f"mkfs.{kind}", "losetup") if shutil.which(tool) is None]
    return missing if os.access(_LOOP_CONTROL, os.R_OK | os.W_OK) else [*missing, _LOOP_CONTROL]


def skip_without(kind: str) -> None:
    """Skip the test, with the reason, where such a drive cannot be made."""
    if missing := missing_tools(kind):
        pytest.skip(f"needs {', '.join(missing)}: apt-get install xfsprogs e2fsprogs mount, and loop devices")


class LoopDisk:
    """One drive; `remove` must be called, whatever happened."""

    def __init__(self, folder: Path, kind: str, name: str) -> None:
        self.kind = kind
        self.path = folder / name
        """Where it is mounted."""
        self.path.mkdir()
        self._image = folder / f"{name}.img"
        with self._image.open("wb") as file:
            file.truncate(SIZES_MIB[kind] << 20)
        _tool(f"mkfs.{kind}", "-q", str(self._image))
        self._device = _tool("losetup", "--find", "--show", str(self._image))
        self._is_mounted = False

    def mount(self) -> None:
        """Mount it: after a cut this replays the journal."""
        arguments = (self._device.encode(), bytes(self.path), self.kind.encode())
        if _libc.mount(*arguments, 0, None):
            raise _error(f"mounting {self._device}")
        self._is_mounted = True

    def cut(self) -> None:
        """Cut the power."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        """Unmount it, as soon as whoever used it has let go.

        A mount namespace that somebody makes meanwhile (a test of containers) has the mount, too. While that lives,
        so does the file system as it was cut, and mounting would give it again.
        """
        deadline = time.monotonic() + _BUSY_S
        while _libc.umount2(bytes(self.path), 0):
            if ctypes.get_errno() != errno.EBUSY or time.monotonic() > deadline:
                raise _error(f"unmounting {self.path}")
            time.sleep(0.001)
        self._is_mounted = False
        while self._is_mounted_elsewhere():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._device} is still mounted in another namespace after {_BUSY_S} s")
            time.sleep(0.001)

    def _is_mounted_elsewhere(self) -> bool:
        """Whoever has a device mounted has claimed it for himself."""
        try:
            os.close(os.open(self._device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise
            return True
        return False

    def remove(self) -> None:
        """Give mount, device and memory back."""
        if self._is_mounted:
            _libc.umount2(bytes(self.path), _MNT_DETACH)
        _tool("losetup", "--detach", self._device)
        self._image.unlink()


def _tool(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _error(doing: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{doing} failed: {os.strerror(number)}")

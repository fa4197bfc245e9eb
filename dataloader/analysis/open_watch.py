"""Names the files that a process opens: Python's by an audit hook, those of native code as far as they stay open.

An audit hook sees every `open` of Python code, whatever library it is in, before the file is opened; it cannot be
removed, so there is one for each process, and it is inherited by forked workers. Native code (an image library that
takes a path, a database) opens files without it. What it holds open or mapped when a batch ends is found in
/proc/self/fd and, at most every so often, /proc/self/maps; what is gone by then leaves bytes read that no name
explains.

Names go to a file for each process, one a line, as soon as they are known: nobody has to end properly.
"""

# ruff: noqa: PTH100, PTH113, PTH118, PTH120 - strings: called for every open of the process, where a Path costs more than the rest

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import cast

from .page_cache import drop_open
from .proc_files import mapped_files, open_files

NATIVE = "native\t"
"""Before the names of files that native code opened."""
WROTE = "wrote\t"
"""Before the names of files that were opened to write."""
LOOK_SHARE = 0.02
"""Of a process' time, spent at most on looking at what it has mapped: workers must not become slower."""
_NO_DATA = (".py", ".pyc", ".pyi", ".so", ".pth", ".egg-link")
_NO_FILES = ("/proc/", "/sys/", "/dev/", "/memfd:")
_NO_DATASETS = ("/usr/lib/", "/usr/share/", "/lib/", "/lib64/", "/etc/", "/bin/", "/usr/bin/")
"""The system's own: locales, fonts, certificates."""
_NO_FOLDER = (-1, None)
"""The descriptor of the folder that a path is relative to: none, so that it is the working folder."""
_INTERPRETER = os.path.realpath(sys.executable)
"""Mapped by every process; some libraries read it to learn of its C library."""
_CHANGES = {
    "os.remove": (1, 1, False),
    "os.mkdir": (1, 2, False),
    "os.rename": (2, 2, False),
    "os.rmdir": (1, 1, True),
    "os.truncate": (1, 9, True),
    "os.chmod": (1, 2, True),
    "os.chown": (1, 3, True),
    "os.utime": (1, 3, True),
    "os.setxattr": (1, 9, True),
    "shutil.rmtree": (1, 1, True),
}
"""Events that change what stands at a path -> how many of their first arguments are paths, which argument is the
descriptor of a folder, if any, and whether it is what stands there that changes: a link must not be in its place then,
which would lead the change on, or be refused. What is below an open folder is the scratch folder's own already, or
was opened by an absolute path."""

BeforeChange = Callable[[str, bool], None]
"""Called with a path that is about to be changed itself (True), or made, removed or renamed (False)."""


class _OfThread(threading.local):
    """Whether this thread is within the watch: what it opens there is ours, what others open meanwhile is not."""

    is_so = False


class OpenWatch:
    """What one process, and those forked from it, have opened."""

    def __init__(self) -> None:
        self._drops = False
        self._before_change: BeforeChange | None = None
        self._folder: str | None = None
        self._scratch = ""
        self._names: int | None = None
        self._pid = 0
        self._known: set[str] = set()
        self._busy = _OfThread()
        self._own_thread: int | None = None
        self._maps_due_s = 0.0

    def begin(self, folder: str, *, drops: bool, before_change: BeforeChange | None) -> None:
        """Name files from now on, in `folder`; what lies beside it is no data of the script."""
        self._drops, self._before_change = drops, before_change
        if folder == self._folder:
            return
        self._folder = folder
        self._scratch = os.path.dirname(os.path.realpath(folder)) + "/"
        self._maps_due_s = 0.0
        self._know_held()

    def end(self) -> None:
        """Name no more files."""
        self._folder = None
        self._known.clear()
        if self._names is not None and self._pid == os.getpid():
            os.close(self._names)
        self._names, self._pid = None, 0

    @contextlib.contextmanager
    def suspended(self) -> Generator[None]:
        """Take no note of what this thread opens within this: what the analysis itself opens is not the script's.

        Other threads are watched on.
        """
        self._own_thread = threading.get_ident()
        try:
            yield
        finally:
            self._own_thread = None

    def event(self, event: str, arguments: tuple[object, ...]) -> None:
        """Take note of an audit event."""
        if self._busy.is_so or self._folder is None or (event != "open" and event not in _CHANGES):
            return
        if self._own_thread == threading.get_ident():
            return
        self._busy.is_so = True  # what is opened below is ours
        try:
            if event == "open":
                self._opens(arguments)
            elif self._before_change is not None:
                self._changes(event, arguments, self._before_change)
        finally:
            self._busy.is_so = False

    def declare(self, paths: Iterable[str]) -> None:
        """Name files that a source says it reads, whoever opens them."""
        if self._folder is None:
            return
        self._busy.is_so = True
        try:
            self._renew()
            for path in paths:
                real = os.path.realpath(path)
                if real not in self._known and os.path.isfile(real):
                    self._known.add(real)
                    self._write(real)
        finally:
            self._busy.is_so = False

    def look(self) -> None:
        """Name what is open or mapped and was not opened by Python code."""
        if self._folder is None:
            return
        self._busy.is_so = True
        try:
            self._renew()
            for path in self._held_now():
                self._known.add(path)
                if self._is_data(path) and WROTE + path not in self._known:
                    self._write(NATIVE + path)
        finally:
            self._busy.is_so = False

    def _held_now(self) -> Iterator[str]:
        """Yield what is held and not known yet; mappings only as often as LOOK_SHARE allows."""
        yield from open_files(self._known)
        begun_s = time.monotonic()
        if begun_s >= self._maps_due_s:
            yield from mapped_files(self._known)
            ended_s = time.monotonic()
            self._maps_due_s = ended_s + (ended_s - begun_s) / LOOK_SHARE

    def _know_held(self) -> None:
        """Take what is held now for known: opened before anybody watched, by whom cannot be told; it is data still."""
        self._busy.is_so = True
        try:
            self._renew()
            for path in self._held_now():
                self._known.add(path)
                if self._is_data(path):
                    self._write(path)
        finally:
            self._busy.is_so = False

    def _opens(self, arguments: tuple[object, ...]) -> None:
        path = _path(arguments[0])
        if path is None:
            return
        flags = arguments[2] if len(arguments) > 2 else 0
        mode = arguments[1] if len(arguments) > 1 else None
        if _writes(mode, flags if isinstance(flags, int) else 0):
            self._about_to_write(path)
            return
        real = os.path.realpath(path)
        if real in self._known:
            return
        self._known.add(real)
        if self._is_data(real) and os.path.isfile(real):
            self._renew()
            self._write(real)
            if self._drops:
                _drop(real)

    def _changes(self, event: str, arguments: tuple[object, ...], before_change: BeforeChange) -> None:
        count, folder, is_written = _CHANGES[event]
        if len(arguments) > folder and arguments[folder] not in _NO_FOLDER:
            return
        for argument in arguments[:count]:
            path = _path(argument)
            if path is not None:
                before_change(path, is_written)

    def _about_to_write(self, path: str) -> None:
        if self._before_change is not None:
            self._before_change(path, True)
        real = os.path.realpath(path)
        if self._is_data(real) and WROTE + real not in self._known:
            self._known.add(WROTE + real)
            self._renew()
            self._write(WROTE + real)

    def _is_data(self, path: str) -> bool:
        if path.startswith((*_NO_FILES, *_NO_DATASETS, self._scratch)) or path.endswith(_NO_DATA):
            return False
        return ".so." not in path and path != _INTERPRETER

    def _renew(self) -> None:
        """Have a file of this process' own: a forked one starts with its parent's."""
        assert self._folder is not None
        pid = os.getpid()
        if self._pid != pid:
            self._names = os.open(
                os.path.join(self._folder, f"{pid}.names"),
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
                0o600,
            )
            self._pid = pid  # last: another thread does not write to the parent's meanwhile

    def _write(self, line: str) -> None:
        assert self._names is not None
        if "\n" not in line:
            os.write(self._names, os.fsencode(line) + b"\n")


_watch: OpenWatch | None = None


def watch_opens(folder: str, *, drops: bool, before_change: BeforeChange | None = None) -> OpenWatch:
    """Return the watch of this process: begun, inherited or there before, and naming files in `folder` from now on.

    With `drops` each file leaves memory when it is opened first.
    """
    global _watch
    if _watch is None:
        _watch = OpenWatch()
        sys.addaudithook(_watch.event)
    _watch.begin(folder, drops=drops, before_change=before_change)
    return _watch


def _path(argument: object) -> str | None:
    """Return an audit event's path, absolute; None for a descriptor."""
    if isinstance(argument, os.PathLike):
        argument = cast("os.PathLike[str] | os.PathLike[bytes]", argument).__fspath__()
    if isinstance(argument, bytes):
        argument = os.fsdecode(argument)
    return os.path.abspath(argument) if isinstance(argument, str) and "\0" not in argument else None


def _writes(mode: object, flags: int) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def _drop(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # the script's own open fails likewise, and says so
    try:
        drop_open(fd)
    finally:
        os.close(fd)

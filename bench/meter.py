"""What a daemon takes while something is measured: processor time, and the most memory of its own at any moment."""

import contextlib
import os
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_S = 0.005


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    """Return a process's own memory: all but files and the arena's shared pages."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def family(pid: int) -> list[int]:
    """Return a process and its children: the engines may have processes of their own."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found += map(int, (path / "children").read_text().split())
    return found


@dataclass(slots=True)
class Meter:
    """Samples of a daemon with its I/O processes, one for each block."""

    cpu_s: list[float] = field(default_factory=list[float])
    memory_bytes: list[int] = field(default_factory=list[int])
    """The peak, seen every 5 ms."""

    @contextlib.contextmanager
    def over(self, pid: int) -> Generator[None]:
        """Take a sample over the block; the processes must outlive it."""
        pids, ended, peak = family(pid), threading.Event(), list[int]()

        def watch() -> None:
            while True:
                peak[:] = [max(*peak, 0, sum(map(memory_bytes, pids)))]
                if ended.wait(SAMPLE_S):
                    return

        before_s = sum(map(cpu_s, pids))
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        self.cpu_s.append(sum(map(cpu_s, pids)) - before_s)
        self.memory_bytes += peak

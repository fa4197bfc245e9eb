"""The writing process of a power-cut test, as the process that checks it holds it."""

import queue
import subprocess
import sys
import threading
from pathlib import Path

from power_cut_load import Order

_DEADLINE_S = 120.0


class Writer:
    """The writing process, over all cycles."""

    def __init__(self, program: Path, device_count: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(device_count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="power-cut-reader")
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("")

    def start(self, order: Order) -> None:
        """Let a cycle begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(order.line() + "\n")

    def next_line(self) -> str:
        """Return what it says next."""
        line = self._lines.get(timeout=_DEADLINE_S)
        assert line, f"the writing process ended with {self._process.wait()}"
        return line

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()

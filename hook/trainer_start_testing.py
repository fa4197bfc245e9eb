"""Two ways to start a trainer, executed or forked from a server that has torch; nothing of the product imports this.

The import of torch takes longer than all that most tests want of a trainer.
"""

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from . import trainer_server_testing
from .trainer_server_testing import Order

SERVER_COUNT = 2
START_DEADLINE_S = 60.0
READ_AT_IMPORT = ("LANG", "LC_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_")
"""Variables of the environment whose name begins so count when Python starts, or when torch is imported."""


class Process(Protocol):
    """What tests use of a `subprocess.Popen[str]`."""

    @property
    def pid(self) -> int:
        """The process's number."""
        ...

    @property
    def stdout(self) -> IO[str] | None:
        """What it prints."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit status, or less than 0 and the signal's number, if its end is known."""
        ...

    def poll(self) -> int | None:
        """Return `returncode`, found out now."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; subprocess.TimeoutExpired when it has none within `timeout` seconds."""
        ...

    def send_signal(self, sig: int) -> None:
        """Signal it, unless it has ended."""
        ...


class Start(Protocol):
    """Starts a program in a session of its own."""

    def __call__(self, arguments: list[str], log: Path) -> Process:
        """Return the process; `arguments` follow Python's own on a command line, `log` gets its stderr."""
        ...


def execute(arguments: list[str], log: Path) -> Process:
    """Start it as a user does."""
    with log.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )


class ForkedProcess:
    """A trainer that a server has forked; its end is told on a socket."""

    def __init__(self, report: socket.socket, stdout: IO[str]) -> None:
        self.stdout: IO[str] = stdout
        self.returncode: int | None = None
        self._report = report
        self.pid = self._next_number(START_DEADLINE_S)

    def _next_number(self, timeout_s: float | None) -> int:
        self._report.settimeout(timeout_s)
        said = self._report.recv(64)
        assert said, "the server of trainers has ended"
        return int(said)

    def poll(self) -> int | None:
        """See Process."""
        with suppress(BlockingIOError):
            self._hear_end(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See Process."""
        try:
            return self._hear_end(timeout)
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(f"trainer {self.pid}", timeout or 0.0) from error

    def _hear_end(self, timeout_s: float | None) -> int:
        if self.returncode is None:
            self.returncode = self._next_number(timeout_s)
            self._report.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """See Process."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and the server was faster
                os.kill(self.pid, sig)


class _Server:
    """One server, which ends with `close`."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", trainer_server_testing.__name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start(self, arguments: list[str], log: Path) -> Process:
        order = Order(arguments=arguments, environment=dict(os.environ), directory=str(Path.cwd()))
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output, printed = os.pipe()
        with theirs, log.open("ab") as errors, os.fdopen(printed, "wb") as prints:
            given = [theirs.fileno(), prints.fileno(), errors.fileno()]
            socket.send_fds(self._orders, [json.dumps(order).encode()], given)
        return ForkedProcess(report, os.fdopen(output))

    def close(self) -> None:
        self._orders.close()
        self._process.kill()  # it may still be importing; its trainers live on
        self._process.wait()


@contextmanager
def trainer_servers() -> Generator[Start]:
    """Start trainers from servers that take turns.

    What an interpreter draws when it starts, such as the hashes of texts, is then not the same before and after a
    crash. A trainer for which the environment says something else at import than for the servers is executed.
    """
    with ExitStack() as stack:
        servers: list[_Server] = []
        for _ in range(SERVER_COUNT):
            servers.append(_Server())
            stack.callback(servers[-1].close)
        turns, at_import = itertools.cycle(servers), _read_at_import()

        def start(arguments: list[str], log: Path) -> Process:
            if _read_at_import() != at_import:
                return execute(arguments, log)
            return next(turns).start(arguments, log)

        yield start


def _read_at_import() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_AT_IMPORT)}

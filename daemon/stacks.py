"""The stacks of all threads on SIGUSR1, written without the interpreter's help: also where the event loop hangs."""

import faulthandler
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

SIZE_BYTES_MAX = 1024 * 1024


def stacks_path(data_socket: Path) -> Path:
    """Return the file that the stacks of the daemon on a data socket go to."""
    return data_socket.with_name(
        "daemon.stacks" if data_socket.name == "data.sock" else f"{data_socket.name}.stacks"
    )


@contextmanager
def stacks_on_signal(data_socket: Path) -> Generator[None]:
    """Append the stacks to the file beside the socket whenever SIGUSR1 comes; for as long as the block runs."""
    path = stacks_path(data_socket)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            path.unlink(missing_ok=True)

"""The oracle: a process of its own, which hears what trainers say, keeps it, and answers when it is kept.

    python oracle_process.py SOCKET JOURNAL

Each line is one message (account.py); the answer is a line with what must not have happened. Everything is appended
to the journal, with what was acknowledged or restored made durable before the answer. It imports nothing of the
product: what it knows, it was told, and what comes back it compares.
"""

import json
import os
import selectors
import socket
import sys
from collections.abc import Callable

from account import Account

DURABLE = {"acknowledged", "begun", "found", "listed"}
READ_BYTES = 1 << 16


class Oracle:
    """Serves all connections in one thread."""

    def __init__(self, journal_fd: int) -> None:
        self.account = Account()
        self.violations: list[str] = []
        self._journal_fd = journal_fd
        self._selector = selectors.DefaultSelector()

    def serve(self, listener: socket.socket) -> None:
        """Answer until the process is ended."""
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        self._selector.register(sock, selectors.EVENT_READ, self._reader(sock))

    def _reader(self, sock: socket.socket) -> Callable[[], None]:
        waiting = bytearray()

        def read() -> None:
            try:
                data = sock.recv(READ_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:  # half a line of a trainer that was killed says nothing
                self._selector.unregister(sock)
                sock.close()
                return
            waiting.extend(data)
            while (end := waiting.find(b"\n")) >= 0:
                line = bytes(waiting[: end + 1])
                del waiting[: end + 1]
                self._answer(sock, line)

        return read

    def _answer(self, sock: socket.socket, line: bytes) -> None:
        said = json.loads(line)
        if said["what"] == "summary":
            answer: object = {"counts": dict(self.account.counts), "violations": self.violations}
        elif said["what"] == "runs":
            answer = {name: run.acknowledged for name, run in self.account.runs.items()}
        elif said["what"] == "expected_events":
            answer = self.account.expected_events()
        else:
            answer = self._take(said, line)
        try:
            sock.sendall(json.dumps(answer).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):  # killed while it waited; its next read says so, too
            return

    def _take(self, said: dict[str, object], line: bytes) -> list[str]:
        os.write(self._journal_fd, line)
        if said["what"] in DURABLE:
            os.fsync(self._journal_fd)
        found = self.account.take(said)
        for text in found:
            os.write(self._journal_fd, json.dumps({"violation": text}).encode() + b"\n")
        self.violations += found
        return found


def main() -> None:
    """Serve on the socket of the first argument, with the journal of the second."""
    journal_fd = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        print("ready", flush=True)
        Oracle(journal_fd).serve(listener)


if __name__ == "__main__":
    main()

"""The way to the oracle: a line said, a line answered."""

import json
import socket
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0


class OracleClient:
    """One connection; used by one thread."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(DEADLINE_S)
        self._sock.connect(str(path))
        self._file = self._sock.makefile("rb")

    def say(self, what: str, **facts: object) -> Any:
        """Say something and return the answer: for what is recorded, the sentences of what must not have happened."""
        self._sock.sendall(json.dumps({"what": what, **facts}).encode() + b"\n")
        answer = self._file.readline()
        if not answer:
            raise ConnectionError("the oracle is gone")
        return json.loads(answer)

    def close(self) -> None:
        """Leave."""
        self._file.close()
        self._sock.close()

"""A real Prometheus on loopback that scrapes once a second, and its HTTP API."""

import json
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed (Debian: apt-get install prometheus)",
)

DEADLINE_S = 60.0
POLL_S = 0.1


def eventually(reached: Callable[[], bool]) -> None:
    """Return when it is so. Asks seldom: what it waits for needs the processor, too."""
    for _ in range(int(DEADLINE_S / POLL_S)):
        if reached():
            return
        threading.Event().wait(POLL_S)
    raise AssertionError(f"did not happen within {DEADLINE_S} s")


class Prometheus:
    """Its API at one port."""

    def __init__(self, port: int) -> None:
        self._port = port

    def api(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer; AssertionError with its text where it is an error."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an instant query."""
        return self.api("query", query=expression)["result"]

    def values(self, expression: str) -> list[float]:
        """Return their values."""
        return [float(sample["value"][1]) for sample in self.query(expression)]

    def is_ready(self) -> bool:
        """Tell whether it answers yet."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=10) as answer:
                return answer.status == 200
        except OSError:
            return False


@contextmanager
def prometheus_over(folder: Path, metrics_port: int, rules: Path) -> Generator[Prometheus]:
    """Run one that scrapes a daemon and evaluates these rules; it is ended when the block is left."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder.mkdir()
    (folder / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": [
                    {"job_name": "everstep", "static_configs": [{"targets": [f"127.0.0.1:{metrics_port}"]}]}
                ],
            }
        )
    )
    arguments = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log)
    server = Prometheus(port)
    try:
        eventually(server.is_ready)
        yield server
    finally:
        process.terminate()
        process.wait(20)

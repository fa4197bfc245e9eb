"""The Store of `torch.distributed`: real servers, in processes of their own."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from everstep.hook import rank_store
from everstep.hook.rank_store import own_client, wait_for

SERVE = """
import time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""

CONNECT = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from everstep.core.errors import DeadlineError
from everstep.hook import rank_store

store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=float(sys.argv[2])))
rank_store.default_store, rank_store.CONNECT_DEADLINE_S = lambda: store, float(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
began_s = time.monotonic()
try:
    rank_store.own_client()
except DeadlineError as error:
    print(f"{time.monotonic() - began_s:.1f} {error}", flush=True)
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("patience_s", "connect_s", "said"),
    [(300.0, 1.0, "cannot be reached within 1 s"), (2.0, 60.0, "cannot be reached: ")],
)
def test_a_store_that_nobody_serves_any_more_is_an_error_soon(
    server: tuple[subprocess.Popen[str], int], patience_s: float, connect_s: float, said: str
) -> None:
    """Where ranks have no agent nobody ends them when rank 0 dies, and torch would try to connect for minutes."""
    serving, port = server
    words = [sys.executable, "-c", CONNECT, str(port), str(patience_s), str(connect_s)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as connecting:
        assert connecting.stdout is not None
        assert connecting.stdin is not None
        try:
            assert connecting.stdout.readline() == "ready\n"
            serving.kill()
            serving.wait()
            connecting.stdin.write("\n")
            connecting.stdin.flush()
            took, _, error = connecting.stdout.readline().partition(" ")
        finally:
            connecting.kill()
    assert said in error
    assert f"TCPStore of torch.distributed at 127.0.0.1:{port}" in error
    assert "whoever serves it has ended" in error
    assert float(took) < 30, "not minutes"


def test_a_store_without_connections_serves_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        """What has no `clone`."""

    store = Bare()
    monkeypatch.setattr(rank_store, "default_store", lambda: store)
    assert own_client() is store


def test_who_is_waited_for_is_said_once_and_then_waited_for_on(
    server: tuple[subprocess.Popen[str], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rank_store, "SAID_AFTER_S", 0.3)
    _, port = server
    mine, other = (TCPStore("127.0.0.1", port, is_master=False) for _ in range(2))
    late = threading.Timer(1.5, lambda: other.set("late", "1"))
    late.start()
    wait_for(mine, ["late"], 60.0, lambda: "rank 3")
    late.join()
    assert caplog.text.count("ranks_awaited who='rank 3' for=60s") == 1
    mine.set("after", "2")
    assert other.get("after") == b"2", "a wait that ran out spoils nothing"
    wait_for(mine, ["after"], 60.0, lambda: "rank 3")
    assert caplog.text.count("ranks_awaited") == 1
    with pytest.raises(dist.DistStoreError):
        wait_for(mine, ["never"], 0.5, lambda: "rank 4")
    assert "who='rank 4'" in caplog.text

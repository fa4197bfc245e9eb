"""What a benchmark says of a daemon's processor time and memory, on a process whose needs are known."""

import subprocess
import sys
import threading
from collections.abc import Generator

import meter as meter_module
import pytest
from meter import Meter

MIB = 2**20
PEAK_BYTES = 96 * MIB
CHILD = f"""
import sys
def use():
    memory = bytearray({PEAK_BYTES})
    memory[::4096] = b"x" * len(memory[::4096])
    print("holds", flush=True)
    sys.stdin.readline()
while sys.stdin.readline():
    use()
    print("used", flush=True)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
print("up", flush=True)
child.wait()
"""


@pytest.fixture(params=[CHILD, PARENT], ids=["itself", "its_child"])
def process(request: pytest.FixtureRequest) -> Generator[subprocess.Popen[str]]:
    """One that takes 96 MiB for a line that it reads and frees them for the next; or whose child does."""
    made = subprocess.Popen(
        [sys.executable, "-c", request.param], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with made:
        if request.param == PARENT:
            assert made.stdout is not None
            assert made.stdout.readline() == "up\n"
        yield made
        assert made.stdin is not None
        made.stdin.close()


def test_memory_is_the_peak_of_each_block(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, seen = Meter(), threading.Event()
    memory_bytes = meter_module.memory_bytes

    def looked(pid: int) -> int:
        found = memory_bytes(pid)
        if found >= PEAK_BYTES:
            seen.set()
        return found

    monkeypatch.setattr(meter_module, "memory_bytes", looked)
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(2):
        seen.clear()
        with meter.over(process.pid):
            print("take", file=process.stdin, flush=True)
            assert process.stdout.readline() == "holds\n"
            seen.wait(30)  # for the meter's next look, however late its thread is
            print("free", file=process.stdin, flush=True)
            assert process.stdout.readline() == "used\n"
    with meter.over(process.pid):
        pass
    used, again, after = meter.memory_bytes
    assert used >= PEAK_BYTES
    assert again >= PEAK_BYTES
    assert after < PEAK_BYTES  # it is given back: what is asked for afterwards is no peak
    assert len(meter.cpu_s) == 3

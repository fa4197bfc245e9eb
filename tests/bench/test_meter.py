"""What a benchmark says of a daemon's processor time and memory, on a process whose needs are known."""

import subprocess
import sys
from collections.abc import Generator

import pytest
from meter import Meter

MIB = 2**20
PEAK_BYTES = 96 * MIB
CHILD = f"""
import subprocess, sys, time
def use():
    memory = bytearray({PEAK_BYTES})
    memory[::4096] = b"x" * len(memory[::4096])
    time.sleep(0.2)
for line in sys.stdin:
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
    """One that uses and frees 96 MiB for each line it reads; or whose child does."""
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


def test_memory_is_the_peak_of_each_block(process: subprocess.Popen[str]) -> None:
    meter = Meter()
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(2):
        with meter.over(process.pid):
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "used\n"
    with meter.over(process.pid):
        pass
    used, again, after = meter.memory_bytes
    assert used >= PEAK_BYTES
    assert again >= PEAK_BYTES
    assert after < PEAK_BYTES  # it is given back: what is asked for afterwards is no peak
    assert len(meter.cpu_s) == 3

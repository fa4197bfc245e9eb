"""What tries to register memory with a GPU, against a driver's library that says what the test wants (stub_cuda.c).

No GPU and no driver is needed; what a real one does with the memory is not shown.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "support" / "stub_cuda.c"
EVERSTEP = Path(sys.executable).with_name("everstep")
CHILD = [sys.executable, "-P", "-m", "everstep.daemon.cli.gpu_child"]
INIT = ["cuInit", "cuDeviceGetCount"]
CONTEXT = [*INIT, "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
REGISTER = [*CONTEXT, "cuMemHostRegister_v2"]
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, for a driver's library")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library."""
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return folder


def run(
    command: list[str], driver: Path, log: Path, answers: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    given = {f"STUB_{call}": code for call, code in answers.items()}
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "STUB_LOG": str(log), **given}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60, cwd="/"
    )


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("answers", "status", "calls"),
    [
        ({}, (0, ""), [*REGISTER, "cuMemHostUnregister"]),
        ({"COUNT": "8"}, (0, ""), [*REGISTER, "cuMemHostUnregister"]),
        ({"cuInit": "100"}, (3, "no usable GPU (CUDA error 100)"), INIT[:1]),
        ({"cuDeviceGetCount": "999"}, (3, "no usable GPU (CUDA error 999)"), INIT),
        ({"COUNT": "0"}, (3, "no usable GPU (CUDA error 0)"), INIT),
        ({"cuDevicePrimaryCtxRetain": "2"}, (1, "no context on GPU 0 (CUDA error 2)"), CONTEXT[:3]),
        ({"cuCtxSetCurrent": "201"}, (1, "no context on GPU 0 (CUDA error 201)"), CONTEXT),
        ({"cuMemHostRegister_v2": "304"}, (1, "CUDA error 304 for 4194304 bytes of a memfd"), REGISTER),
    ],
    ids=str,
)
def test_what_the_driver_says_is_the_exit_status(
    driver: Path, tmp_path: Path, answers: dict[str, str], status: tuple[int, str], calls: list[str]
) -> None:
    done = run(CHILD, driver, tmp_path / "log", answers)
    assert (done.returncode, done.stdout.strip()) == status
    assert done.stderr == ""
    assert (tmp_path / "log").read_text().split() == calls


def test_a_library_that_is_none_is_not_tried(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    done = run(CHILD, tmp_path, tmp_path / "log", {})
    assert (done.returncode, done.stdout, done.stderr) == (3, "there is no libcuda.so.1\n", "")


WITH_A_DEVICE = """
mount --rbind /dev "$1" && mount -t tmpfs none /dev || exit 99
for each in "$1"/*; do ln -s "$each" /dev/; done
touch /dev/nvidiactl
shift
exec "$@"
"""
"""In a mount namespace of its own: the node of NVIDIA's driver in /dev, beside what is there."""


@NEEDS_COMPILER
@pytest.mark.root
@pytest.mark.parametrize(
    ("answers", "health", "words"),
    [
        ({}, "ok", "a shared mapping can be registered (cuMemHostRegister)"),
        ({"cuInit": "100"}, "-", "not tried: no usable GPU (CUDA error 100)"),
        (
            {"cuMemHostRegister_v2": "2"},
            "warn",
            "memory cannot be registered: CUDA error 2 for 4194304 bytes",
        ),
    ],
    ids=str,
)
def test_the_doctor_says_it(
    driver: Path, tmp_path: Path, answers: dict[str, str], health: str, words: str
) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    alone = ["unshare", "--mount", "--propagation", "private", "sh", "-c", WITH_A_DEVICE, "sh", str(devices)]
    done = run([*alone, str(EVERSTEP), "doctor", "--json"], driver, tmp_path / "log", answers)
    assert done.returncode in {0, 1}, done.stderr
    (finding,) = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "GPU registration"]
    assert finding["health"] == health
    assert finding["found"].startswith(words)

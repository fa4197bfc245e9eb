"""Why a device has its engine: the same sentence in the log, the status, the metrics and from the doctor."""

import contextlib
import errno
import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest
from pausing import SCRIPTS, wait_until
from places import memory_folder
from scraping import labels

from everstep.checkpoint.engine_choice import choose_engine
from everstep.daemon.control.client import connected

EVERSTEP = Path(sys.executable).with_name("everstep")
NO_AIO = f"206={errno.ENOSYS}"
"""io_setup is absent, as on a kernel that was built without it."""
NO_URING = f"425={errno.EPERM}"
"""io_uring_setup is forbidden, as in most containers."""


class Case(NamedTuple):
    """What a node refuses or its operator wants, and the engine that follows."""

    forbidden: str
    wanted: str
    engine: str
    reason: str


CASES = {
    "direct": Case("", "auto", "aio", "{direct}; kernel AIO"),
    "no AIO": Case(
        NO_AIO, "auto", "uring", "{direct}; no kernel AIO: io_setup(256): Function not implemented; io_uring"
    ),
    "no io_uring": Case(
        NO_URING,
        "uring",
        "aio",
        "{direct}; no io_uring: not permitted, though the kernel has it on: a seccomp filter",
    ),
    "neither": Case(
        f"{NO_AIO},{NO_URING}",
        "auto",
        "plain",
        "{direct}; no kernel AIO: io_setup(256): Function not implemented; no io_uring: not permitted",
    ),
    "wanted": Case("", "uring", "uring", "{direct}; io_uring as configured"),
    "memory": Case("", "auto", "plain", "files in {path} cannot do direct I/O; pwrite and pread"),
}


@contextlib.contextmanager
def daemon_without(forbidden: str, config: Path, socket_path: Path) -> Generator[None]:
    """Run `everstep daemon` where the kernel refuses these calls."""
    command = [sys.executable, "-P", "-m", "everstep.daemon.cli.main", "daemon", "--config", config]
    with socket_path.with_name("daemon.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, SCRIPTS / "without_calls.py", forbidden, *command], stdout=log, stderr=log
        )
    try:
        ready = socket_path.with_name("daemon.json")
        wait_until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, socket_path.with_name("daemon.log").read_text()
        yield
    finally:
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reason_stands_in_log_status_metrics_and_doctor(
    case: Case, node_config: Path, socket_path: Path, tmp_path: Path
) -> None:
    alignment = choose_engine(tmp_path).alignment
    if alignment is None:
        pytest.skip(f"files in {tmp_path} cannot do direct I/O")
    with memory_folder() as memory:
        path = memory if "{path}" in case.reason else tmp_path / "d0"
        node_config.write_text(
            f'[devices]\nx = "{path}"\n[daemon]\nsocket = "{socket_path}"\n[io]\nengine = "{case.wanted}"\n'
        )
        with daemon_without(case.forbidden, node_config, socket_path):
            with connected(socket_path) as client:
                status = client.status()
                (device,) = status.stores[0].devices
                (metric,) = labels(status.daemon.metrics_port, "everstep_engine_info")
            shown = subprocess.run([EVERSTEP, "doctor", "--json", path], capture_output=True, check=False)
    direct = f"direct I/O in multiples of {alignment.offset_bytes} bytes"
    reason = device.engine_reason
    assert reason.startswith(case.reason.format(direct=direct, path=path))
    assert device.engine == case.engine
    log = socket_path.with_name("daemon.log").read_text()
    assert f"device_opened path={path} engine={case.engine} reason={reason}\n" in log
    assert {name: metric[name] for name in ("device", "engine", "reason", "direct")} == {
        "device": str(path),
        "engine": case.engine,
        "reason": reason,
        "direct": str(path != memory).lower(),
    }
    findings = json.loads(shown.stdout)["findings"]
    (finding,) = [each for each in findings if (each["place"], each["check"]) == (str(path), "engine")]
    assert finding["found"] == f"{case.engine}: {reason}"

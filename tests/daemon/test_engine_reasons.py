"""Why a device has its engine: the same sentence in the log, the status, the metrics and from the doctor."""

import asyncio
import contextlib
import errno
import json
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pausing import SCRIPTS, wait_until
from places import memory_folder
from scraping import labels

from everstep.checkpoint import engine_process
from everstep.checkpoint.engine_choice import EngineChoice, choose_engine
from everstep.daemon.config import DaemonConfig, IoSection
from everstep.daemon.control.client import connected
from everstep.daemon.devices.device_queue import QUEUE_LANES
from everstep.daemon.devices.stores import StoreBook

EVERSTEP = Path(sys.executable).with_name("everstep")
NO_AIO = f"206={errno.ENOSYS}"
"""io_setup is absent, as on a kernel that was built without it."""
NO_URING = f"425={errno.EPERM}"
"""io_uring_setup is forbidden, as in most containers."""
_PLAINLY = ("-m", "everstep.daemon.cli.main")


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
def daemon_without(
    forbidden: str, config: Path, socket_path: Path, started_by: Sequence[str | Path] = _PLAINLY
) -> Generator[int]:
    """Run `everstep daemon` where the kernel refuses these calls; its process id."""
    command = [sys.executable, "-P", *started_by, "daemon", "--config", config]
    with socket_path.with_name("daemon.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, SCRIPTS / "without_calls.py", forbidden, *command], stdout=log, stderr=log
        )
    try:
        ready = socket_path.with_name("daemon.json")
        wait_until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, socket_path.with_name("daemon.log").read_text()
        yield process.pid
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


def contexts_of(pid: int) -> int:
    """Return how many kernel AIO contexts a process holds: the kernel maps a ring for each."""
    return Path(f"/proc/{pid}/maps").read_text().count("/[aio]")


@pytest.mark.parametrize(
    ("forbidden", "limit", "engines"),
    [
        ("", ("LEFT", "1"), ["uring", "uring"]),
        ("", ("LEFT", "3"), ["uring", "uring"]),
        ("", ("LEFT", "6"), ["aio", "uring"]),
        (NO_URING, ("LEFT", "6"), ["aio", "plain"]),
        ("", ("CALLS", "1"), ["uring", "uring"]),
        ("", ("CALLS", "3"), ["uring", "uring"]),
        ("", ("CALLS", "6"), ["uring", "uring"]),
        (NO_URING, ("CALLS", "6"), ["plain", "plain"]),
        ("", ("CALLS", "10"), ["aio", "uring"]),
    ],
)
def test_where_a_device_cannot_have_all_of_its_contexts_it_gets_another_engine_and_holds_none(
    forbidden: str,
    limit: tuple[str, str],
    engines: list[str],
    node_config: Path,
    socket_path: Path,
) -> None:
    if choose_engine(node_config.parent).alignment is None:
        pytest.skip(f"files in {node_config.parent} cannot do direct I/O")
    started_by = (SCRIPTS / "few_contexts.py", *limit)
    with (
        daemon_without(forbidden, node_config, socket_path, started_by) as pid,
        connected(socket_path) as client,
    ):
        found = {device.path: device for device in client.status().stores[0].devices}
        held = contexts_of(pid)
    assert sorted(device.engine for device in found.values()) == engines
    assert held == QUEUE_LANES * engines.count("aio")
    log = socket_path.with_name("daemon.log").read_text()
    for path, device in found.items():
        refused = "no kernel AIO: io_setup(256): Resource temporarily unavailable"
        assert (refused in device.engine_reason) == (device.engine != "aio")
        assert f"device_opened path={path} engine={device.engine} reason={device.engine_reason}\n" in log


def test_where_no_process_can_be_made_any_more_engines_are_in_threads(
    devices: list[Path], socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of the lanes finds that the user may have no more: the first is ended."""
    if choose_engine(devices[0]).alignment is None:
        pytest.skip(f"files in {devices[0]} cannot do direct I/O")
    real, started = subprocess.Popen[bytes], list[subprocess.Popen[bytes]]()

    def start(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        if started:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(real(*arguments, **options))
        return started[0]

    monkeypatch.setattr(engine_process.subprocess, "Popen", start)
    config = DaemonConfig(io=IoSection(process=True))

    async def opened_and_closed() -> list[EngineChoice]:
        book = StoreBook(config, socket=socket_path, private=True)
        opened = await book.open([str(devices[0])])
        await book.close()
        return [queue.choice for queue in opened.queues.values()]

    (choice,) = asyncio.run(opened_and_closed())
    assert choice.name == "aio"
    assert choice.reason.startswith("no process of its own: Resource temporarily unavailable; direct I/O")
    assert started[0].returncode is not None

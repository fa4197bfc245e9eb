"""`everstep doctor` on this machine: real files, the real kernel, a real daemon."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.engine import EngineConfig
from everstep.checkpoint.engine_choice import choose_engine
from everstep.checkpoint.uring_probe import uring_refusal
from everstep.daemon.cli import doctor as doctor_module
from everstep.daemon.cli.doctor import look_at_directories, look_at_node
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, daemon_process, node_daemon

NOBODY = 65534
EVERSTEP = Path(sys.executable).with_name("everstep")


def doctor(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [EVERSTEP, "doctor", *arguments], capture_output=True, text=True, check=False, timeout=60, cwd="/"
    )


def findings(*arguments: str | Path, code: int = 0) -> dict[tuple[str, str], Any]:
    done = doctor("--json", *arguments)
    assert done.returncode == code, done
    document = json.loads(done.stdout)
    assert (document["verdict"] == "fail") == (code == 1)
    return {(finding["place"], finding["check"]): finding for finding in document["findings"]}


def test_the_engine_is_the_one_that_a_daemon_would_choose(devices: list[Path]) -> None:
    devices[0].chmod(0o700)
    found = findings(*devices)
    choice = choose_engine(devices[0])
    assert found[str(devices[0]), "engine"]["found"] == f"{choice.name}: {choice.reason}"
    assert found[str(devices[0]), "directory"]["health"] == "ok"
    assert "file system" in found[str(devices[1]), "drive"]["found"]
    assert [found[str(device), "drive"]["health"] for device in devices] == ["warn", "warn"]
    assert list(devices[0].iterdir()) == []


def test_the_write_cache_is_the_kernels_word_and_an_fsync_is_timed(tmp_path: Path) -> None:
    (facts,) = look_at_directories([tmp_path])
    assert facts.write_cache in {"unknown", "write back", "write through"}
    assert facts.fsync_s is None or facts.fsync_s > 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_device_reserves_is_what_the_kernel_counts(
    node_config: Path, socket_path: Path, devices: list[Path]
) -> None:
    with node_daemon(node_config, socket_path):
        with connected(socket_path) as client:
            status = client.status()
        engines = [device.engine for device in status.stores[0].devices]
        rings = Path(f"/proc/{status.daemon.pid}/maps").read_text().count("/[aio]")
    node = look_at_node(0, "")
    depth = EngineConfig().queue_depth
    assert rings * depth == node.requests_per_device * engines.count("aio")


def test_what_was_not_compiled_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hook = Path(doctor_module.__file__).parents[2] / "hook"
    sources = {path.stem for path in hook.glob("*.c")}
    compiled = {path.name.removeprefix("_").split(".")[0] for path in hook.glob("_*.abi3.so")}
    assert set(doctor_module.COMPILED) == sources
    assert set(look_at_node(0, "").not_compiled) == sources - compiled
    monkeypatch.setattr(doctor_module, "HOOK", tmp_path)
    (tmp_path / "_copies.abi3.so").write_text("of another machine")
    assert look_at_node(0, "").not_compiled == doctor_module.COMPILED


@pytest.mark.parametrize("gives", [True, False])
def test_one_huge_page_is_asked_for(gives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def take(_: int, octets: memoryview, begin: int, end: int) -> bool:
        asked.append((begin, end))
        assert octets.nbytes == end
        return gives

    monkeypatch.setattr(doctor_module, "huge_page_bytes", lambda: 2**21)
    monkeypatch.setattr(doctor_module, "take_huge_pages", take)
    assert look_at_node(0, "").has_huge_pages is gives
    assert asked == [(0, 2**21)]
    monkeypatch.setattr(doctor_module, "huge_page_bytes", lambda: 0)
    assert not look_at_node(0, "").has_huge_pages


def test_a_directory_that_is_none_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = findings(tmp_path / "absent", file, code=1)
    assert found[str(tmp_path / "absent"), "directory"]["health"] == "fail"
    assert f"mkdir -p -m 0700 {tmp_path / 'absent'}" in found[str(tmp_path / "absent"), "directory"]["advice"]
    assert "no directory" in found[str(file), "directory"]["found"]
    text = doctor(file).stdout
    assert "fail  directory" in text
    assert "-> name a directory" in text


@pytest.mark.root
def test_a_directory_of_somebody_else_is_named_with_its_owner() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # every folder above may be entered by all
        os.seteuid(NOBODY)
        try:
            (facts,) = look_at_directories([Path(name)])
        finally:
            os.seteuid(0)
    assert facts.problem == f"it belongs to uid 0 with mode 0700: uid {NOBODY} may not write there"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_memory_is_no_drive() -> None:
    (facts,) = look_at_directories([Path("/dev/shm")])
    assert facts.mount.kind == "tmpfs"


def test_a_socket_directory_that_others_may_enter_fails(
    socket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings()["", "socket"]["found"] == str(socket_path)
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    monkeypatch.setenv("EVERSTEP_SOCKET", str(shared / "data.sock"))
    assert "0755" in findings(code=1)["", "socket"]["found"]


def test_without_directories_those_of_the_daemon_are_looked_at(
    socket_path: Path, devices: list[Path]
) -> None:
    with daemon_process(socket_path) as daemon, FakeTrainer(socket_path) as trainer:
        trainer.open_run(devices, name="run", world_size=1)
        found = findings()
        assert f"pid {daemon.pid}" in found["", "daemon"]["found"]
        assert {place for place, _ in found} == {"", *map(str, devices)}


@pytest.mark.parametrize("is_named", [False, True])
def test_what_a_daemon_holds_has_the_engine_of_its_configuration(
    node_config: Path, socket_path: Path, devices: list[Path], *, is_named: bool
) -> None:
    with node_config.open("a") as file:
        file.write('[io]\nengine = "plain"\n')
    with node_daemon(node_config, socket_path):
        with connected(socket_path) as client:
            known = {
                each.path: f"{each.engine}: {each.engine_reason}"
                for each in client.status().stores[0].devices
            }
        found = findings(*(devices if is_named else []))
    assert {place: found[place, "engine"]["found"] for place in known} == known
    assert all(text.startswith("plain: ") for text in known.values())


LIMIT_BYTES = 8 << 20
WITHOUT_LOCKING = ["prlimit", f"--memlock={LIMIT_BYTES}", "setpriv", "--bounding-set=-ipc_lock"]
"""Before a command that root starts: no right to lock more than the limit."""


@pytest.mark.root
@pytest.mark.parametrize(
    ("section", "health", "words"),
    [
        ('engine = "uring"\nregister_arenas = true\n', "warn", "io.register_arenas is on"),
        ('engine = "uring"\nregister_arenas = true\n[memory]\narena_max_bytes = 2097152', "ok", "enough"),
        ('engine = "uring"\n', "ok", "only io.register_arenas needs more"),
        ('engine = "plain"\nregister_arenas = true\n', "ok", "only io.register_arenas needs more"),
    ],
    ids=["all", "bounded", "not", "without_uring"],
)
def test_the_daemons_limit_of_locked_memory_is_held_against_its_configuration(
    node_config: Path, socket_path: Path, section: str, health: str, words: str
) -> None:
    """Its own limit counts, not that of the shell that asks."""
    if refusal := uring_refusal(8):
        pytest.skip(f"no io_uring: {refusal}")
    with node_config.open("a") as file:
        file.write(f"[io]\n{section}")
    with node_daemon(node_config, socket_path, prefix=WITHOUT_LOCKING):
        finding = findings()["", "locked memory"]
    assert (finding["health"], bool(finding["advice"])) == (health, health == "warn")
    assert f"{LIMIT_BYTES} bytes may be locked" in finding["found"]
    assert words in finding["found"]


@pytest.mark.root
def test_without_a_daemon_it_is_the_private_one_that_a_trainer_would_start() -> None:
    if refusal := uring_refusal(8):
        pytest.skip(f"no io_uring: {refusal}")
    variables = {"EVERSTEP_IO__ENGINE": "uring", "EVERSTEP_IO__REGISTER_ARENAS": "true"}
    for given, health in (({}, "ok"), (variables, "warn")):
        done = subprocess.run(
            [*WITHOUT_LOCKING, EVERSTEP, "doctor", "--json"], capture_output=True, check=False, timeout=60,
            env={**os.environ, **given},
        )  # fmt: skip
        (finding,) = [
            each for each in json.loads(done.stdout)["findings"] if each["check"] == "locked memory"
        ]
        assert finding["health"] == health


def test_the_machine_is_looked_at(socket_path: Path, node_config: Path) -> None:
    found = findings()
    assert os.uname().release in found["", "kernel"]["found"]
    assert found["", "descriptor store"]["found"] == "no daemon answers"
    if not Path("/dev/nvidiactl").exists():
        assert found["", "GPU registration"]["found"] == "not tried: no NVIDIA GPU here"
    environment = {**os.environ, "NOTIFY_SOCKET": "/nowhere", "FDSTORE": "64"}
    with node_daemon(node_config, socket_path, environment=environment):
        found = findings()
    assert found["", "descriptor store"]["found"] == "64 descriptors survive the daemon"
    assert found["", "ports"]["found"].startswith("metrics answer on 127.0.0.1:")
    assert found["", "clock"]["health"] in {"ok", "warn"}


def test_a_daemon_that_stands_still_is_a_failure(socket_path: Path, node_config: Path) -> None:
    with node_daemon(node_config, socket_path) as daemon:
        daemon.send_signal(signal.SIGSTOP)
        try:
            found = findings(code=1)
        finally:
            daemon.send_signal(signal.SIGCONT)
    assert found["", "ports"]["health"] == "fail"
    assert "does not answer" in found["", "ports"]["found"]

"""The log of real daemons: its form, its level, and what a client that repeats itself can do to it."""

import contextlib
import json
import logging
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest
from pausing import wait_until

from everstep.core.errors import ConfigError
from everstep.daemon.log import LineHandler, LogSection, with_environment
from everstep.daemon.log_repetition_machine import PER_WINDOW
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames


def lines(socket_path: Path) -> list[dict[str, object]]:
    text = socket_path.with_name("daemon.log").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_json_where_no_person_watches_and_a_repeated_event_is_counted(
    node_config: Path, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERSTEP_LOG")
    socket_path.parent.mkdir(mode=0o700, exist_ok=True)
    wrong = frames.SealedEverywhere(attempt=1, step=1)
    with node_daemon(node_config, socket_path):
        with FakeTrainer(socket_path) as trainer:
            for _ in range(PER_WINDOW + 50):
                trainer.send(wrong)
                assert isinstance(trainer.receive(), frames.Failure)
        with FakeTrainer(socket_path) as trainer:
            assert isinstance(trainer.hello, frames.Welcome)
        wait_until(lambda: any(each["event"] == "daemon_ready" for each in lines(socket_path)))
    found = lines(socket_path)
    assert all(list(each)[:4] == ["time", "level", "event", "logger"] for each in found)
    ready = next(each for each in found if each["event"] == "daemon_ready")
    assert (ready["private"], ready["socket"]) == (False, str(socket_path))
    assert str(ready["time"]).endswith("Z")
    refused = [each for each in found if each["event"] == "request_refused"]
    assert len(refused) == 1, (
        "what a client does wrong again and again is counted for a minute (access/refusals.py)"
    )
    assert refused[0]["source"] == f"uid:{os.getuid()}"
    assert f"pid={os.getpid()}" in str(refused[0]["text"])


def test_text_where_a_person_watches(
    node_config: Path, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERSTEP_LOG")
    socket_path.parent.mkdir(mode=0o700, exist_ok=True)
    ours, theirs = pty.openpty()
    program = [sys.executable, "-P", "-m", "everstep.daemon.cli.main", "daemon", "--config", str(node_config)]
    daemon = subprocess.Popen(program, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    said = b""
    try:
        while b"daemon_ready" not in said:
            assert select.select([ours], [], [], 60)[0], said
            said += os.read(ours, 4096)
    finally:
        daemon.terminate()
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while data := os.read(ours, 4096):
                said += data
        assert daemon.wait(60) == 0
        os.close(ours)
    ready = next(line for line in said.decode().splitlines() if "daemon_ready" in line)
    assert not ready.startswith("{")
    assert f"socket={socket_path}" in ready


def test_the_level_of_the_configuration_and_the_variable_before_it(
    node_config: Path, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_config.write_text(node_config.read_text() + '[log]\nlevel = "error"\nform = "text"\n')
    monkeypatch.setenv("EVERSTEP_LOG", "info,json")
    socket_path.parent.mkdir(mode=0o700, exist_ok=True)
    with node_daemon(node_config, socket_path):
        pass
    assert {each["level"] for each in lines(socket_path)} == {"info"}


def test_what_the_variable_may_say() -> None:
    section = LogSection(level="warning")
    assert with_environment(section, {}) == section
    assert with_environment(section, {"EVERSTEP_LOG": "Debug, text"}) == LogSection(
        level="debug", form="text"
    )
    with pytest.raises(ConfigError, match="EVERSTEP_LOG has 'loud'"):
        with_environment(section, {"EVERSTEP_LOG": "loud"})


@pytest.mark.parametrize("text", ['level = "loud"', 'form = "xml"', "levels = 1"])
def test_a_wrong_section_ends_the_start(node_config: Path, text: str) -> None:
    node_config.write_text(node_config.read_text() + f"[log]\n{text}\n")
    command = [sys.executable, "-m", "everstep.daemon.cli.main", "daemon", "--config", str(node_config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "log" in done.stderr


def test_a_line_for_the_journal_has_its_priority(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        handler = LineHandler(stream, json=True, journal=True)
        handler.handle(
            logging.makeLogRecord({"msg": "peer_unknown reason=%s", "args": ("x",), "levelname": "WARNING"})
        )
        handler.close()
    said = (tmp_path / "log").read_text()
    assert said.startswith("<4>{")
    assert json.loads(said[3:])["reason"] == "x"

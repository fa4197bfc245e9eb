"""`everstep device` as people use it: with a running daemon, with a node's daemon, and on directories alone."""

import io
import json
import os
import pty
import shutil
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.device_change import drain, find_device
from everstep.checkpoint.testing import make_state, opened, save
from everstep.core.errors import RunBusyError
from everstep.core.ids import CheckpointId
from everstep.daemon.cli.main import main
from everstep.daemon.control.client import connected
from everstep.daemon.control.views import DeviceStatus
from everstep.daemon.testing import DEADLINE_S, FakeTrainer, daemon_process, node_daemon
from everstep.proto import frames

UID = os.geteuid()
OLD, NEW = CheckpointId(1, 10), CheckpointId(1, 20)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def everstep(*arguments: str | Path) -> Done:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def document(*arguments: str | Path, code: int = 0) -> Any:
    done = everstep(*arguments, "--json")
    assert (done.returncode, done.stderr) == (code, ""), done
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def stored(devices: list[Path]) -> list[Path]:
    """A run whose older checkpoint lies on both devices and whose newest only on the first."""
    with opened(devices) as (store, _):
        run = store.run(UID, "demo", create=True)
        run.begin_attempt(1, fresh=False)
        save(run, make_state(store, 1), OLD)
        drain(store, find_device(store, str(devices[1])))
        save(run, make_state(store, 2), NEW)
        run.set_complete_floor(NEW)
    return devices


@contextmanager
def trainer_of(socket_path: Path, storage: list[Path], name: str = "test") -> Generator[FakeTrainer]:
    with FakeTrainer(socket_path) as trainer:
        assert isinstance(trainer.open_run(storage, name=name), frames.RunOpened)
        yield trainer


def told_by_status() -> dict[str, str]:
    return {each["path"]: each["state"] for each in document("status")["stores"][0]["devices"]}


def states(*arguments: str | Path) -> dict[str, str]:
    """Return the state of each device by its path; a retired one's is overlaid by what took its place."""
    (store,) = document("device", "ls", *arguments)["stores"]
    return {device["path"]: device["state"] for device in reversed(store["devices"])}


def files_on(device: Path) -> set[str]:
    """Return the files of checkpoints; rglob would fail where a daemon removes a directory meanwhile."""
    found = (f"{folder}/{name}" for folder, _, names in os.walk(device) for name in names)
    return {name for name in found if name.endswith(".safetensors")}


class TestWithoutADaemon:
    def test_ls_says_what_lies_where(self, stored: list[Path]) -> None:
        (store,) = document("device", "ls", *stored)["stores"]
        by_path = {device["path"]: device for device in store["devices"]}
        first, second = (by_path[str(path)] for path in stored)
        assert (first["state"], second["state"]) == ("ok", "draining")
        assert [part["checkpoint"] for part in first["parts"]] == ["1.20", "1.10"]
        assert [part["checkpoint"] for part in second["parts"]] == ["1.10"]
        assert (first["is_drained"], second["is_drained"]) == (False, True)
        for device, path in ((first, stored[0]), (second, stored[1])):
            size = sum(each.stat().st_size for each in path.rglob("*.safetensors"))
            assert device["held_bytes"] == sum(part["size_bytes"] for part in device["parts"]) == size
            assert device["total_bytes"] >= device["free_bytes"] > 0
        text = everstep("device", "ls", *stored).stdout
        assert "every run restarts from elsewhere" in text
        table = [line for line in text.splitlines() if not line.startswith("!")]
        assert len(table) >= 3

    def test_a_missing_device_is_retired_and_the_store_is_whole(self, stored: list[Path]) -> None:
        shutil.rmtree(stored[1])
        assert states(*stored) == {str(stored[0]): "ok", str(stored[1]): "missing"}
        assert "nothing is deleted" in everstep("device", "ls", *stored).stdout
        done = document("device", "retire", stored[1], "--yes", "--storage", *stored)
        assert [part["checkpoint"] for part in done["lost"]] == ["1.10"]
        assert states(*stored) == {str(stored[0]): "ok", str(stored[1]): "retired"}
        assert "what it holds is ignored" in everstep("device", "ls", *stored).stdout
        listed = {each["checkpoint"]: each for each in document("ls", "demo", *stored)["checkpoints"]}
        assert (listed["1.20"]["state"], listed["1.10"]["state"]) == ("complete", "damaged")
        assert "(retired)" in listed["1.10"]["problems"][0]
        assert everstep("rm", "demo@1.10", *stored).returncode == 0, "nothing forbids deleting any more"

    def test_it_says_what_is_lost_and_asks(self, stored: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        command = ("device", "retire", stored[0], "--force", "--storage", *stored)
        done = everstep(*command)
        assert done.returncode == 2
        assert "demo@1.20, demo@1.10" in done.stdout
        assert "no other complete checkpoint of demo is there" in done.stdout
        assert "nobody is there to be asked" in done.stderr
        for answer, code, state in (("n\n", 1, "ok"), ("y\n", 0, "retired")):
            ours, theirs = pty.openpty()
            with os.fdopen(theirs) as terminal:
                monkeypatch.setattr(sys, "stdin", terminal)
                os.write(ours, answer.encode())
                assert everstep(*command).returncode == code
                assert states(*stored)[str(stored[0])] == state
            os.close(ours)

    def test_refusals_name_the_reason(self, stored: list[Path]) -> None:
        done = everstep("device", "retire", stored[0], "--yes", "--storage", *stored)
        assert (done.returncode, "it is well, and not drained" in done.stderr) == (1, True)
        done = everstep("device", "retire", "nvme7", "--yes", "--storage", *stored)
        assert (done.returncode, "no device 'nvme7'" in done.stderr) == (3, True)
        assert f"the devices are {stored[0]}, {stored[1]}" in done.stderr
        done = everstep("device", "drain", stored[0], "--storage", *stored)
        assert (done.returncode, "no other device" in done.stderr) == (1, True)
        refused = document("device", "retire", stored[1], "--storage", stored[0], code=2)
        assert "asks nothing" in refused["error"]["message"]

    def test_what_loses_nothing_is_not_asked(self, devices: list[Path]) -> None:
        with opened(devices):
            pass
        done = everstep("device", "retire", devices[1], "--force", "--storage", *devices)
        assert (done.returncode, "nothing is lost" in done.stdout) == (0, True), done

    def test_drain_and_its_end(self, stored: list[Path]) -> None:
        assert everstep("device", "drain", "--cancel", stored[1], "--storage", *stored).returncode == 0
        assert set(states(*stored).values()) == {"ok"}
        done = everstep("device", "drain", stored[0], "--storage", *stored)
        assert "a restart would still take demo@1.20" in done.stdout
        assert states(*stored)[str(stored[0])] == "draining"

    def test_a_retired_device_is_readmitted_as_a_new_one(self, stored: list[Path]) -> None:
        assert everstep("device", "retire", stored[1], "--yes", "--storage", *stored).returncode == 0
        held = {path.name for path in stored[1].rglob("*.safetensors")}
        done = document("device", "readmit", stored[1], "--storage", *stored)
        assert done["is_new"]
        assert Path(done["aside"]).is_relative_to(stored[1] / "quarantine")
        assert {path.name for path in Path(done["aside"]).rglob("*.safetensors")} == held
        assert states(*stored) == dict.fromkeys(map(str, stored), "ok")
        again = document("device", "readmit", stored[1], "--storage", stored[0])
        assert not again["is_new"], "it is a member: nothing is to be done"

    def test_readmit_explains_itself(self) -> None:
        text = everstep("device", "readmit", "--help").stdout
        assert "moved into its quarantine/" in text
        assert max(len(line) for line in text.splitlines()) <= 80


class TestARunningDaemon:
    def test_drain_applies_at_once(self, stored: list[Path], socket_path: Path) -> None:
        """To a trainer that is attached, with the layout that it has; and it is told."""
        with daemon_process(socket_path), trainer_of(socket_path, stored) as trainer:
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())

            def save(number: int) -> bool:
                """Tell whether a new checkpoint has put something on the device."""
                before = files_on(stored[1])
                arena.save(CheckpointId(1, number), seed=number, slot=number % 2)
                assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
                trainer.send(frames.SealedEverywhere(attempt=1, step=number))
                return bool(files_on(stored[1]) - before)

            assert not save(30)
            assert everstep("device", "drain", stored[1], "--cancel").returncode == 0
            assert save(31)
            assert everstep("device", "drain", stored[1]).returncode == 0
            assert not save(32)
            relative = Path(os.path.relpath(stored[1]))
            assert everstep("device", "drain", relative).returncode == 0
            unknown = everstep("device", "drain", "nvme7").stderr
            assert f"the devices are {stored[0]}, {stored[1]}" in unknown
            told = [event for event in trainer.events if isinstance(event, frames.DevicesChanged)]
            conditions = [
                {info.path: info.condition for info in event.devices}[str(stored[1])] for event in told
            ]
            assert frames.DeviceCondition.OK in conditions
            assert conditions[-1] is frames.DeviceCondition.DRAINING
            status = document("status")["stores"][0]["devices"]
            assert {device["path"]: device["state"] for device in status}[str(stored[1])] == "draining"
            arena.close()

    def test_a_missing_device_is_retired_while_a_trainer_trains(
        self, stored: list[Path], socket_path: Path
    ) -> None:
        away = stored[1].with_name("away")
        stored[1].rename(away)
        with daemon_process(socket_path), trainer_of(socket_path, stored) as trainer:
            assert document("status")["stores"][0]["devices"][1]["state"] == "missing"
            done = everstep("device", "retire", stored[1], "--yes")
            assert done.returncode == 0, done.stderr
            assert "lost: 1 checkpoint" in done.stdout
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 30), seed=3)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            arena.close()
        away.rename(stored[1])
        assert states(*stored) == {str(stored[0]): "ok", str(stored[1]): "retired"}

    def test_one_that_has_failed_is_taken_back_while_a_trainer_trains(
        self, devices: list[Path], socket_path: Path
    ) -> None:
        bad, away = devices[0], devices[0].with_name("away")
        with daemon_process(socket_path), trainer_of(socket_path, devices) as trainer:
            trainer.begin_attempt(1)

            def save(step: int) -> frames.Persisted:
                arena = trainer.make_arena(trainer.layout())
                arena.save(CheckpointId(1, step), seed=step)
                persisted = trainer.event(frames.Persisted)
                arena.close()
                assert isinstance(persisted, frames.Persisted)
                return persisted

            assert not save(29).under_replicated
            bad.rename(away)
            assert save(30).under_replicated
            assert told_by_status()[str(bad)] == "suspect"
            gone = everstep("device", "readmit", bad)
            assert (gone.returncode, "is not the directory that was opened" in gone.stderr) == (1, True)
            away.rename(bad)
            done = everstep("device", "readmit", bad)
            assert (done.returncode, "is a member again, with all it has" in done.stdout) == (0, True), done
            assert told_by_status()[str(bad)] == "ok"
            assert not save(31).under_replicated
            again = everstep("device", "readmit", bad)
            assert (again.returncode, "was well already" in again.stdout) == (0, True)
            told = [event for event in trainer.events if isinstance(event, frames.DevicesChanged)]
            conditions = [{info.path: info.condition for info in event.devices}[str(bad)] for event in told]
            assert conditions[-1] is frames.DeviceCondition.OK
        assert states(*devices)[str(bad)] == "ok"

    def test_what_needs_the_store_for_itself_waits_for_the_trainer(
        self, stored: list[Path], socket_path: Path
    ) -> None:
        away = stored[1].with_name("away")
        stored[1].rename(away)
        with daemon_process(socket_path):
            with trainer_of(socket_path, stored) as trainer:
                away.rename(stored[1])
                done = everstep("device", "readmit", stored[1])
                assert (done.returncode, "is attached" in done.stderr) == (1, True)
                assert everstep("device", "retire", stored[1], "--yes").returncode == 0
                refused = everstep("device", "readmit", stored[1].parent / "d7")
                assert (refused.returncode, "no open store" in refused.stderr) == (3, True)
                trainer.begin_attempt(1)
                arena = trainer.make_arena(trainer.layout())
                arena.save(CheckpointId(1, 30), seed=3)
                assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
                arena.close()
            # It vanished: its snapshot waits in memory for a restart.
            with connected(socket_path) as daemon, pytest.raises(RunBusyError, match="wait in memory"):
                daemon.readmit_device(str(stored[1]))

    def test_a_daemon_cannot_be_bypassed(self, stored: list[Path], socket_path: Path) -> None:
        with daemon_process(socket_path), trainer_of(socket_path, stored):
            for command in ("drain", "retire"):
                words = ["--yes"] if command == "retire" else []
                done = everstep("device", command, stored[0], *words, "--storage", *stored)
                assert (done.returncode, "is held by" in done.stderr) == (1, True)
            done = everstep("device", "readmit", stored[1], "--storage", *stored)
            assert (done.returncode, "is held by" in done.stderr) == (1, True)


class TestANodeDaemon:
    def test_devices_have_names_and_come_back_without_a_restart(
        self, stored: list[Path], node_config: Path, socket_path: Path
    ) -> None:
        with node_daemon(node_config, socket_path):
            assert states() == {str(stored[0]): "ok", str(stored[1]): "draining"}
            assert everstep("device", "retire", "nvme1", "--yes").returncode == 0
            done = everstep("device", "readmit", stored[1])
            assert "is a member, as a new, empty device" in done.stdout
            assert "was well already" in everstep("device", "readmit", stored[1]).stdout
            (store,) = document("device", "ls")["stores"]
            names = [(each["name"], each["state"]) for each in store["devices"]]
            assert names == [("nvme0", "ok"), ("nvme1", "ok"), ("", "retired")]
            assert "nvme0 " in everstep("device", "ls").stdout
            assert states() == {str(stored[0]): "ok", str(stored[1]): "ok"}
            assert document("ls", "demo")["checkpoints"][0]["state"] == "complete"
            with FakeTrainer(socket_path) as trainer:
                reply = trainer.ask(
                    frames.OpenRun(
                        request_id=trainer.number(),
                        name="demo",
                        rank=0,
                        world_size=1,
                        storage=["nvme0", "nvme1"],
                        takeover=False,
                    )
                )
                assert isinstance(reply, frames.RunOpened)
                assert len(reply.devices) == 2

    def test_a_readmission_that_is_refused_leaves_the_store_open(
        self, stored: list[Path], node_config: Path, socket_path: Path
    ) -> None:
        shutil.rmtree(stored[1])
        stored[1].mkdir()
        with node_daemon(node_config, socket_path):
            done = everstep("device", "readmit", stored[1])
            assert (done.returncode, "while others are missing" in done.stderr) == (1, True)
            assert states() == {str(stored[0]): "ok", str(stored[1]): "missing"}
            assert everstep("device", "retire", "nvme1", "--yes").returncode == 0
            assert everstep("device", "readmit", stored[1]).returncode == 0
            assert set(states().values()) == {"ok"}

    def test_a_device_that_is_mounted_again_comes_back_with_all_it_has(
        self, stored: list[Path], node_config: Path, socket_path: Path
    ) -> None:
        away = stored[1].with_name("away")
        stored[1].rename(away)
        with node_daemon(node_config, socket_path):
            assert states()[str(stored[1])] == "missing"
            away.rename(stored[1])
            assert not document("device", "readmit", stored[1])["is_new"]
            assert states()[str(stored[1])] == "draining"
            listed = {each["checkpoint"]: each["state"] for each in document("ls", "demo")["checkpoints"]}
            assert listed == {"1.20": "complete", "1.10": "complete"}

    def test_policy_retires_what_was_missing_for_long_and_nobody_needs(
        self, stored: list[Path], node_config: Path, socket_path: Path
    ) -> None:
        shutil.rmtree(stored[1])
        node_config.write_text(node_config.read_text() + '[retire]\nmissing_after = "1s"\n')
        with node_daemon(node_config, socket_path), connected(socket_path) as daemon:
            wait_for_log(socket_path, "device_retired")
            (store,) = daemon.devices()
            assert [each.state for each in store.devices] == [DeviceStatus.OK, DeviceStatus.RETIRED]
        assert "verdict=RETIRE" in socket_path.with_name("daemon.log").read_text()

    def test_policy_gives_up_nothing_that_a_restart_would_take(
        self, stored: list[Path], node_config: Path, socket_path: Path
    ) -> None:
        shutil.rmtree(stored[0])
        node_config.write_text(node_config.read_text() + '[retire]\nmissing_after = "1s"\n')
        with node_daemon(node_config, socket_path), connected(socket_path) as daemon:
            wait_for_log(socket_path, "verdict=KEEP")
            (store,) = daemon.devices()
            (missing,) = [each for each in store.devices if each.path == str(stored[0])]
            assert missing.state is DeviceStatus.MISSING
            assert missing.missing_since_unix_s > 1.7e9


def wait_for_log(socket_path: Path, text: str) -> None:
    log = socket_path.with_name("daemon.log")
    for _ in range(int(DEADLINE_S / 0.05)):
        if text in log.read_text():
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{text!r} is not in the log:\n{log.read_text()}")

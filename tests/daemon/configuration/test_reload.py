"""A real daemon reads its file again: by SIGHUP, by the control API; what a service manager hears."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest
from pausing import wait_until

from everstep.core.errors import ConfigError, EverstepError, UsageError
from everstep.core.ids import CheckpointId
from everstep.daemon.configuration.reloader import Reloader
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, daemon_process, node_daemon
from everstep.proto import frames

EVERSTEP = Path(sys.executable).with_name("everstep")
MANAGER_DEADLINE_S = 60


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(MANAGER_DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield sock


def told(manager: socket.socket, wanted: str) -> str:
    """Return the next message with a field; others may be said between."""
    while wanted not in (said := manager.recv(4096).decode()):
        pass
    return said


def everstep(*arguments: str | Path, code: int = 0) -> str:
    done = subprocess.run(
        [EVERSTEP, *arguments], capture_output=True, text=True, check=False, timeout=60, cwd="/"
    )
    assert done.returncode == code, done
    return done.stdout + done.stderr


def keep_last_in_effect(socket_path: Path) -> str:
    with connected(socket_path) as client:
        values = client.reload_config(dry_run=True).values
    return next(value.text for value in values if value.path == ("retention", "keep_last"))


def add(config: Path, text: str) -> Callable[[], object]:
    before = config.read_text()
    config.write_text(before + text)
    return lambda: config.write_text(before)


def test_sighup_takes_a_right_file_and_a_wrong_one_changes_nothing(
    node_config: Path, socket_path: Path, manager: socket.socket
) -> None:
    with node_daemon(node_config, socket_path) as daemon:
        told(manager, "READY=1")
        take_back = add(node_config, "[retention]\nkeep_last = 7\n[scrub]\nevery = '1d'\n")
        before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        daemon.send_signal(signal.SIGHUP)
        reloading = told(manager, "RELOADING=1")
        stamp_us = int(re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", reloading)[1])  # type: ignore[index]
        assert before_us <= stamp_us <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        assert "2 keys changed" in told(manager, "READY=1")
        assert keep_last_in_effect(socket_path) == "7"

        take_back()
        add(node_config, "[retention]\nkeep_last = 8\n[scrub]\nevery = 'sometimes'\n")
        daemon.send_signal(signal.SIGHUP)
        assert "not reloaded" in (said := told(manager, "STATUS="))
        assert "scrub.every is 'sometimes'" in said
        assert keep_last_in_effect(socket_path) == "7"
    log = socket_path.with_name("daemon.log").read_text()
    assert re.search(
        r"configuration_reloaded .*retention\.keep_last: 3 -> 7; scrub\.every: \"7d\" -> '?\"?1d", log
    )
    assert re.search(r"configuration_not_reloaded .*node\.toml:\d+: scrub\.every is 'sometimes'", log)


def test_what_a_reload_changes_is_what_the_next_checkpoint_goes_by(
    node_config: Path, socket_path: Path
) -> None:
    """Memory for arenas is refused by the new bound, without a restart."""
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run(["nvme0", "nvme1"])  # type: ignore[list-item]
        trainer.begin_attempt(1)
        add(node_config, "[memory]\narena_max_bytes = 4096\n")
        with connected(socket_path) as client:
            (change,) = client.reload_config(dry_run=False).changes
        assert (change.key, change.after) == ("memory.arena_max_bytes", "4096")
        reply = trainer.ask(
            frames.MakeArena(
                request_id=trainer.number(), layout_digest="0" * 64, slot_size_bytes=8192, slot_count=2
            )
        )
        assert isinstance(reply, frames.Failure)
        assert reply.code == "MemoryRefusedError"


def test_a_key_that_needs_a_restart_refuses_the_whole(node_config: Path, socket_path: Path) -> None:
    with node_daemon(node_config, socket_path):
        add(node_config, "[retention]\nkeep_last = 7\n[io]\nqueue_depth = 16\n")
        with connected(socket_path) as client:
            trial = client.reload_config(dry_run=True)
            assert "io.queue_depth: 256 -> 16" in trial.problem
            with pytest.raises(ConfigError, match=r"only a restart.*restart the daemon"):
                client.reload_config(dry_run=False)
        assert keep_last_in_effect(socket_path) == "3"
        assert "io.queue_depth" in everstep("config", "reload", code=2)
        assert "nothing would change: io.queue_depth" in everstep("config", "reload", "--dry-run", code=1)


def test_many_at_once_and_a_file_that_changes_meanwhile(node_config: Path, socket_path: Path) -> None:
    """Each answer is of one whole file; the last one stands."""
    texts = {
        keep: node_config.read_text() + f"[retention]\nkeep_last = {keep}\n[verify]\nafter_s = {keep}\n"
        for keep in range(2, 12)
    }
    answers: list[set[str]] = []

    def reload_some() -> None:
        with connected(socket_path) as client:
            for _ in range(10):
                done = client.reload_config(dry_run=False)
                answers.append({v.text for v in done.values if v.path[-1] in {"keep_last", "after_s"}})

    with node_daemon(node_config, socket_path):
        threads = [threading.Thread(target=reload_some) for _ in range(3)]
        for thread in threads:
            thread.start()
        for text in texts.values():
            fresh = node_config.with_suffix(".new")
            fresh.write_text(text)
            fresh.replace(node_config)
        for thread in threads:
            thread.join()
        with connected(socket_path) as client:
            client.reload_config(dry_run=False)
        assert keep_last_in_effect(socket_path) == "11"
    assert all(
        {float(text) for text in each} in ({3.0, 10.0}, *({float(k)} for k in texts)) for each in answers
    )


def test_a_storm_of_signals_while_shards_are_saved_ends_with_the_newest_file(
    node_config: Path, socket_path: Path
) -> None:
    before = node_config.read_text()
    with node_daemon(node_config, socket_path) as daemon, FakeTrainer(socket_path) as trainer:
        trainer.open_run(["nvme0", "nvme1"], name="demo")  # type: ignore[list-item]
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        for number in range(1, 101):
            fresh = node_config.with_suffix(".new")
            fresh.write_text(before + f"[retention]\nkeep_last = {number + 1}\n")  # 2 is the least
            fresh.replace(node_config)
            daemon.send_signal(signal.SIGHUP)
            if number % 20 == 0:
                arena.save(CheckpointId(1, number), seed=number, slot=number // 20 % 2)
                trainer.event(frames.Persisted)
                trainer.send(frames.SealedEverywhere(attempt=1, step=number))
        arena.close()
        wait_until(lambda: keep_last_in_effect(socket_path) == "101")
        with connected(socket_path) as client:
            assert client.checkpoints("demo")[0].checkpoint == CheckpointId(1, 100)
    log = socket_path.with_name("daemon.log").read_text()
    assert "Traceback" not in log
    assert "internal_error" not in log
    assert "not_reloaded" not in log


class Daemon:
    """As much of a daemon as a signal needs; what it begins waits to be run."""

    private, is_started = False, True

    def __init__(self) -> None:
        self.begun: list[Coroutine[object, object, None]] = []
        self.reporter = self
        self.refused: list[EverstepError] = []

    def configuration(self, count: int, error: EverstepError) -> None:
        assert count == 0
        self.refused.append(error)

    def spawn(self, work: Coroutine[object, object, None], what: str) -> None:
        assert what == "reloading the configuration"
        self.begun.append(work)


def test_signals_that_come_before_the_file_is_read_are_one() -> None:
    async def check() -> None:
        daemon = Daemon()
        reloader = Reloader(daemon)  # type: ignore[arg-type]
        for _ in range(100):
            reloader.on_signal()
        (first,) = daemon.begun
        await first
        assert len(daemon.refused) == 1, "there is no file, and this is said once"
        reloader.on_signal()
        assert len(daemon.begun) == 2, "the file may have changed after it was read"
        daemon.begun[1].close()

    asyncio.run(check())


def test_a_private_daemon_has_no_file(socket_path: Path) -> None:
    with daemon_process(socket_path) as daemon:
        daemon.send_signal(signal.SIGHUP)  # ignored
        with connected(socket_path) as client:
            with pytest.raises(UsageError, match="private and has no configuration file"):
                client.reload_config(dry_run=False)
            trial = client.reload_config(dry_run=True)
        assert trial.file == ""
        origins = {value.path: value.origin for value in trial.values}
        assert origins["daemon", "linger_s"] == "EVERSTEP_LINGER_S"
        assert origins["daemon", "socket"] == "--set daemon.socket"
        assert daemon.poll() is None


def test_the_environment_and_flags_hold_over_a_reload(node_config: Path, socket_path: Path) -> None:
    environment = {**os.environ, "EVERSTEP_RETENTION__KEEP_LAST": "5"}
    with node_daemon(node_config, socket_path, environment=environment):
        add(node_config, "[retention]\nkeep_last = 9\n")
        with connected(socket_path) as client:
            assert client.reload_config(dry_run=False).changes == ()
        assert keep_last_in_effect(socket_path) == "5"
        shown = everstep("config", "show", "--origin")
        assert re.search(r"keep_last = 5 +# EVERSTEP_RETENTION__KEEP_LAST", shown)


def test_a_daemon_does_not_start_with_an_unknown_override(node_config: Path) -> None:
    environment = {**os.environ, "EVERSTEP_IO__DEPTH": "3"}
    done = subprocess.run(
        [EVERSTEP, "daemon", "--config", node_config],
        capture_output=True, text=True, check=False, timeout=60, env=environment,
    )  # fmt: skip
    assert done.returncode == 2
    assert "EVERSTEP_IO__DEPTH overrides no key" in done.stderr
    assert "did you mean EVERSTEP_IO__QUEUE_DEPTH?" in done.stderr

"""Without room for an arena training goes on, and restoring waits for room; a small /dev/shm is room enough."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from in_process import (
    assert_restores,
    node_config,
    node_service,
    own_socket,
    refused,
    saved_run,
    service,
    training,
)
from pausing import Pause, Phase, pausing_daemon, wait_until

from everstep.checkpoint.testing import opened
from everstep.core.errors import MemoryRefusedError

MIB = 1024**2
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def storage(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "d0", tmp_path / "d1"]
    for path in paths:
        path.mkdir()
    return paths


class TestMemory:
    @pytest.mark.parametrize(
        ("memory", "words"),
        [
            ("arena_max_bytes = 4096", "the daemon's budget has 0 MiB left"),
            (f"reserve_bytes = {2**50}", "/proc/meminfo has"),
        ],
        ids=["budget", "node"],
    )
    def test_without_room_for_an_arena_training_goes_on_and_the_report_says_why(
        self, storage: list[Path], memory: str, words: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        saved = saved_run(storage)
        with node_service(storage, memory) as names:
            with training(names, fresh=True) as trained:
                for _ in range(3):
                    trained.run.checkpoint()
                    trained.step()
                while not any(words in each.example for each in trained.run.report().skipped.values()):
                    trained.run.checkpoint()
                    trained.step()
                report = trained.run.report()
            assert report.checkpoints_complete == 0
            assert report.failures == ()
            assert any(
                "checkpoint_skipped" in record.getMessage() and words in record.getMessage()
                for record in caplog.records
            )
        with opened(storage, read_only=True) as (store, _):
            (run,) = store.runs()
            assert {str(info.checkpoint) for info in run.checkpoints()} == set(saved)

    def test_without_room_to_restore_it_says_so_and_restores_later(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        with (
            node_service(storage, "arena_max_bytes = 4096") as names,
            contextlib.suppress(KeyboardInterrupt),
            training(names) as trained,
        ):
            before = trained.weights()
            with refused(MemoryRefusedError, "an arena of", "budget", hint="memory.arena_max_bytes"):
                trained.run.restore()
            assert torch.equal(trained.weights(), before)
            raise KeyboardInterrupt
        assert_restores(storage, saved)

    def test_the_last_boundary_waits_for_room_that_what_is_being_written_takes(
        self, storage: list[Path], tmp_path: Path
    ) -> None:
        pause = Pause(tmp_path / "pause")
        config = node_config(storage, f"arena_max_bytes = {20 * MIB}\nreserve_bytes = 0")
        log = own_socket().with_name("daemon.log")

        def go_once_it_is_refused() -> None:
            try:
                wait_until(
                    lambda: "waits until what is in the arenas before it is written" in log.read_text()
                )
            finally:
                pause.go()

        releasing = threading.Thread(target=go_once_it_is_refused)
        with pausing_daemon(pause, Phase("everstep.checkpoint.commit:head_of"), config) as daemon:
            with training(["nvme0", "nvme1"]) as trained:  # two slots of 8 MiB
                trained.step()
                assert trained.run.wait(60)
                trained.run.checkpoint()
                trained.step()
                pause.reached(daemon)
                trained.model.register_buffer("more", torch.zeros(MIB // 4))
                releasing.start()
            releasing.join()
            report = trained.run.report()
        assert (report.checkpoints_complete, report.failures) == (2, ())

    @pytest.mark.root
    def test_the_limit_of_a_cgroup_is_named(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        group = Path(f"/sys/fs/cgroup/memory/everstep-test-{os.getpid()}")
        if not group.parent.is_dir():
            pytest.skip("needs cgroup v1's memory controller at /sys/fs/cgroup/memory")
        group.mkdir()
        try:
            (group / "memory.limit_in_bytes").write_text(str(1024 * MIB))
            with service() as daemon, training(storage, fresh=True) as trained:
                (group / "cgroup.procs").write_text(str(daemon.pid))
                trained.step()
                while not any(str(group) in each.example for each in trained.run.report().skipped.values()):
                    trained.run.checkpoint()
                    trained.step()
        finally:
            group.rmdir()
        with opened(storage, read_only=True) as (store, _):
            (run,) = store.runs()
            assert {str(info.checkpoint) for info in run.checkpoints()} == set(saved)


@pytest.mark.root
def test_a_dev_shm_of_64_mib_is_enough(storage: list[Path]) -> None:
    """A container's usual size; state, arena and loader workers take no part of it that grows with the state."""
    script = [sys.executable, "-P", str(SCRIPTS / "wide_train.py"), "--storage", *map(str, storage)]
    line = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", line, "sh", *script]
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert first.returncode == 0, first.stderr[-3000:]
    said = json.loads(first.stdout.splitlines()[-1])
    assert said["shm_mib"] == 64
    assert said["state_mib"] > 64
    assert said["failures"] == []
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert again.returncode == 0, again.stderr[-3000:]
    told = json.loads(again.stdout.splitlines()[-1])
    assert told["restored"] == said["complete"]
    assert told["first_digest"] == said["last_digest"]

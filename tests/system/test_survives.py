"""The main job: a run that is killed anywhere goes on, and ends bit-identical to one that was not."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pausing import wait_until
from scraping import scrape

from everstep.checkpoint.testing import opened
from everstep.daemon.control.client import connected
from everstep.hook.trainer_testing import Job, daemon_pid


def ids_of(lines: list[dict[str, Any]], epoch: int) -> list[int]:
    return [sample for line in lines if line["epoch"] == epoch for sample in line["ids"]]


def flip_a_byte_of_each_page(pid: int) -> None:
    """Change what a daemon keeps in memory: a byte of each page, so that no segment is spared."""
    entries: dict[int, Path] = {}  # by inode: a memfd may be open twice
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "everstep-arena" in str(each.readlink()):
                entries[each.stat().st_ino] = each
    for entry in entries.values():
        with entry.open("r+b") as file:
            for at in range(8, os.fstat(file.fileno()).st_size, 4096):
                byte = os.pread(file.fileno(), 1, at)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 1]), at)


class TestKillTrainer:
    def test_it_goes_on_from_memory_and_ends_the_same(self, job: Job, undisturbed: str) -> None:
        trainer = job.start("--until", "13")
        trainer.until_key("waiting")
        trainer.kill()
        again = job.start()
        first = again.until_key("restored")
        assert first["source"] == "memory"
        assert first["restored"] == "1.10"
        (done,) = again.done()
        assert done["done"] == undisturbed
        assert done["failures"] == []

    def test_what_changed_in_memory_is_found_and_read_from_the_devices(
        self, job: Job, undisturbed: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EVERSTEP_METRICS_PORT", "0")
        trainer = job.start("--until", "13")
        trainer.until_key("waiting")
        trainer.kill()
        flip_a_byte_of_each_page(daemon_pid())
        again = job.start("--step-s", "0.1")
        first = again.until_key("restored")
        assert (first["restored"], first["source"], first["skipped"]) == ("1.10", "disk", [])
        with connected(Path(os.environ["EVERSTEP_SOCKET"])) as client:
            port = client.status().daemon.metrics_port
            wait_until(lambda: scrape(port)["everstep_restores_total{disk}"] == 1)
        assert scrape(port)["everstep_restores_total{memory}"] == 0  # what was handed over was not right
        assert "memory_damaged checkpoint=1.10 reason=block 0 of segment" in again.log
        (done,) = again.done()
        assert done["done"] == undisturbed

    @pytest.mark.parametrize("step", [5, 12, 14, 24])
    def test_at_the_boundaries_of_checkpoint_and_epoch(self, job: Job, undisturbed: str, step: int) -> None:
        trainer = job.start("--workers", "1")
        trainer.until_step(step)
        trainer.kill()
        (done,) = job.start("--workers", "1").done()
        assert done["done"] == undisturbed

    def test_several_times_in_a_row_each_sample_enters_once(self, job: Job, undisturbed: str) -> None:
        lineage: list[dict[str, Any]] = []
        done: dict[str, Any] = {}
        for stop in (7, 11, 18, None):
            if stop is None:
                trainer = job.start("--every", "2")
                (done,) = trainer.done()
            else:
                trainer = job.start("--every", "2", "--hold", str(stop + 2))  # it never gets to the next stop
                trainer.until_step(stop)
                trainer.kill()
            restored = trainer.lines[0]["restored"]
            base = int(restored.split(".")[1]) if restored else 0
            lineage = [line for line in lineage if line["step"] <= base] + trainer.steps
        assert done["done"] == undisturbed
        for epoch in (0, 1):
            assert sorted(ids_of(lineage, epoch)) == list(range(96))


class TestKillDaemon:
    def test_training_goes_on_and_checkpoints_come_back(self, job: Job, undisturbed: str) -> None:
        trainer = job.start("--step-s", "0.1")
        trainer.until_step(7)
        os.kill(daemon_pid(), signal.SIGKILL)
        (done,) = trainer.done()
        assert done["done"] == undisturbed
        assert done["complete"] == "1.25"
        assert "daemon_lost" in trainer.log
        assert "daemon_reconnected" in trainer.log

    def test_with_the_trainer_it_restores_from_disk(self, job: Job, undisturbed: str) -> None:
        trainer = job.start("--until", "13")
        trainer.until_key("waiting")
        os.kill(daemon_pid(), signal.SIGKILL)
        trainer.kill()
        again = job.start()
        first = again.until_key("restored")
        assert (first["source"], first["restored"]) == ("disk", "1.10")
        (done,) = again.done()
        assert done["done"] == undisturbed


class TestEnds:
    def test_an_exception_takes_no_last_boundary_but_what_is_sealed_is_persisted(self, job: Job) -> None:
        trainer = job.start("--settle", "--raise-at", "10")
        assert trainer.finish() == 1
        again = job.start("--until", "11")
        first = again.until_key("restored")
        assert first["restored"] == "1.10"
        again.kill()

    def test_a_finished_run_says_so_and_trains_nothing(self, job: Job) -> None:
        (done,) = job.start().done()
        again = job.start()
        (repeated,) = again.done()
        assert again.lines[0]["finished"] is True
        assert again.steps == []
        assert repeated["done"] == done["done"]
        assert "run_finished" in again.log

    def test_a_finished_run_goes_on_with_more_epochs(self, job: Job) -> None:
        job.start("--epochs", "1").done()
        more = job.start("--epochs", "2")
        more.done()
        assert {line["epoch"] for line in more.steps} == {1}

    def test_fresh_starts_anew_and_its_checkpoints_win(self, job: Job) -> None:
        job.start("--epochs", "2").done()
        fresh = job.start("--fresh", "--until", "6")
        assert fresh.until_key("restored")["restored"] is None
        assert "fresh=True leaves the checkpoints of earlier attempts aside" in fresh.log
        fresh.until_key("waiting")
        fresh.kill()
        again = job.start("--until", "7")
        assert again.until_key("restored")["restored"] == "2.5"
        again.kill()

    def test_after_a_fresh_start_that_saved_nothing_it_is_said_why_nothing_is_restored(
        self, job: Job
    ) -> None:
        job.start("--epochs", "1").done()
        fresh = job.start("--fresh", "--every", "1000", "--until", "1")
        fresh.until_key("waiting")
        fresh.kill()
        again = job.start("--until", "1")
        assert again.until_key("restored")["restored"] is None
        assert "no complete checkpoint, or fresh=True has left theirs aside" in again.log
        again.kill()

    def test_a_new_store_is_said(self, job: Job) -> None:
        trainer = job.start("--epochs", "1")
        trainer.done()
        assert "new_store" in trainer.log


class TestOneRunOneTrainer:
    def test_the_same_name_is_refused_while_the_first_lives(self, job: Job) -> None:
        first = job.start("--until", "3")
        first.until_key("waiting")
        second = job.start()
        assert second.finish() == 1
        assert "RunBusyError" in second.log
        first.kill()

    def test_takeover_fences_the_first(self, job: Job) -> None:
        first = job.start("--settle", "--step-s", "0.2", "--epochs", "50")
        first.until_step(6)
        second = job.start("--takeover", "--epochs", "50")
        assert second.until_key("restored")["restored"].startswith("1.")
        assert first.finish() == 1
        assert "FencedError" in first.log
        second.kill()

    def test_a_dead_trainers_forked_workers_do_not_keep_the_lease(self, job: Job) -> None:
        first = job.start("--workers", "2", "--until", "6")
        first.until_key("waiting")
        os.kill(first.process.pid, signal.SIGKILL)  # the trainer alone: its workers live on
        first.process.wait(60)
        second = job.start("--until", "7")
        assert second.until_key("restored")["restored"] == "1.5"
        second.kill()
        first.kill()


def test_nothing_but_committed_files_is_left_on_the_devices(job: Job) -> None:
    job.start().done()
    for device in job.storage:
        assert not list(device.rglob("*.tmp*"))
    with opened(job.storage, read_only=True) as (store, report):
        assert report.problems == []
        (run,) = store.runs()
        assert all(info.state.value == "complete" for info in run.checkpoints())


def test_segments_are_plain_safetensors_files(job: Job) -> None:
    from safetensors import safe_open

    job.start("--epochs", "1").done()
    names: set[str] = set()
    for path in _segments(job.storage):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
            assert file.metadata()["run_id"]
    assert "model.0.weight" in names
    assert "optimizer.state.0.weight.exp_avg" in names


def _segments(storage: list[Path]) -> list[Path]:
    found = [path for device in storage for path in device.glob("runs/*/*/data/*/*.safetensors")]
    assert found
    return found

"""Who is told that the end comes saves what the time allows, and then ends or goes on as asked."""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from in_process import Training, assert_restores, manifests, own_socket, service, training
from overlapping import slow_copies
from pausing import wait_until
from torch import nn

import everstep
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.control.views import RankState
from everstep.daemon.events.event_types import EventKind, EventQuery
from everstep.hook.end_machine import SIGTERM, Notice
from everstep.hook.notice import ENDED_STATUS, SECOND_S
from everstep.hook.pace import Pace
from everstep.hook.run import Run
from everstep.hook.trainer_testing import Job, Trainer, daemon_pid

NEVER = "100000"
TORCHRUN_WAITS_S = 30.0


def last_step(lines: list[dict[str, object]]) -> int:
    """Return the newest boundary that a trainer has said to come to."""
    return max(int(str(line["step"])) for line in lines)


def test_sigterm_saves_the_boundary_that_comes_next(job: Job) -> None:
    first = job.start("--every", NEVER, "--step-s", "0.02", "--epochs", "50")
    first.until_step(5)
    first.process.send_signal(signal.SIGTERM)
    assert first.finish() == ENDED_STATUS
    ended = last_step(first.steps)
    assert "run_ends run=small reason=SIGTERM" in first.log
    second = job.start("--epochs", "1")
    assert second.until_key("restored")["restored"] == f"1.{ended}"
    second.kill()


def test_a_second_sigterm_ends_a_trainer_that_reaches_no_boundary(job: Job) -> None:
    first = job.start("--every", NEVER, "--until", "3")
    first.until_key("waiting")
    first.process.send_signal(signal.SIGTERM)
    while "run_ends" not in first.log:
        time.sleep(0.01)
    time.sleep(SECOND_S)
    first.process.send_signal(signal.SIGTERM)
    assert first.finish() == ENDED_STATUS


def test_all_ranks_that_are_told_save_the_same_boundary(job: Job) -> None:
    first = job.start("--every", NEVER, "--step-s", "0.02", "--epochs", "50", ranks=2)
    first.until_step(5)
    first.process.send_signal(signal.SIGTERM)  # torchrun's agent passes it on
    first.finish()
    assert first.log.count("run_ended run=small reason=SIGTERM last_complete=1.") == 2, first.log
    second = job.start("--epochs", "1", ranks=2)
    restored = {second.until_key("restored")["restored"], second.until_key("restored")["restored"]}
    (name,) = restored
    assert int(name.partition(".")[2]) == last_step(first.steps)
    second.kill()


def test_ranks_that_measure_differently_end_alike(job: Job) -> None:
    """One believes that no checkpoint fits any more; rank 0 decides by that, and what is under way ends the run."""
    first = job.start("--every", "1", "--step-s", "0.02", "--epochs", "100", "--needed-s", "1000", ranks=2)
    first.until_step(200)
    began_s = time.monotonic()
    first.process.send_signal(signal.SIGTERM)
    first.finish()
    assert time.monotonic() - began_s < TORCHRUN_WAITS_S
    ended = re.findall(r"run_ended run=small reason=SIGTERM last_complete=(\S+) in_time=(\S+)", first.log)
    assert len(ended) == 2, first.log
    assert ended[0] == ended[1]
    assert ended[0][1] == "True"


def test_the_end_of_the_first_checkpoint_shows_all_ranks_that_there_is_time_for_the_last_one(
    job: Job,
) -> None:
    """Nobody knows how long one takes until then; rank 0 looks again for all."""
    first = job.start("--every", "50", "--step-s", "0.02", "--epochs", "50", ranks=2)
    first.until_step(30)
    os.kill(daemon_pid(), signal.SIGSTOP)  # so that nothing is written
    try:
        first.until_step(52)
        first.process.send_signal(signal.SIGTERM)
        wait_until(lambda: first.log.count("run_ends run=small reason=SIGTERM") == 2)
        time.sleep(1.0)  # all ranks have come to the boundary
    finally:
        os.kill(daemon_pid(), signal.SIGCONT)
    first.finish()
    (ended,) = ends(first)
    assert ended == f"reason=SIGTERM last_complete=1.{last_step(first.steps)} in_time=True unsaved_steps=0"
    assert "arena is being allocated" not in first.log


def ends(trainer: Trainer) -> set[str]:
    """Return what the ranks said when they ended: one text if all said the same."""
    assert trainer.log.count("run_ended run=small") == 2, trainer.log
    return set(re.findall("run_ended run=small (.*)", trainer.log))


def test_a_last_boundary_that_one_rank_could_not_save_was_in_time_for_none(job: Job) -> None:
    first = job.start(
        "--every", "20", "--settle", "--step-s", "0.02", "--epochs", "50", "--refuse-last", ranks=2
    )
    first.until_step(90)
    first.process.send_signal(signal.SIGTERM)
    first.finish()
    (ended,) = ends(first)
    assert "in_time=False" in ended
    assert "last_complete=none" not in ended


def test_all_ranks_end_with_the_same_checkpoint_after_a_notice(job: Job) -> None:
    notice = job.folder / "spot"
    noticed = ("--notice", str(notice), "--grace-s", "8")  # as long as the lease of the test below
    first = job.start("--every", NEVER, "--step-s", "0.02", "--epochs", "500", *noticed, ranks=2)
    first.until_step(5)
    notice.touch()
    first.finish()
    (ended,) = ends(first)
    assert (
        ended
        == f"reason={notice} is there last_complete=1.{last_step(first.steps)} in_time=True unsaved_steps=0"
    )


def test_all_ranks_end_with_the_same_checkpoint_before_a_lease_ends(job: Job) -> None:
    first = job.start("--every", NEVER, "--step-s", "0.02", "--epochs", "500", "--lease", "8", ranks=2)
    assert first.finish() == 0
    (ended,) = ends(first)
    assert (
        ended
        == f"reason=the lease ends last_complete=1.{last_step(first.steps)} in_time=True unsaved_steps=0"
    )


def test_the_survivor_of_a_dead_rank_ends_at_once(job: Job) -> None:
    """It waits for what never comes, as in a collective; torchrun ends it, and would wait long."""
    first = job.start("--every", "2", "--until", "6", ranks=2)
    first.until_key("waiting")
    first.until_key("waiting")
    victim = rank_pid(first.process.pid, 1)
    os.kill(victim, signal.SIGKILL)
    began_s = time.monotonic()
    first.finish()
    assert time.monotonic() - began_s < TORCHRUN_WAITS_S
    assert "reason=SIGTERM came to this rank, not to all" in first.log
    second = job.start("--epochs", "1", ranks=2)
    assert second.until_key("restored")["restored"] == "1.6"
    second.kill()


def test_a_restart_by_torchrun_costs_none_of_the_time_that_it_gives_survivors(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: a rank dies, its peer ends, the next group has begun where the last checkpoint is.

    In a Store of its own: in torchrun's, gloo of the next group finds the addresses of the dead one now and then, and
    waits there for ever (pytorch/pytorch#135712).
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    trainer = job.start("--every", "2", "--until", "6", ranks=2, restarts=1)
    trainer.until_key("waiting")
    trainer.until_key("waiting")
    os.kill(rank_pid(trainer.process.pid, 1), signal.SIGKILL)
    began_s = time.monotonic()
    for _ in range(2):
        assert trainer.until_key("restored")["restored"] == "1.6"
    assert time.monotonic() - began_s < TORCHRUN_WAITS_S, "with two imports of torch and a daemon asked again"
    assert "reason=SIGTERM came to this rank, not to all" in trainer.log
    trainer.kill()


def rank_pid(agent: int, rank: int) -> int:
    """Return the process of a rank below torchrun's agent."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(
            FileNotFoundError, ProcessLookupError
        ):  # of some other test, and ended meanwhile
            if entry.name.isdigit() and agent == int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            ):
                environment = (entry / "environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in environment:
                    return int(entry.name)
    raise AssertionError(f"no rank {rank} below process {agent}")


@pytest.fixture
def storage(tmp_path: Path) -> list[Path]:
    path = tmp_path / "d0"
    path.mkdir()
    return [path]


def train_on(trained: Training) -> NoReturn:
    """Train until `run.step()` ends it."""
    while True:
        time.sleep(0.01)
        trained.step()


def test_a_lease_ends_the_run_with_a_checkpoint_in_time(tmp_path: Path) -> None:
    """Unless the machine stands still in its last moments: the best of three counts."""
    assert any(ends_in_time(tmp_path / str(number)) for number in range(3))


def ends_in_time(device: Path) -> bool:
    device.mkdir()
    with service(), training([device]) as trained:
        trained.save()
        began_s = time.monotonic()
        trained.run.lease(1.0)
        with pytest.raises(SystemExit) as ended:
            train_on(trained)
        if time.monotonic() - began_s >= 1.0:
            return False
        assert ended.value.code == 0
        return trained.run.report().last_complete == f"1.{trained.run.steps}"


def end_by_lease(trained: Training) -> NoReturn:
    trained.run.lease(0.5)
    train_on(trained)


def end_by_hand(trained: Training) -> NoReturn:
    raise KeyboardInterrupt


def fail(trained: Training) -> NoReturn:
    raise RuntimeError("the loss is NaN")


def fail_oddly(trained: Training) -> NoReturn:
    raise RuntimeError("no file data\udce9")  # what Python makes of a name that is no UTF-8


@pytest.mark.parametrize(
    ("ends", "kind", "text", "left"),
    [
        (end_by_lease, EventKind.RANK_LEFT, "left: the lease ends", "the lease ends"),
        (end_by_hand, EventKind.RANK_LEFT, "left: KeyboardInterrupt", "KeyboardInterrupt"),
        (fail, EventKind.RANK_LOST, "is gone: RuntimeError: the loss is NaN", ""),
        (fail_oddly, EventKind.RANK_LOST, r"is gone: RuntimeError: no file data\udce9", ""),
    ],
)
def test_a_daemon_is_told_why_a_run_ends_before_its_time(
    storage: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    *,
    ends: Callable[[Training], NoReturn],
    kind: EventKind,
    text: str,
    left: str,
) -> None:
    monkeypatch.setenv("EVERSTEP_LOG", "json")
    with service(), connected(own_socket()) as client:
        events = client.events(EventQuery(since=0, follow=True))
        with contextlib.suppress(SystemExit, KeyboardInterrupt, RuntimeError), training(storage) as trained:
            trained.save()
            ends(trained)
        event = next(each for each in events if each.kind in (EventKind.RANK_LEFT, EventKind.RANK_LOST))
        assert (event.kind, event.text) == (kind, f"rank 0 of run 'bad' {text}")
        assert states(client) == [(RankState.LINGERING, left)]
        (line,) = [each for each in daemon_log() if each["event"].startswith("trainer_")]
        assert line["event"] == ("trainer_left" if left else "trainer_lost")
        assert (line["rank"], line["pid"]) == (0, os.getpid())
        assert line["reason"] == event.text.partition(": ")[2]
        with training(storage) as trained:
            assert trained.run.restore() is not None
            assert states(client) == [(RankState.ATTACHED, "")]


def daemon_log() -> list[dict[str, Any]]:
    """Return the lines of the daemon's log, of which each is JSON."""
    return [json.loads(line) for line in own_socket().with_name("daemon.log").read_text().splitlines()]


def states(client: ControlClient) -> list[tuple[RankState, str]]:
    return [(rank.state, rank.left) for run in client.status().runs for rank in run.ranks]


def test_a_lease_begins_with_a_checkpoint_where_nobody_knows_how_long_one_takes(storage: list[Path]) -> None:
    """Else the only one would be begun in the last moment, whatever it takes."""
    with service(), training(storage) as trained:
        trained.run.lease(600.0)
        until_s = time.monotonic() + 60
        while trained.run.report().checkpoints_complete == 0:
            assert time.monotonic() < until_s
            trained.step()
        assert trained.run.wait()
        taken = trained.run.report().checkpoints_complete
        for _ in range(20):
            trained.step()
        assert trained.run.wait()
        assert trained.run.report().checkpoints_complete == taken  # now it is known


def test_a_run_that_could_save_nothing_does_not_say_that_it_was_in_time(
    storage: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon stands still before it has given any memory."""
    with service() as daemon, training(storage) as trained:
        daemon.send_signal(signal.SIGSTOP)
        try:
            trained.run.lease(0.5)
            with pytest.raises(SystemExit):
                train_on(trained)
        finally:
            daemon.send_signal(signal.SIGCONT)
        (ended,) = [text for text in caplog.messages if text.startswith("run_ended")]
        assert "last_complete=none in_time=False" in ended


def test_sigterm_after_the_last_boundary_ends_the_process_once_that_is_saved(
    storage: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with service():
        with contextlib.ExitStack() as stack:
            trained = stack.enter_context(training(storage))
            trained.save()
            trained.step()
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: any(text.startswith("run_ends") for text in caplog.messages))
            with pytest.raises(SystemExit) as ended:
                stack.close()
        assert ended.value.code == ENDED_STATUS
        assert_restores(storage, {trained.run.report().last_complete: trained.weights()})


def test_what_close_could_not_save_was_not_in_time(
    storage: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(), contextlib.ExitStack() as stack:
        trained = stack.enter_context(training(storage))
        saved = trained.save()
        trained.step()
        monkeypatch.setattr(trained.run._checkpoints, "_begin", lambda _: "no memory for the arena")
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: any(text.startswith("run_ends") for text in caplog.messages))
        with pytest.raises(SystemExit):
            stack.close()
    (text,) = [text for text in caplog.messages if text.startswith("run_ended")]
    assert f"last_complete={saved} in_time=False unsaved_steps=1" in text


def test_sigterm_before_the_first_boundary_ends_the_process_with_nothing_to_save(
    storage: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with service():
        with contextlib.ExitStack() as stack:
            trained = stack.enter_context(training(storage))
            assert trained.run.restore() is None
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: any(text.startswith("run_ends") for text in caplog.messages))
            with pytest.raises(SystemExit) as ended:
                stack.close()
        assert ended.value.code == ENDED_STATUS
        (text,) = [text for text in caplog.messages if text.startswith("run_ended")]
        assert "last_complete=none in_time=True unsaved_steps=0" in text


def test_of_two_runs_both_save_their_last_boundary_before_sigterm_ends_the_process(
    storage: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    def attach(name: str) -> Run:
        model = nn.Linear(2, 2)
        return everstep.attach(name, model=model, storage=storage, every=10**6)

    with service(), contextlib.ExitStack() as stack:
        outer, inner = (stack.enter_context(attach(name)) for name in ("outer", "inner"))
        outer.step()
        inner.step()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: sum(text.startswith("run_ends") for text in caplog.messages) == 2)
        with pytest.raises(SystemExit) as ended:
            stack.close()
    assert ended.value.code == ENDED_STATUS
    assert [run.report().last_complete for run in (inner, outer)] == ["1.2", "1.2"]


def test_an_error_on_its_way_is_not_replaced_by_the_end_that_sigterm_wants(
    storage: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with service():
        run = everstep.attach("one", model=nn.Linear(2, 2), storage=storage, every=10**6)
        run.step()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: any(text.startswith("run_ends") for text in caplog.messages))
        with pytest.raises(ValueError, match="of the script"):
            fail_and_close(run)


def fail_and_close(run: Run) -> None:
    try:
        raise ValueError("of the script")
    finally:
        run.close()


def test_a_lease_that_is_prolonged_goes_on(storage: list[Path]) -> None:
    with service(), training(storage) as trained:
        trained.save()
        trained.run.lease(0.2, ends=False)
        before = trained.run.report().checkpoints_complete
        until_s = time.monotonic() + 60
        while trained.run.report().checkpoints_complete == before:
            assert time.monotonic() < until_s
            time.sleep(0.01)
            trained.step()
        for _ in range(20):
            trained.step()
        assert trained.run.wait()
        assert trained.run.report().checkpoints_complete == before + 1


@pytest.mark.parametrize("by", ["file", "command"])
def test_a_notice_makes_a_checkpoint_and_the_run_goes_on_if_asked(
    storage: list[Path], tmp_path: Path, by: str
) -> None:
    notice = tmp_path / "spot"
    announced: dict[str, Any] = {"file": notice, "command": ["test", "-e", str(notice)]}
    preemption = everstep.Preemption(**{f"notice_{by}": announced[by]}, ends=False, grace_s=1.0)
    with service(), training(storage, preemption=preemption) as trained:
        trained.save()
        before = trained.run.report().checkpoints_complete
        notice.touch()
        until_s = time.monotonic() + 30
        while trained.run.report().checkpoints_complete == before:
            assert time.monotonic() < until_s
            time.sleep(0.01)
            trained.step()
        trained.step()


def test_what_is_trained_after_a_notice_is_saved_too(
    storage: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two minutes of a spot instance are as many as lie between two checkpoints: at once would lose them all."""
    notice = tmp_path / "spot"
    preemption = everstep.Preemption(notice_file=notice, grace_s=3600.0)
    with service(), training(storage, preemption=preemption) as trained:
        trained.save()
        notice.touch()
        until_s = time.monotonic() + 60
        while not trained.run._end._machine._notices:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        before = trained.run.report().last_complete
        for _ in range(20):
            trained.step()
        assert trained.run.wait()
        assert trained.run.report().last_complete == before, "there is time"
        monkeypatch.setattr(Pace, "needed_s", 3600.0)
        with pytest.raises(SystemExit) as ended:
            trained.step()
        assert ended.value.code == ENDED_STATUS


def test_a_notice_saves_the_next_boundary_since_another_one_may_come_too_late(
    storage: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation may be longer than what is left. The last boundary is saved besides."""
    notice = tmp_path / "spot"
    preemption = everstep.Preemption(notice_file=notice, grace_s=3600.0)
    with service(), training(storage, slots=3, preemption=preemption) as trained:
        trained.save()
        for _ in range(5):
            trained.step()
        notice.touch()
        wait_until(lambda: bool(trained.run._end._machine._notices))
        trained.step()
        at_once = f"1.{trained.run.steps}"
        assert trained.run.wait()
        assert trained.run.report().last_complete == at_once
        for _ in range(20):
            trained.step()
        assert trained.run.wait()
        assert trained.run.report().last_complete == at_once, "once"
        monkeypatch.setattr(Pace, "needed_s", 3600.0)
        with pytest.raises(SystemExit) as ended:
            trained.step()
        assert ended.value.code == ENDED_STATUS
        assert trained.run.report().last_complete == f"1.{trained.run.steps}"


def test_where_no_new_checkpoint_fits_the_one_under_way_is_waited_for(
    storage: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(), training(storage) as trained:
        trained.save()
        trained.run.checkpoint()
        trained.step()
        under_way = trained.run.steps
        monkeypatch.setattr(Pace, "needed_s", 1000.0)
        trained.run.lease(30.0)
        with pytest.raises(SystemExit) as ended:
            trained.step()
        assert ended.value.code == 0
        assert trained.run.report().last_complete == f"1.{under_way}"


def test_what_was_sealed_and_not_written_in_time_reaches_the_devices_after_the_run_has_left(
    storage: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon stands still until the trainer has gone: it finds the newest snapshot sealed, and nobody there."""
    left: list[Training] = []
    with service() as daemon:
        try:
            with pytest.raises(SystemExit):
                run_out_of_time(storage, daemon, left)
        finally:
            daemon.send_signal(signal.SIGCONT)
        (trained,) = left
        last = f"1.{trained.run.steps}"
        (ended,) = [text for text in caplog.messages if text.startswith("run_ended")]
        assert "in_time=False" in ended
        assert last not in ended
        wait_until(lambda: bool(list(storage[0].glob(f"runs/*/*/commits/{last}.0.mf"))))
    assert_restores(storage, {last: trained.weights()})


def run_out_of_time(storage: list[Path], daemon: "subprocess.Popen[bytes]", left: list[Training]) -> None:
    with training(storage, slots=3) as trained:
        left.append(trained)
        trained.save()
        daemon.send_signal(signal.SIGSTOP)
        trained.run.lease(0.5)
        train_on(trained)


@pytest.mark.parametrize("has_time", [True, False])
def test_an_end_that_comes_while_a_copy_runs_waits_for_it(
    storage: list[Path], monkeypatch: pytest.MonkeyPatch, has_time: bool
) -> None:
    """And then saves this boundary, or leaves it at that."""
    with service(), slow_copies(monkeypatch) as slow, training(storage, slots=3) as trained:
        trained.save()
        slow.arm()
        trained.run.checkpoint()
        trained.step()
        under_way = trained.run.steps
        monkeypatch.setattr(Pace, "needed_s", 0.1 if has_time else 1000.0)
        told_to_end(trained)
        opening = threading.Timer(0.2, slow.open)
        opening.start()
        with pytest.raises(SystemExit):
            trained.run.step()  # no optimizer has waited for the copy
        opening.join()
        assert trained.run.report().last_complete == f"1.{under_way + has_time}"


def told_to_end(trained: Training) -> None:
    trained.run._end._on_notice(Notice(reason=SIGTERM, until_s=time.monotonic() + 60, ends=True))


def test_the_end_of_the_first_checkpoint_shows_that_there_is_time_for_the_last_one(
    storage: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows how long one takes until then."""
    with service(), slow_copies(monkeypatch) as slow, training(storage, slots=3) as trained:
        trained.step()
        assert trained.run.wait(60)  # for memory
        slow.arm()
        trained.run.checkpoint()
        trained.step()
        assert trained.run._pace.needed_s is None
        told_to_end(trained)
        opening = threading.Timer(0.2, slow.open)
        opening.start()
        with pytest.raises(SystemExit):
            trained.run.step()
        opening.join()
        last = f"1.{trained.run.steps}"
        report = trained.run.report()
        assert (report.last_complete, report.steps) == (last, trained.run.steps)
        assert f"reason=SIGTERM last_complete={last} in_time=True unsaved_steps=0" in caplog.text


def test_what_dies_with_the_daemon_is_taken_again_before_the_end(
    storage: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    left: list[Training] = []
    with service() as daemon, pytest.raises(SystemExit):
        leave_as_the_daemon_dies(storage, daemon, left)
    (trained,) = left
    boundary, last = f"1.{trained.run.steps}", f"1.{trained.run.steps + 1}"
    report = trained.run.report()
    assert report.last_complete == last
    assert f"last_complete={last} in_time=True unsaved_steps=0" in caplog.text
    assert [failure.partition(":")[0] for failure in report.failures] == [boundary]
    assert "daemon_lost" in caplog.text
    assert_restores(storage, {last: trained.weights()})


def leave_as_the_daemon_dies(
    storage: list[Path], daemon: "subprocess.Popen[bytes]", left: list[Training]
) -> NoReturn:
    with training(storage, slots=3) as trained:
        left.append(trained)
        trained.save()
        daemon.send_signal(signal.SIGSTOP)  # so that nothing is written before it dies
        told_to_end(trained)
        threading.Timer(0.5, daemon.kill).start()
        trained.step()
    pytest.fail("it has not left")


def test_two_snapshots_between_seal_and_commit_are_both_committed_as_they_were(storage: list[Path]) -> None:
    with service() as daemon, training(storage, slots=3) as trained:
        del trained.saved[trained.save()]  # collected when newer ones are complete
        before = trained.run.report()
        daemon.send_signal(signal.SIGSTOP)
        try:
            for number in (1, 2):
                trained.run.checkpoint()
                trained.step()
                trained.saved[f"1.{trained.run.steps}"] = trained.weights()
                until_s = time.monotonic() + 20
                while trained.run.report().checkpoints_sealed < before.checkpoints_sealed + number:
                    assert time.monotonic() < until_s
                    time.sleep(0.01)
            assert trained.run.report().checkpoints_complete == before.checkpoints_complete
        finally:
            daemon.send_signal(signal.SIGCONT)
        assert trained.run.wait(60)
        report = trained.run.report()
        assert report.checkpoints_complete == before.checkpoints_complete + 2
        assert (report.failures, report.skipped) == ((), before.skipped)
    for name in sorted(trained.saved, key=lambda name: int(name.partition(".")[2]), reverse=True):
        assert_restores(storage, trained.saved, name)
        for manifest in manifests(storage, name):
            manifest.unlink()

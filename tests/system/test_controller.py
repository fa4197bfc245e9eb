"""What operators ask of a run's controller, with a real daemon and two real ranks: budget, pause, a checkpoint now."""

import fcntl
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.core.errors import DeadlineError, NotFoundError, RanksLostError, UsageError
from everstep.core.ids import CheckpointId
from everstep.daemon.cli.main import main
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.control.views import CheckpointStatus
from everstep.daemon.controller.controller_views import ControllerState
from everstep.daemon.events.event_types import EventKind, EventQuery
from everstep.hook.trainer_testing import Job, Trainer

RUN = "small"
LONG = ("--epochs", "10000", "--step-s", "0.03")


def started(job: Job, *arguments: str, ranks: int) -> Trainer:
    """Return a job in the middle of its training, whose lines nobody reads any more: there is room for them."""
    trainer = job.start(*LONG, *arguments, ranks=ranks)
    trainer.until_step(2)
    assert trainer.process.stdout is not None
    fcntl.fcntl(trainer.process.stdout, fcntl.F_SETPIPE_SZ, 1 << 20)
    return trainer


def kinds_after(client: ControlClient, since: int) -> list[EventKind]:
    return [each.kind for each in client.events(EventQuery(since=since, run=RUN))]


def last_event(client: ControlClient) -> int:
    return max(each.sequence for each in client.events())


def kill_when_forced(trainer: Trainer, since: int) -> None:
    """Kill it as soon as somebody has asked it for a checkpoint."""
    with connected(Path(os.environ["EVERSTEP_SOCKET"])) as client:
        events = client.events(EventQuery(since=since, follow=True, run=RUN))
        try:
            assert any(each.code == "force" for each in events)
        finally:
            events.close()
            trainer.process.send_signal(signal.SIGKILL)


def test_two_ranks_do_what_is_asked_of_their_controller(job: Job) -> None:
    started(job, "--adaptive", ranks=2)
    with connected(Path(os.environ["EVERSTEP_SOCKET"])) as client:
        (before,) = client.controllers()
        assert before.run_name == RUN
        assert before.attached_count == 2

        forced = client.force_checkpoint(RUN, deadline_s=60.0)
        taken = CheckpointId.parse(forced.checkpoint)
        (found,) = [each for each in client.checkpoints(RUN) if each.checkpoint == taken]
        assert found.ranks == (0, 1), "the same boundary on both ranks"
        assert found.state is CheckpointStatus.COMPLETE
        assert found.size_bytes == forced.size_bytes > 0
        assert taken.step >= before.step

        given = client.set_budget(RUN, 0.25)
        assert (given.budget, given.asked_budget) == (0.25, None), "rank 0 keeps to it"
        assert "25" in given.reason or given.state is ControllerState.ADAPTIVE

        paused = client.pause_checkpoints(RUN, 3600.0)
        assert paused.state is ControllerState.PAUSED
        assert paused.paused_until_unix_s == pytest.approx(time.time() + 3600, abs=60)
        assert "as asked" in paused.reason
        settled = client.force_checkpoint(RUN, deadline_s=60.0)
        assert CheckpointId.parse(settled.checkpoint) > taken, "a forced one is taken all the same"
        since = last_event(client)
        first = client.controllers(RUN)[0].step
        while client.controllers(RUN)[0].step < first + 60:
            time.sleep(0.1)
        assert EventKind.SNAPSHOT_SEALED not in kinds_after(client, since), "60 boundaries without any"

        resumed = client.resume_checkpoints(RUN)
        assert resumed.state is ControllerState.ADAPTIVE
        events = client.events(EventQuery(since=since, follow=True, run=RUN))
        assert any(each.kind is EventKind.CHECKPOINT_COMPLETE for each in events)
        events.close()
        asked = [
            each.code for each in client.events(EventQuery(kinds=frozenset({EventKind.CONTROLLER_CHANGED})))
        ]
        assert asked == ["force", "budget", "pause", "force", "resume"]


def test_the_command_line_asks_the_same(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    started(job, "--adaptive", ranks=1)

    def told(*words: str) -> Any:
        assert main(["controller", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert told("force", RUN)["forced"]["run_name"] == RUN
    assert told("budget", RUN, "25%")["controller"]["budget"] == 0.25
    assert told("pause", RUN, "--ttl", "1h")["controller"]["state"] == "paused"
    (shown,) = told("show")["controllers"]
    assert (shown["state"], shown["paused_until_unix_s"] > time.time()) == ("paused", True)
    assert main(["controller", "show", RUN]) == 0
    text = capsys.readouterr().out
    assert "paused until" in text
    assert "25 % of training time" in text
    assert told("resume", RUN)["controller"]["state"] == "adaptive"
    for words, named in (("budget", RUN, "a lot"), "a lot"), (("pause", RUN, "--ttl", "soon"), "soon"):
        assert main(["controller", *words]) == 2
        assert named in capsys.readouterr().err


def test_what_cannot_be_done_is_said(job: Job) -> None:
    trainer = started(job, "--every", "1000000", ranks=1)
    with connected(Path(os.environ["EVERSTEP_SOCKET"])) as client:
        (view,) = client.controllers(RUN)
        assert (view.state, view.interval_steps) == (ControllerState.FIXED, 1_000_000)
        with pytest.raises(UsageError, match="every 1000000 steps"):
            client.set_budget(RUN, 0.1)
        client.pause_checkpoints(RUN, 600.0)
        with pytest.raises(UsageError, match="every 1000000 steps"):
            client.set_budget(RUN, 0.1)
        client.resume_checkpoints(RUN)
        for budget in (0.0, 1.0, -1.0, float("nan")):
            with pytest.raises(UsageError, match="budget"):
                client.set_budget(RUN, budget)
        for ttl_s in (0.0, -5.0, 1e9, float("nan")):
            with pytest.raises(UsageError, match="pause"):
                client.pause_checkpoints(RUN, ttl_s)
        with pytest.raises(NotFoundError, match="'other'"):
            client.force_checkpoint("other")
        forced = client.force_checkpoint(RUN, deadline_s=60.0)
        assert CheckpointId.parse(forced.checkpoint).attempt == 1
        trainer.process.send_signal(signal.SIGSTOP)  # no boundary comes
        try:
            with pytest.raises(DeadlineError, match="no complete checkpoint"):
                client.force_checkpoint(RUN, deadline_s=2.0)
            killer = threading.Thread(target=kill_when_forced, args=(trainer, last_event(client)))
            killer.start()
            with pytest.raises(RanksLostError):
                client.force_checkpoint(RUN, deadline_s=30.0)
            killer.join()
        finally:
            trainer.kill()
        with pytest.raises(NotFoundError, match="no trainer"):
            client.force_checkpoint(RUN)

"""kill -9 of the trainer and of the daemon in each phase of a checkpoint and of a restore.

A script stops the process at the phase's own call (tests/scripts/pause.py), so that the kill falls exactly there.
However it falls: the restart ends bit-identical to the run that nobody disturbed, and the store is whole.
"""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pausing import DEADLINE_S, SCRIPTS, Pause, Phase, pausing_daemon, wait_until

from everstep.checkpoint.testing import opened
from everstep.core.ids import CheckpointId
from everstep.hook.trainer_start_testing import Start
from everstep.hook.trainer_testing import Job, Trainer, daemon_pid, end_daemon

ALLOCATING = Phase("everstep.checkpoint.linux:fallocate")
PERSISTING = Phase("everstep.checkpoint.real_storage:RealStorage.write_segment", 3)
BETWEEN = Phase("everstep.checkpoint.commit:head_of", 2)
"""All data of the second checkpoint are durable, no manifest refers to them."""
HALF = Phase("everstep.checkpoint.real_storage:RealStorage.rename_noreplace", 4, ".0.mf")
"""The second checkpoint's manifest is on one device of two."""
COMPLETING = Phase("everstep.checkpoint.run_store:RunStore.set_complete_floor", 2)
COPYING = Phase("everstep.hook.copier:copy", 4)
"""A call for each of two segments: not the first snapshot, whose state is smaller; half of it is copied."""
LAST = Phase("everstep.checkpoint.commit:head_of", 1, "step=25")

ATTACH_PHASES = {
    "opening": Phase("everstep.checkpoint.recovery:recover"),
    "beginning the attempt": Phase("everstep.checkpoint.run_store:RunStore.begin_attempt"),
}
DAEMON_PHASES = {
    "allocating": ALLOCATING,
    "persisting": PERSISTING,
    "between data and manifest": BETWEEN,
    "half of the manifests": HALF,
    "completing": COMPLETING,
}


def kill_daemon() -> None:
    """Kill the private daemon and return when nobody listens any more: then all its descriptors are closed."""
    os.kill(daemon_pid(), signal.SIGKILL)
    wait_until(lambda: not answers(os.environ["EVERSTEP_SOCKET"]))


def answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(path) == 0


@pytest.fixture
def pause(tmp_path: Path) -> Pause:
    return Pause(tmp_path / "pause")


@pytest.fixture
def pausing_job(tmp_path: Path, start_trainer: Start) -> Iterator[Job]:
    """Trainers that stop where their environment says."""
    made = Job(tmp_path / "job", SCRIPTS / "pausing_train.py", start_trainer)
    try:
        yield made
    finally:
        made.end()
        end_daemon()


def start(job: Job, pause: Pause, phase: Phase, *arguments: str) -> Trainer:
    """A trainer that stops in the phase; its daemon and later trainers do not."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in pause.environment(phase).items():
            patch.setenv(name, value)
        return job.start(*arguments)


def committed(job: Job) -> CheckpointId | None:
    """Return the newest checkpoint that has a manifest on a device."""
    names = {path.stem for device in job.storage for path in device.glob("runs/*/*/commits/*.mf")}
    return max((CheckpointId.parse(name.removesuffix(".0")) for name in names), default=None)


def ends_like(job: Job, undisturbed: str) -> tuple[CheckpointId | None, str | None]:
    """A restart of the same command ends like the undisturbed run; return what it restored, and from where."""
    trainer = job.start()
    (done,) = trainer.done()
    assert done["done"] == undisturbed
    assert done["failures"] == []
    first = trainer.lines[0]
    return CheckpointId.parse(first["restored"]) if first["restored"] else None, first["source"]


def assert_whole(job: Job) -> None:
    """No lock is held, nothing half done is left after the next opening, every checkpoint is intact."""
    end_daemon()
    with opened(job.storage) as (store, report):
        assert report.problems == []
        (run,) = store.runs()
        assert all(info.state.value in ("complete", "local") for info in run.checkpoints())
    generations: set[str] = set()
    for device in job.storage:
        assert not list(device.rglob("*.tmp*"))
        generations |= {path.parent.name for path in device.rglob("*.safetensors")}
    assert len(generations) == len(run.checkpoints())


@pytest.mark.parametrize(
    "name", [*ATTACH_PHASES, "allocating", "persisting", "between data and manifest", "completing"]
)
def test_the_trainer_dies_while_the_daemon_is(job: Job, pause: Pause, undisturbed: str, name: str) -> None:
    """What was sealed is written nevertheless, and restored from memory. The restart attaches at once."""
    with pausing_daemon(pause, (ATTACH_PHASES | DAEMON_PHASES)[name]) as daemon:
        trainer = job.start("--settle")
        pause.reached(daemon)
        on_disk = committed(job)
        trainer.kill()
        pause.go()
        restored, source = ends_like(job, undisturbed)
    if name == "allocating" or name in ATTACH_PHASES:
        assert (restored, source) == (None, None)
    else:
        assert restored is not None
        assert on_disk is not None
        assert source == "memory"
        assert restored >= on_disk if name == "completing" else restored > on_disk
    assert_whole(job)


@pytest.mark.parametrize("name", list(DAEMON_PHASES))
def test_the_daemon_dies_while_it_is(job: Job, pause: Pause, undisturbed: str, name: str) -> None:
    """The trainer goes on with a daemon of its own."""
    with pausing_daemon(pause, DAEMON_PHASES[name]) as daemon:
        trainer = job.start("--settle")
        pause.reached(daemon)
        daemon.kill()
        daemon.wait(DEADLINE_S)
        (done,) = trainer.done()
    assert done["done"] == undisturbed
    assert done["complete"] == "1.25"
    assert "daemon_lost" in trainer.log
    if name in ("persisting", "between data and manifest"):
        assert any("the daemon went away before it was committed" in reason for reason in done["failures"])
    assert_whole(job)


def test_a_daemon_that_dies_while_it_opens_the_run_is_followed_by_another(
    job: Job, pause: Pause, undisturbed: str
) -> None:
    """As one that ends just then, because it had nothing to do."""
    with pausing_daemon(pause, ATTACH_PHASES["opening"]) as daemon:
        trainer = job.start()
        pause.reached(daemon)
        daemon.kill()
        daemon.wait(DEADLINE_S)
        (done,) = trainer.done()
    assert (trainer.lines[0]["restored"], done["done"]) == (None, undisturbed)
    assert f"daemon_ended pid={daemon.pid}: while it opened the run" in trainer.log
    assert_whole(job)


def test_the_daemon_dies_before_the_trainer_has_attached(job: Job, pause: Pause, undisturbed: str) -> None:
    """There is no run yet that could go on: attach says so, and the same command starts again."""
    with pausing_daemon(pause, ATTACH_PHASES["beginning the attempt"]) as daemon:
        trainer = job.start()
        pause.reached(daemon)
        daemon.kill()
        daemon.wait(DEADLINE_S)
        assert trainer.finish() != 0
    assert "DaemonUnavailableError" in trainer.log
    assert ends_like(job, undisturbed) == (None, None)
    assert_whole(job)


@pytest.mark.parametrize("name", ["between data and manifest", "half of the manifests"])
def test_both_die_while_the_daemon_is(job: Job, pause: Pause, undisturbed: str, name: str) -> None:
    """What has a manifest is restored from the devices, anything else is as if it had never been."""
    with pausing_daemon(pause, DAEMON_PHASES[name]) as daemon:
        trainer = job.start("--settle")
        pause.reached(daemon)
        daemon.kill()
        trainer.kill()
    on_disk = committed(job)
    assert on_disk is not None
    assert ends_like(job, undisturbed) == (on_disk, "disk")
    assert_whole(job)


@pytest.mark.parametrize("victim", ["trainer", "daemon"])
def test_while_the_hook_copies(pausing_job: Job, pause: Pause, undisturbed: str, victim: str) -> None:
    trainer = start(pausing_job, pause, COPYING, "--settle")
    pause.reached(trainer.process)
    if victim == "trainer":
        on_disk = committed(pausing_job)
        trainer.kill()
        restored, _ = ends_like(pausing_job, undisturbed)
        assert restored is not None
        assert on_disk is None or restored >= on_disk
    else:
        kill_daemon()
        pause.go()
        (done,) = trainer.done()
        assert done["done"] == undisturbed
        assert done["complete"] == "1.25"
    assert_whole(pausing_job)


@pytest.mark.parametrize(
    ("place", "victim"),
    [
        ("everstep.hook.restore:RestoreSearch._fetch", "daemon"),
        ("everstep.hook.module_state:ModuleState.apply", "trainer"),
        ("everstep.hook.module_state:ModuleState.apply", "daemon"),
    ],
)
def test_while_it_restores(pausing_job: Job, pause: Pause, undisturbed: str, place: str, victim: str) -> None:
    trainer = pausing_job.start("--until", "13")
    trainer.until_key("waiting")
    trainer.kill()
    on_disk = committed(pausing_job)
    again = start(pausing_job, pause, Phase(place))
    pause.reached(again.process)
    if victim == "daemon":
        kill_daemon()
        pause.go()
    else:
        again.kill()
    if place.endswith("apply") and victim == "daemon":  # it has everything that it needs
        (done,) = again.done()
        assert done["done"] == undisturbed
    else:
        if victim == "daemon":
            assert again.finish() != 0
            assert "DaemonUnavailableError" in again.log
        restored, source = ends_like(pausing_job, undisturbed)
        assert restored == on_disk
        assert source == ("memory" if victim == "trainer" else "disk")
    assert_whole(pausing_job)


@pytest.mark.parametrize(
    ("name", "victim"), [("_last_boundary", "daemon"), ("_say_end", "daemon"), ("_say_end", "trainer")]
)
def test_while_it_closes(pausing_job: Job, pause: Pause, undisturbed: str, name: str, victim: str) -> None:
    trainer = start(pausing_job, pause, Phase(f"everstep.hook.run:Run.{name}"))
    pause.reached(trainer.process)
    if victim == "trainer":
        trainer.kill()
        ends_like(pausing_job, undisturbed)
    else:
        kill_daemon()
        pause.go()
        (done,) = trainer.done()
        assert done["done"] == undisturbed
        assert done["complete"] == "1.25"
    assert_whole(pausing_job)


def test_the_daemon_dies_while_the_trainer_waits_for_its_last_checkpoint(
    job: Job, pause: Pause, undisturbed: str
) -> None:
    with pausing_daemon(pause, LAST) as daemon:
        trainer = job.start("--settle")
        pause.reached(daemon)
        daemon.kill()
        daemon.wait(DEADLINE_S)
    (done,) = trainer.done()
    assert done["done"] == undisturbed
    assert done["complete"] == "1.26"  # taken again: 1.25 died with its daemon
    again = job.start()
    (line,) = again.done()
    assert (again.lines[0]["restored"], line["done"]) == ("1.26", undisturbed)
    end_daemon()
    with opened(job.storage, read_only=True) as (store, report):
        assert report.problems == []
        (run,) = store.runs()
        newest = run.checkpoints()[0]
    assert (str(newest.checkpoint), newest.state.value) == ("1.26", "complete")

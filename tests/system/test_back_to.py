"""A run goes back to an older checkpoint: once, however often it starts again, and it may return to what it left."""

import contextlib
from collections.abc import Generator
from pathlib import Path

from in_process import Training, refused, segments, training
from pausing import Pause, Phase, pausing_daemon

from everstep.checkpoint.testing import opened
from everstep.core.errors import CorruptDataError, NotFoundError, StateMismatchError, UsageError
from everstep.core.ids import CheckpointId
from everstep.dataloader import skip
from everstep.hook.trainer_testing import Job, Trainer, end_daemon


def stopped(trainer: Trainer) -> str:
    """Kill a trainer that has reached its step, and return its newest checkpoint."""
    complete = trainer.until_key("waiting")["complete"]
    trainer.kill()
    return str(complete)


def listed(storage: list[Path]) -> dict[str, bool]:
    """Return whether each checkpoint of the only run is set aside, the newest first."""
    with opened(storage, read_only=True) as (store, _):
        (run,) = store.runs()
        return {str(info.checkpoint): info.is_set_aside for info in run.checkpoints()}


class CutOffError(Exception):
    """What a script does not expect."""


@contextlib.contextmanager
def cut_off(storage: list[Path], *, back_to: str | None = None) -> Generator[Training]:
    """A training loop that fails at the block's end, and so takes no last checkpoint."""
    with contextlib.suppress(CutOffError), training(storage, back_to=back_to) as trained:
        yield trained
        raise CutOffError


def test_it_goes_back_once_and_ends_as_if_it_had_never_been_further(job: Job, undisturbed: str) -> None:
    assert stopped(job.start("--every", "2", "--until", "12")) == "1.12"
    second = job.start("--every", "2", "--until", "11", "--back-to", "1.8")
    line = second.until_key("restored")
    assert (line["restored"], line["source"], line["skipped"]) == ("1.8", "disk", [])
    assert "went_back run=small to=1.8" in second.log
    assert stopped(second) == "2.10"
    third = job.start("--every", "2", "--back-to", "1.8")  # as a scheduler starts it again
    assert third.until_key("restored")["restored"] == "2.10"
    assert "went_back run" not in third.log
    assert "went_back_before run=small to=1.8: it goes on from 2.10" in third.log
    assert third.done()[-1]["done"] == undisturbed
    again = job.start("--every", "2")
    line = again.until_key("restored")
    assert (line["restored"].partition(".")[0], line["finished"]) == ("3", True)
    again.done()


def test_before_a_newer_one_is_complete_nothing_has_happened(job: Job) -> None:
    assert stopped(job.start("--every", "2", "--until", "12")) == "1.12"
    for _ in range(2):
        back = job.start("--every", "2", "--back-to", "1.8", "--until", "9")
        assert back.until_key("restored")["restored"] == "1.8"
        back.until_key("waiting")
        back.kill()
    end_daemon()
    assert listed(job.storage) == {"1.12": False, "1.10": False, "1.8": False}
    regretted = job.start("--every", "2", "--until", "13")
    assert regretted.until_key("restored")["restored"] == "1.12"


def test_nor_has_it_where_memory_alone_has_the_newest(devices: list[Path], tmp_path: Path) -> None:
    fails = Phase("everstep.daemon.devices.persist:persist_shard", number=3, raises="StorageError")
    with pausing_daemon(Pause(tmp_path / "pause"), fails):
        with cut_off(devices) as trained:
            oldest, newest = trained.save(), CheckpointId.parse(trained.save())
            trained.attempt_to_save()
        with cut_off(devices, back_to=oldest) as trained:
            found = trained.run.restore()
            assert found is not None
            assert (str(found.checkpoint), found.source) == (oldest, "disk")
        with training(devices) as trained:
            found = trained.run.restore()
            assert found is not None
            unwritten = CheckpointId(newest.attempt, newest.step + 1)
            assert (found.checkpoint, found.source) == (unwritten, "memory")


def test_it_returns_to_what_it_left_and_goes_back_to_the_same_once_more(job: Job) -> None:
    assert stopped(job.start("--every", "2", "--until", "12")) == "1.12"
    assert stopped(job.start("--every", "2", "--back-to", "1.8", "--until", "10")) == "2.10"
    end_daemon()
    assert listed(job.storage) == {"2.10": False, "1.12": True, "1.8": False}
    again = job.start("--every", "2", "--back-to", "1.8#2", "--until", "10")
    assert again.until_key("restored")["restored"] == "1.8"
    assert stopped(again) == "3.10"
    end_daemon()
    assert listed(job.storage) == {"3.10": False, "2.10": True, "1.8": False}
    other = job.start("--every", "2", "--back-to", "2.10", "--until", "12")
    assert other.until_key("restored")["restored"] == "2.10"
    assert stopped(other) == "4.12"
    end_daemon()
    assert listed(job.storage) == {"4.12": False, "2.10": False, "1.8": False}


def test_it_returns_to_what_a_fresh_start_has_left(devices: list[Path]) -> None:
    newest = three(devices)[0]
    with training(devices, fresh=True) as trained:
        trained.save()
    with training(devices, back_to=newest) as trained:
        found = trained.run.restore()
        assert found is not None
        assert str(found.checkpoint) == newest


def assert_goes_on(devices: list[Path], newest: str) -> None:
    """What a restart would restore is what it was."""
    with training(devices) as trained:
        found = trained.run.restore()
        assert found is not None
        assert str(found.checkpoint) == newest


def three(devices: list[Path]) -> list[str]:
    """Train; return the checkpoints, the newest first."""
    with training(devices) as trained:
        for _ in range(3):
            assert trained.save()
    return list(listed(devices))


def test_where_it_cannot_go_it_says_so_and_nothing_is_changed(devices: list[Path]) -> None:
    names = three(devices)
    hint = f"the newest here are {', '.join(names[:3])}"
    with (
        refused(NotFoundError, "cannot go back to checkpoint 7.1: rank 0 has none", hint=hint),
        training(devices, back_to="7.1") as trained,
    ):
        trained.run.restore()
    with refused(UsageError, "back_to='best'", hint="back_to='3.2000'"), training(devices, back_to="best"):
        pass
    with (
        refused(UsageError, "fresh=True and back_to='1.1'", hint="not both"),
        training(devices, fresh=True, back_to="1.1"),
    ):
        pass
    with (
        refused(UsageError, "nothing was restored", hint="run.restore()"),
        training(devices, back_to=names[1]) as trained,
    ):
        trained.step()
    with (
        refused(StateMismatchError, "does not fit 'model'", hint="build the objects"),
        training(devices, back_to=names[1], width=9) as trained,
    ):
        trained.run.restore()
    assert_goes_on(devices, names[0])


def test_it_goes_to_no_other_where_that_one_is_damaged(devices: list[Path]) -> None:
    names = three(devices)
    end_daemon()
    (path,) = [*segments(devices[0], names[1]), *segments(devices[1], names[1])][:1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for error in (CorruptDataError, NotFoundError):  # found by reading it, then known
        with (
            refused(error, f"cannot go back to checkpoint {names[1]}", "block", hint="`everstep ls`"),
            training(devices, back_to=names[1]) as trained,
        ):
            trained.run.restore()
    assert_goes_on(devices, names[0])


def test_the_samples_for_which_it_went_back_are_skipped(devices: list[Path]) -> None:
    with training(devices) as trained:
        first = trained.save()
        trained.step()
        spiked = trained.loader.span
        trained.save()
    with training(devices, back_to=first) as trained:
        assert trained.run.restore() is not None
        trained.loader.load_state_dict(skip(trained.loader.state_dict(), *spiked))
        assert trained.loader.holes == [spiked]
        trained.save()
        assert trained.loader.span[0] >= spiked[1]
        further = trained.loader.span
    with training(devices, back_to=first) as trained:
        assert trained.run.restore() is not None
        assert trained.loader.holes == [spiked]
        trained.step()
        assert trained.loader.span[0] >= further[1]

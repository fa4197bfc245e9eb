"""A run goes back to an older checkpoint: once, however often it starts again, and it may return to what it left."""

from pathlib import Path

from in_process import refused, segments, training

from everstep.checkpoint.testing import opened
from everstep.core.errors import CorruptDataError, NotFoundError, UsageError
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


def test_it_goes_back_once_and_ends_as_if_it_had_never_been_further(job: Job, undisturbed: str) -> None:
    assert stopped(job.start("--every", "2", "--until", "12")) == "1.12"
    second = job.start("--every", "2", "--until", "11", "--back-to", "1.8")
    line = second.until_key("restored")
    assert (line["restored"], line["source"], line["skipped"]) == ("1.8", "disk", [])
    assert "went_back run=small to=1.8" in second.log
    assert stopped(second) == "2.10"
    third = job.start("--every", "2", "--back-to", "1.8")  # as a scheduler starts it again
    assert third.until_key("restored")["restored"] == "2.10"
    assert "went_back" not in third.log
    assert third.done()[-1]["done"] == undisturbed
    again = job.start("--every", "2")
    line = again.until_key("restored")
    assert (line["restored"].partition(".")[0], line["finished"]) == ("3", True)
    again.done()


def test_what_it_left_stays_until_a_newer_one_is_complete_and_until_then_it_may_return(job: Job) -> None:
    assert stopped(job.start("--every", "2", "--until", "12")) == "1.12"
    back = job.start("--every", "2", "--back-to", "1.8", "--until", "9")
    assert back.until_key("restored")["restored"] == "1.8"
    back.until_key("waiting")
    back.kill()
    end_daemon()
    assert listed(job.storage) == {"1.12": True, "1.10": True, "1.8": False}
    mistaken = job.start("--every", "2", "--back-to", "1.12", "--until", "14")
    assert mistaken.until_key("restored")["restored"] == "1.12"
    assert stopped(mistaken) == "3.14"
    end_daemon()
    assert listed(job.storage) == {"3.14": False, "1.12": False, "1.10": False}


def test_where_it_cannot_go_it_says_so_and_nothing_is_changed(devices: list[Path]) -> None:
    with training(devices) as trained:
        for _ in range(3):
            assert trained.save()
    with opened(devices, read_only=True) as (store, _):
        (run,) = store.runs()
        names = [str(info.checkpoint) for info in run.checkpoints()]
    hint = f"the newest are {', '.join(names[:3])}"
    with (
        refused(NotFoundError, "no checkpoint 7.1 in this store", hint=hint),
        training(devices, back_to="7.1"),
    ):
        pass
    with refused(UsageError, "back_to='best'", hint="back_to='3.2000'"), training(devices, back_to="best"):
        pass
    with (
        refused(UsageError, "fresh=True and back_to='1.1'", hint="not both"),
        training(devices, fresh=True, back_to="1.1"),
    ):
        pass
    with training(devices) as trained:
        found = trained.run.restore()
        assert found is not None
        assert str(found.checkpoint) == names[0]


def test_it_does_not_go_to_a_damaged_one(devices: list[Path]) -> None:
    with training(devices) as trained:
        first = trained.save()
        second = trained.save()
    assert first
    assert second
    end_daemon()
    for path in [*segments(devices[0], first), *segments(devices[1], first)]:
        path.unlink()
    with (
        refused(CorruptDataError, "cannot go back", first, hint="everstep ls bad"),
        training(devices, back_to=first),
    ):
        pass
    with training(devices) as trained:
        found = trained.run.restore()
        assert found is not None
        assert str(found.checkpoint) != first


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

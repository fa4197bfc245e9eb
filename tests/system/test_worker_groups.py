"""Worker groups that follow each other over one Store, as with `torchrun --max-restarts`: none hears the dead."""

import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pausing import wait_until
from torch._C._distributed_c10d import TCPStore

from everstep.daemon.control.client import connected
from everstep.daemon.control.views import RankState
from everstep.hook.notice import ENDED_STATUS
from everstep.hook.trainer_testing import Job, Trainer, end_daemon

JOB_SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "store_group.py"


@pytest.fixture(scope="module", autouse=True)
def _libuv() -> None:  # pyright: ignore[reportUnusedFunction]
    """libuv, which serves the Store, makes a pipe at its first use that stays to the end of the process."""
    agents_store()


def agents_store() -> TCPStore:
    """The Store of torchrun's agent: it is there before the first group and after the last."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def start_group(
    job: Job, store: TCPStore, *late_s: float, until: int = -1, more: Sequence[str] = ()
) -> list[Trainer]:
    """Start a rank for each of `late_s`, which attaches that much later."""
    return [
        job.start(
            *("--port", str(store.port), "--rank", str(rank), "--world-size", str(len(late_s))),
            *("--late-s", str(late), "--until", str(until), *more),
        )
        for rank, late in enumerate(late_s)
    ]


def start_ranks(job: Job, port: int, *ranks: Sequence[str]) -> list[Trainer]:
    """Start a rank of each list of arguments."""
    size = str(max(2, len(ranks)))
    return [job.start("--port", str(port), "--world-size", size, *more) for more in ranks]


def said(group: list[Trainer], key: str) -> list[Any]:
    return [trainer.until_key(key)[key] for trainer in group]


def kill(group: list[Trainer]) -> None:
    for trainer in group:
        trainer.kill()


@pytest.mark.parametrize("late_s", [(0.0, 0.5), (0.5, 0.0)])
def test_a_restarted_group_agrees_anew_whoever_comes_first(job: Job, late_s: tuple[float, float]) -> None:
    store = agents_store()
    first = start_group(job, store, 0.0, 0.0, until=5)
    assert said(first, "attempt") == [1, 1]
    assert said(first, "waiting") == [5, 5]
    kill(first)
    second = start_group(job, store, *late_s)
    assert said(second, "attempt") == [2, 2]
    assert [trainer.lines[0]["restored"] for trainer in second] == ["1.4", "1.4"]
    for trainer in second:
        (done,) = trainer.done()
        assert (done["complete"], done["failures"]) == ("2.7", [])


def test_a_group_of_another_size_agrees_anew(job: Job) -> None:
    store = agents_store()
    first = start_group(job, store, 0.0, 0.0, until=5)
    assert said(first, "waiting") == [5, 5]
    kill(first)
    second = start_group(job, store, 0.0, 0.5, 0.0)
    assert said(second, "attempt") == [2, 2, 2]
    assert [trainer.lines[0]["restored"] for trainer in second] == ["1.4"] * 3
    for trainer in second:
        (done,) = trainer.done()
        assert (done["complete"], done["failures"]) == ("2.7", [])


# -- the Store goes away in mid-run, as when the node that serves it dies

ENDS_WITHIN_S = 20.0
"""Far below the 30 s after which torchrun kills, and the 600 s that a last checkpoint may take."""


def losing(job: Job, *more: str) -> list[Trainer]:
    """Two ranks that train and have lost their Store."""
    store = agents_store()
    group = start_group(job, store, 0.0, 0.0, more=("--step-s", "0.02", *more))
    for trainer in group:
        trainer.until_step(5)
    del store
    return group


def test_without_their_store_ranks_train_to_the_end_wait_for_nothing_and_say_why(job: Job) -> None:
    group = losing(job, "--steps", "300")
    for trainer in group:
        trainer.until_step(300)
    began_s = time.monotonic()
    for trainer in group:
        (done,) = trainer.done()
        (failure,) = done["failures"]
        assert (
            "the ranks cannot agree any more over the TCPStore of torch.distributed at 127.0.0.1:" in failure
        )
        assert "restart the job" in failure
        assert "close_incomplete run=group reason=the ranks cannot agree any more" in trainer.log
    assert time.monotonic() - began_s < ENDS_WITHIN_S


def test_a_notice_is_obeyed_without_the_store(job: Job) -> None:
    notice = job.folder / "spot"
    group = losing(job, "--steps", "1000000", "--notice", str(notice))
    notice.touch()
    began_s = time.monotonic()
    assert [trainer.finish() for trainer in group] == [ENDED_STATUS] * 2
    assert time.monotonic() - began_s < ENDS_WITHIN_S
    for trainer in group:
        assert f"run_ended run=group reason={notice} is there" in trainer.log


def test_sigterm_ends_a_rank_in_time_without_the_store(job: Job) -> None:
    group = losing(job, "--steps", "1000000")
    began_s = time.monotonic()
    for trainer in group:
        trainer.process.send_signal(signal.SIGTERM)
    assert [trainer.finish() for trainer in group] == [ENDED_STATUS] * 2
    assert time.monotonic() - began_s < ENDS_WITHIN_S


# -- a rank dies and the Store stays, as where each rank is started by hand


def test_a_rank_that_died_is_named_and_waited_for_by_nobody(job: Job) -> None:
    """torchrun would end the others; without it each wait lasted ten minutes."""
    store = agents_store()
    survivor, victim = start_group(
        job, store, 0.0, 0.0, more=("--step-s", "0.02", "--steps", "60", "--dies", "1", "5")
    )
    assert victim.finish() == -signal.SIGKILL
    began_s = time.monotonic()
    (done,) = survivor.done()
    assert time.monotonic() - began_s < ENDS_WITHIN_S
    assert any("rank 1 does not answer" in failure for failure in done["failures"]), done
    assert set(done["skipped"]) == {"peer"}, "no device was too slow"
    assert "close_incomplete run=group reason=rank 1 does not answer" in survivor.log


# -- the end of all ranks

LATE_S = "0.7"


def test_who_serves_the_store_stays_until_all_have_heard_that_the_last_checkpoint_is_complete(
    job: Job,
) -> None:
    (first,) = start_ranks(job, 0, ["--serves", "--rank", "0"])
    port = first.until_key("port")["port"]
    (second,) = start_ranks(job, port, ["--rank", "1", "--hears-late-s", LATE_S])
    for trainer in (first, second):
        (done,) = trainer.done()
        assert (done["complete"], done["failures"]) == ("1.7", [])
        assert "ranks_lost" not in trainer.log


def test_sigterm_ends_who_stays_for_the_others_as_any_run(job: Job) -> None:
    """It has told its daemon that it closes, which need not look after it."""
    (first,) = start_ranks(job, 0, ["--serves", "--rank", "0"])
    port = first.until_key("port")["port"]
    (second,) = start_ranks(job, port, ["--rank", "1", "--closes-late-s", "60"])
    first.until_step(6)
    with connected(Path(os.environ["EVERSTEP_SOCKET"])) as client:
        wait_until(lambda: client.status().runs[0].ranks[0].state is RankState.CLOSED)
    first.process.send_signal(signal.SIGTERM)
    assert first.finish() == ENDED_STATUS
    assert "run_ended run=group reason=SIGTERM last_complete=1.7 in_time=True" in first.log
    second.kill()


def test_the_store_outlives_a_process_group_that_is_destroyed_before_the_run_ends(job: Job) -> None:
    (first,) = start_ranks(job, 0, ["--serves", "--rank", "0", "--destroys-early"])
    port = first.until_key("port")["port"]
    (second,) = start_ranks(job, port, ["--rank", "1", "--destroys-early"])
    for trainer in (first, second):
        (done,) = trainer.done()
        assert (done["complete"], done["failures"]) == ("1.7", [])


@pytest.mark.parametrize("killer", [0, 1])
def test_when_the_daemon_dies_with_the_last_checkpoint_all_ranks_take_it_again(job: Job, killer: int) -> None:
    store = agents_store()
    told = [["--kills-daemon"] if rank == killer else [] for rank in range(2)]
    group = start_ranks(job, store.port, *(["--rank", str(rank), *more] for rank, more in enumerate(told)))
    ends = [trainer.done()[0] for trainer in group]
    assert ends[0]["complete"] == ends[1]["complete"] >= "1.8"
    for trainer in group:
        assert "close_incomplete" not in trainer.log


def test_ranks_that_end_at_different_boundaries_say_so_at_once(job: Job) -> None:
    store = agents_store()
    steps = [
        ["--rank", "0", "--steps", "6"],
        ["--rank", "1", "--steps", "7"],
        ["--rank", "2", "--steps", "6"],
    ]
    began_s = time.monotonic()
    group = start_ranks(job, store.port, *steps)
    reasons = [
        "1.7 is not complete: rank 1 ended after boundary 7, this one ended after boundary 6",
        "1.8 is not complete: rank 0 ended after boundary 6, this one ended after boundary 7",
        "rank 1 does not answer",  # rank 0 says so
    ]
    for trainer, reason in zip(group, reasons, strict=True):
        (done,) = trainer.done()
        assert done["complete"] == "1.6"
        assert any(reason in each for each in done["failures"]), done
        assert not any("the lease" in each for each in done["failures"]), "it was given back"
    assert time.monotonic() - began_s < ENDS_WITHIN_S


def test_shards_of_different_boundaries_are_not_restored_together(job: Job) -> None:
    """Rank 0 calls what follows its last boundary by the number that rank 1's next one has."""
    store = agents_store()
    steps = [["--rank", "0", "--steps", "6"], ["--rank", "1", "--steps", "7"]]
    for trainer in start_ranks(job, store.port, *([*more, "--every", "1"] for more in steps)):
        assert trainer.done()[0]["complete"] == "1.6"
    for ranks in (2, 1, 3):
        end_daemon()
        group = start_group(job, store, *[0.0] * ranks, more=("--steps", "6"))
        assert said(group, "restored") == ["1.6"] * ranks
        for trainer in group:
            assert (
                "checkpoint_not_restorable 1.7: its shards were taken after different boundaries: 6, 7"
                in trainer.log
            )
            trainer.kill()


# -- a rank is refused


def test_a_takeover_by_fewer_ranks_ends_all_of_the_old_ones(job: Job) -> None:
    stores = [agents_store(), agents_store()]
    old = start_group(job, stores[0], 0.0, 0.0, more=("--steps", "1000000", "--step-s", "0.02"))
    for trainer in old:
        trainer.until_step(5)
    (new,) = start_group(job, stores[1], 0.0, more=("--takes-over", "--steps", "100"))
    assert said([new], "attempt") == [2]
    for trainer, reason in zip(old, ["was taken over", "attempt 1 of run 'group' is over"], strict=True):
        assert trainer.finish() == 1
        assert reason in trainer.log.splitlines()[-1]
    (done,) = new.done()
    assert done["failures"] == []


def test_a_takeover_that_one_rank_does_not_ask_for_takes_nothing(job: Job) -> None:
    stores = [agents_store(), agents_store()]
    old = start_group(job, stores[0], 0.0, 0.0, more=("--steps", "1000000", "--step-s", "0.02"))
    for trainer in old:
        trainer.until_step(5)
    for refused in start_ranks(job, stores[1].port, ["--rank", "0", "--takes-over"], ["--rank", "1"]):
        assert refused.finish() == 1
        assert "takeover=True on rank 0; takeover=False on rank 1" in refused.log
    for trainer in old:
        trainer.process.send_signal(signal.SIGTERM)
    for trainer in old:
        assert trainer.finish() == ENDED_STATUS
        assert "in_time=True" in trainer.log


def test_a_refusal_of_one_rank_is_raised_by_all(job: Job) -> None:
    stores = [agents_store(), agents_store()]
    (first,) = start_group(job, stores[0], 0.0, until=3)
    first.until_key("waiting")
    for refused in start_group(job, stores[1], 0.0, 0.0):
        assert refused.finish() == 1
        assert "RunBusyError" in refused.log
    first.kill()

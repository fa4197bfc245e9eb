"""Worker groups that follow each other over one Store, as with `torchrun --max-restarts`: none hears the dead."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from everstep.hook.trainer_start_testing import Start
from everstep.hook.trainer_testing import Job, Trainer, end_daemon

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "store_group.py"


@pytest.fixture(scope="module", autouse=True)
def _libuv() -> None:  # pyright: ignore[reportUnusedFunction]
    """libuv, which serves the Store, makes a pipe at its first use that stays to the end of the process."""
    agents_store()


@pytest.fixture
def job(tmp_path: Path, start_trainer: Start) -> Iterator[Job]:
    made = Job(tmp_path / "job", SCRIPT, start_trainer)
    try:
        yield made
    finally:
        made.end()
        end_daemon()


def agents_store() -> TCPStore:
    """The Store of torchrun's agent: it is there before the first group and after the last."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def start_group(job: Job, store: TCPStore, *late_s: float, until: int = -1) -> list[Trainer]:
    """Start a rank for each of `late_s`, which attaches that much later."""
    return [
        job.start(
            *("--port", str(store.port), "--rank", str(rank), "--world-size", str(len(late_s))),
            *("--late-s", str(late), "--until", str(until)),
        )
        for rank, late in enumerate(late_s)
    ]


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

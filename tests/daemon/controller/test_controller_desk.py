"""What a daemon shows of a run's controller after it was started again, and after ranks have come and gone."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.core.errors import UsageError
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.controller.controller_desk import steered
from everstep.daemon.controller.controller_views import ControllerState
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.hook.steering_machine import Steering
from everstep.proto import frames

RUN = "elastic"


def costs(
    *,
    share: float,
    step: int,
    bound: str = "budget",
    budget: float | None = 0.1,
    budget_asked_unix_s: float = 0.0,
    paused_until_unix_s: float = 0.0,
    pause_asked_unix_s: float = 0.0,
) -> frames.Costs:
    return frames.Costs(
        train_s=10.0,
        boundary_s=10.0 * share,
        eager_s=0.0,
        wait_s=0.0,
        guard_s=0.0,
        slower_s=0.0,
        skipped={},
        interval_steps=step,
        reason=f"said at step {step}",
        goal_missed="",
        bound=bound,
        budget=budget,
        budget_asked_unix_s=budget_asked_unix_s,
        cost_share=share,
        step=step,
        paused_until_unix_s=paused_until_unix_s,
        pause_asked_unix_s=pause_asked_unix_s,
    )


def attached(
    socket_path: Path, devices: list[Path], *, rank: int, world_size: int, attempt: int
) -> FakeTrainer:
    trainer = FakeTrainer(socket_path)
    trainer.open_run(devices, name=RUN, rank=rank, world_size=world_size)
    trainer.begin_attempt(attempt)
    return trainer


@contextmanager
def one_rank(socket_path: Path, devices: list[Path]) -> Generator[tuple[ControlClient, FakeTrainer]]:
    """A daemon, an operator and the only rank of a run."""
    with (
        daemon_process(socket_path),
        connected(socket_path) as client,
        attached(socket_path, devices, rank=0, world_size=1, attempt=1) as trainer,
    ):
        yield client, trainer


def settled(trainer: FakeTrainer) -> None:
    """Return when the daemon has read what the trainer has sent."""
    trainer.offers()


def test_ranks_that_an_attempt_has_no_more_say_nothing_of_it(socket_path: Path, devices: list[Path]) -> None:
    with daemon_process(socket_path), connected(socket_path) as client:
        four = [attached(socket_path, devices, rank=rank, world_size=4, attempt=1) for rank in range(4)]
        for rank, trainer in enumerate(four):
            trainer.send(costs(share=0.01 * rank, step=900))
            settled(trainer)
        assert client.controllers(RUN)[0].cost_share == pytest.approx(0.03)
        for trainer in four:
            trainer.close()
        with attached(socket_path, devices, rank=0, world_size=1, attempt=2) as only:
            (unknown,) = client.controllers(RUN)
            assert (unknown.state, unknown.step) == (ControllerState.UNKNOWN, 0), (
                "nobody who is there has spoken"
            )
            only.send(costs(share=0.005, step=7))
            settled(only)
            (view,) = client.controllers(RUN)
            assert (view.cost_share, view.step, view.attached_count) == (pytest.approx(0.005), 7, 1)
            (run,) = client.status().runs
            assert run.world_size == 1
            assert run.pace is not None
            assert run.pace.interval_steps == 7
        # All have left: the last word stands.
        assert client.status().runs[0].pace is not None


def test_until_when_a_run_is_paused_is_known_to_a_daemon_that_nobody_asked(
    socket_path: Path, devices: list[Path]
) -> None:
    until_unix_s = 4e9
    with one_rank(socket_path, devices) as (client, trainer):
        trainer.send(costs(share=0.01, step=5, bound="paused", paused_until_unix_s=until_unix_s))
        settled(trainer)
        (view,) = client.controllers(RUN)
        assert view.state is ControllerState.PAUSED
        assert view.paused_until_unix_s == until_unix_s
        trainer.send(costs(share=0.01, step=6))
        settled(trainer)
        assert client.controllers(RUN)[0].paused_until_unix_s == 0.0


def test_a_pause_whose_time_is_not_over_holds_for_the_next_attempt(
    socket_path: Path, devices: list[Path]
) -> None:
    """A trainer that dies ends no pause; a budget is its attempt's own."""
    with daemon_process(socket_path), connected(socket_path) as client, ThreadPoolExecutor() as threads:
        with attached(socket_path, devices, rank=0, world_size=1, attempt=1) as trainer:
            answer = threads.submit(client.set_budget, RUN, 0.02)
            asked = trainer.event(frames.Steer)
            assert isinstance(asked, frames.Steer)
            trainer.send(
                costs(share=0.01, step=6, budget=0.02, budget_asked_unix_s=asked.budget_asked_unix_s)
            )
            answer.result()
            pause = threads.submit(client.pause_checkpoints, RUN, 3600.0)
            paused = trainer.event(frames.Steer)
            assert isinstance(paused, frames.Steer)
            trainer.send(
                costs(share=0.01, step=7, bound="paused", paused_until_unix_s=paused.paused_until_unix_s)
            )
            pause.result()
        with attached(socket_path, devices, rank=0, world_size=1, attempt=2) as trainer:
            assert trainer.event(frames.Steer) == frames.Steer(
                paused_until_unix_s=paused.paused_until_unix_s,
                pause_asked_unix_s=paused.pause_asked_unix_s,
            )


@pytest.mark.parametrize("until_unix_s", [0.0, 4e9], ids=["ended", "longer"])
def test_what_another_daemon_was_asked_of_a_pause_holds_for_the_next_attempt(
    socket_path: Path, devices: list[Path], until_unix_s: float
) -> None:
    """That daemon may be gone by then: the pause as it began at this one would come back."""
    with daemon_process(socket_path), connected(socket_path) as client, ThreadPoolExecutor() as threads:
        with attached(socket_path, devices, rank=0, world_size=1, attempt=1) as trainer:
            pause = threads.submit(client.pause_checkpoints, RUN, 3600.0)
            paused = trainer.event(frames.Steer)
            assert isinstance(paused, frames.Steer)
            own = costs(
                share=0.01,
                step=6,
                bound="paused",
                paused_until_unix_s=paused.paused_until_unix_s,
                pause_asked_unix_s=paused.pause_asked_unix_s,
            )
            trainer.send(own)
            pause.result()
            asked_unix_s = paused.pause_asked_unix_s + 1
            bound = "paused" if until_unix_s else "budget"
            trainer.send(
                costs(
                    share=0.01,
                    step=7,
                    bound=bound,
                    paused_until_unix_s=until_unix_s,
                    pause_asked_unix_s=asked_unix_s,
                )
            )
            trainer.send(own)  # as of another rank, which has not come as far
            settled(trainer)
        with attached(socket_path, devices, rank=0, world_size=1, attempt=2) as trainer:
            assert trainer.event(frames.Steer) == frames.Steer(
                paused_until_unix_s=until_unix_s, pause_asked_unix_s=asked_unix_s
            )


def test_a_pause_that_a_daemon_before_was_asked_for_holds_for_the_next_attempt(
    socket_path: Path, devices: list[Path]
) -> None:
    with daemon_process(socket_path):
        with attached(socket_path, devices, rank=0, world_size=1, attempt=1) as trainer:
            trainer.send(
                costs(share=0.01, step=5, bound="paused", paused_until_unix_s=4e9, pause_asked_unix_s=3e9)
            )
            settled(trainer)
        with attached(socket_path, devices, rank=0, world_size=1, attempt=2) as trainer:
            assert trainer.event(frames.Steer) == frames.Steer(
                paused_until_unix_s=4e9, pause_asked_unix_s=3e9
            )


@pytest.mark.parametrize("followed", [True, False], ids=["followed first", "never followed"])
def test_a_budget_is_not_waited_for_once_another_one_was_asked_elsewhere(
    socket_path: Path, devices: list[Path], followed: bool
) -> None:
    """Of a run on two nodes, whose other daemon was asked later."""
    with one_rank(socket_path, devices) as (client, trainer), ThreadPoolExecutor() as threads:
        trainer.send(costs(share=0.01, step=5))
        settled(trainer)
        answer = threads.submit(client.set_budget, RUN, 0.02)
        asked = trainer.event(frames.Steer)
        assert isinstance(asked, frames.Steer)
        asked_unix_s = asked.budget_asked_unix_s
        assert client.controllers(RUN)[0].asked_budget == 0.02
        if followed:
            trainer.send(costs(share=0.01, step=6, budget=0.02, budget_asked_unix_s=asked_unix_s))
            assert answer.result().budget == 0.02
        trainer.send(costs(share=0.01, step=7, budget=0.05, budget_asked_unix_s=asked_unix_s + 1))
        answer.result()
        settled(trainer)
        (view,) = client.controllers(RUN)
        assert (view.budget, view.asked_budget) == (0.05, None)


def test_a_budget_that_was_asked_before_the_interval_was_known_to_be_fixed_is_refused_then(
    socket_path: Path, devices: list[Path]
) -> None:
    with one_rank(socket_path, devices) as (client, trainer), ThreadPoolExecutor() as threads:
        answer = threads.submit(client.set_budget, RUN, 0.02)
        trainer.event(frames.Steer)
        (view,) = client.controllers(RUN)
        assert (view.state, view.asked_budget) == (ControllerState.UNKNOWN, 0.02)
        trainer.send(costs(share=0.01, step=50, bound="fixed", budget=None))
        with pytest.raises(UsageError, match="every 50 steps"):
            answer.result()
        assert client.controllers(RUN)[0].asked_budget is None


def test_the_newest_wish_holds_though_the_clock_was_set_back() -> None:
    """A pause that was asked for while it was a day ahead could not be ended for a day."""
    day_s, now_unix_s = 86400.0, 1.8e9
    paused = steered(
        frames.Steer(),
        {"paused_until_unix_s": now_unix_s + day_s + 900, "pause_asked_unix_s": now_unix_s + day_s},
    )
    resumed = steered(paused, {"paused_until_unix_s": 0.0, "pause_asked_unix_s": now_unix_s})
    heard = Steering(
        paused_until_unix_s=paused.paused_until_unix_s, pause_asked_unix_s=paused.pause_asked_unix_s
    )
    heard = heard.with_newer(
        Steering(
            paused_until_unix_s=resumed.paused_until_unix_s, pause_asked_unix_s=resumed.pause_asked_unix_s
        )
    )
    assert not heard.is_paused(now_unix_s)
    asked = steered(resumed, {"budget": 0.1, "budget_asked_unix_s": now_unix_s})
    assert (asked.budget, asked.budget_asked_unix_s) == (0.1, now_unix_s)
    assert asked.paused_until_unix_s == 0.0

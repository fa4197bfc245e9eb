"""Questions beside writing: apart from each other, never past a deadline, and at once where nothing is written."""

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest

from everstep.daemon.courtesy import APART_S, HURRY_S, LOOK_S, REST, REST_S_MAX, Courtesy

LONG_S = 3600.0


def writing() -> bool:
    return True


async def ask(
    courtesy: Courtesy,
    begins: list[float],
    took_s: float,
    is_writing: Callable[[], bool] = writing,
    left_s: float = LONG_S,
) -> None:
    async with courtesy.answering(is_writing, left_s):
        begins.append(time.monotonic())
        await asyncio.sleep(took_s)


def gaps(begins: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(begins)]


def test_quick_answers_rest_in_proportion_and_each_gets_its_turn() -> None:
    async def main() -> list[float]:
        begins, courtesy = list[float](), Courtesy()

        async def again_and_again() -> None:
            for _ in range(3):
                await ask(courtesy, begins, 0.005)

        await asyncio.gather(again_and_again(), again_and_again())
        return begins

    begins = asyncio.run(main())
    assert len(begins) == 6
    assert min(gaps(begins)) >= 0.005 * (1 + REST)


def test_beside_a_long_answer_others_begin_one_at_a_time() -> None:
    async def main() -> list[float]:
        begins, courtesy, all_begun = list[float](), Courtesy(), asyncio.Event()

        async def long() -> None:
            async with courtesy.answering(writing, LONG_S):
                begins.append(time.monotonic())
                if len(begins) == 3:
                    all_begun.set()
                await all_begun.wait()

        async with asyncio.timeout(60):
            await asyncio.gather(long(), long(), long())
        return begins

    assert min(gaps(asyncio.run(main()))) >= APART_S


def test_after_a_long_answer_comes_a_bounded_rest() -> None:
    async def main() -> float:
        begins, courtesy = list[float](), Courtesy()
        await ask(courtesy, begins, 1.5 * REST_S_MAX / REST)
        ended_s = time.monotonic()
        await ask(courtesy, begins, 0)
        return begins[1] - ended_s

    assert asyncio.run(main()) >= 0.99 * REST_S_MAX, "the clock was read a moment after the answer had ended"


def test_nothing_waits_while_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int:
        courtesy, answered = Courtesy(), 0
        monkeypatch.setattr("everstep.daemon.courtesy.asyncio.sleep", None)  # whoever waited would fail
        for _ in range(100):
            async with courtesy.answering(lambda: False, LONG_S):
                answered += 1
        return answered

    assert asyncio.run(main()) == 100


def test_who_waits_goes_on_when_the_writing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.daemon.courtesy.APART_S", LONG_S)
    monkeypatch.setattr("everstep.daemon.courtesy.REST", LONG_S * 1e9)

    async def main() -> list[float]:
        is_writing, begins = True, list[float]()
        courtesy = Courtesy(rest_s_max=LONG_S)
        async with asyncio.timeout(60):
            async with courtesy.answering(lambda: is_writing, LONG_S):
                waiting = asyncio.create_task(ask(courtesy, begins, 0, lambda: is_writing))
                await asyncio.sleep(0)
                assert begins == []
                is_writing = False
                await waiting
        return begins

    assert len(asyncio.run(main())) == 1


def test_credit_is_used_up_before_there_is_a_rest_and_comes_back() -> None:
    """The rests of three answers of 0.05 s are 2.85 s of the 3; the sixth waits for the whole rest of the fifth."""

    async def main() -> list[float]:
        begins, courtesy = list[float](), Courtesy(credit_s=3.0)
        for _ in range(6):
            await ask(courtesy, begins, 0.05)
        await asyncio.sleep(4.0)  # nothing to do: all rests that were owed are over
        for _ in range(2):
            await ask(courtesy, begins, 0.05)
        return begins

    first, second, _, _, fifth, _, again = gaps(asyncio.run(main()))
    assert max(first, second, again) < 0.05 * REST - LOOK_S <= fifth  # the fifth began up to a look late


def test_an_answer_that_waits_for_others_is_no_longer_than_its_own_work() -> None:
    """Of 0.2 s on a thread next to none is the processor's: nearly no rest follows."""

    async def main() -> list[float]:
        begins, courtesy = list[float](), Courtesy()
        for _ in range(2):
            async with courtesy.answering(writing) as answer:
                begins.append(time.monotonic())
                await asyncio.to_thread(answer.timed(time.sleep), 0.2)
        return begins

    (gap,) = gaps(asyncio.run(main()))
    assert gap < 0.2 * (1 + REST) / 2


@pytest.mark.parametrize("left_s", [0.0, HURRY_S / 2, HURRY_S])
def test_whoever_is_in_a_hurry_is_answered_at_once(left_s: float) -> None:
    async def main() -> list[float]:
        begins, courtesy = list[float](), Courtesy()
        long = asyncio.create_task(ask(courtesy, begins, REST_S_MAX))
        crowd = [asyncio.create_task(ask(courtesy, begins, 0)) for _ in range(20)]
        await asyncio.sleep(0)
        before = len(begins)
        await ask(courtesy, begins, 0, left_s=left_s)
        assert len(begins) == before + 1, "nobody of those who have time went before"
        for each in (long, *crowd):
            each.cancel()
        await asyncio.gather(long, *crowd, return_exceptions=True)
        return begins

    assert len(asyncio.run(main())) == 2

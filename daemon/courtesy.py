"""While shards are written, questions wait a little: a person or a dashboard can, the drives and training cannot.

Answering holds the GIL that the drives' threads need, and clients that ask without end keep a core of their own busy
too. So while something is written no answer begins until the one before has ended, or `APART_S` have passed, and after
an answer follows a rest of `REST` times its length. Whoever has little time left to its deadline is answered at once.

What a trainer asks is its work: a rank has credit, and rests only when that is used up, as by drafts of ever new
layouts.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

APART_S = 0.25
"""Begins of answers that take long, most of them waiting for drives."""
REST = 19
"""So that answers take about a twentieth of the time: those to two ranks, and scrapes, are three of them."""
REST_S_MAX = 1.0
TRAINER_REST_S_MAX = 5.0
TRAINER_CREDIT_S = 4.0
"""Of rests, for each kind of answer: those that take a fifth of a second in all, seven manifests of 20,000 leaves or
hundreds of usual ones.

A rank's first draft never rests, however long it takes, and the next ones take little unless the layout has changed.
"""
ALL_OF_IT = 4
"""Processor time of a manifest's answer, packed and sent, for that of the thread that reads it: 17 to 28 ms for 5."""
LOOK_S = 0.01
"""How often to look whether the writing has ended."""
HURRY_S = 2.0
"""Left to a deadline; the command line gives a question 30 s."""


class Answer:
    """One that is being made: how long it takes."""

    def __init__(self) -> None:
        self._thread_s: float | None = None

    def timed(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Return the function, whose processor time then bounds the answer's length: it may wait for others' work."""

        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            began_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._thread_s = time.thread_time() - began_s

        return call

    def length_s(self, began_s: float) -> float:
        """Return it, of an answer that ends now."""
        took_s = time.monotonic() - began_s
        return took_s if self._thread_s is None else min(took_s, ALL_OF_IT * self._thread_s)


class Courtesy:
    """Spreads the answers of one event loop, or those to one rank."""

    def __init__(self, *, credit_s: float = 0.0, rest_s_max: float = REST_S_MAX) -> None:
        """Rests of `credit_s` in all are not taken; none is longer than `rest_s_max`."""
        self._credit_s, self._rest_s_max = credit_s, rest_s_max
        self._turn = asyncio.Lock()
        self._next_s = 0.0
        self._rested_s = 0.0
        """When all rests are over, taken or not."""

    @contextlib.asynccontextmanager
    async def answering(
        self, is_writing: Callable[[], bool], left_s: float = math.inf
    ) -> AsyncGenerator["Answer"]:
        """Wait for this answer's turn, `left_s` before its deadline; the block makes it.

        `is_writing` says whether shards are being written now.
        """
        answer = Answer()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s - HURRY_S if left_s < math.inf else None), self._turn:
                while is_writing() and time.monotonic() < self._next_s:  # noqa: ASYNC110  either ends it
                    await asyncio.sleep(LOOK_S)
        began_s = time.monotonic()
        mine_s = self._next_s = began_s + APART_S
        try:
            yield answer
        finally:
            next_s = self._after(time.monotonic(), answer.length_s(began_s))
            self._next_s = next_s if self._next_s == mine_s else max(self._next_s, next_s)

    def _after(self, ended_s: float, length_s: float) -> float:
        """Return when the next answer may begin, after one of this length."""
        rest_s = min(REST * length_s, self._rest_s_max)
        longest_s = ended_s + self._credit_s + self._rest_s_max
        self._rested_s = min(max(self._rested_s, ended_s) + rest_s, longest_s)
        return self._rested_s - self._credit_s


def trainers_courtesy() -> Courtesy:
    """Return that of one rank."""
    return Courtesy(credit_s=TRAINER_CREDIT_S, rest_s_max=TRAINER_REST_S_MAX)

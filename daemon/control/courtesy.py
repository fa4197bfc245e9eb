"""While shards are written, questions wait a little: a person or a dashboard can, the drives and training cannot.

Answering holds the GIL that the drives' threads need, and clients that ask without end keep a core of their own busy
too. So while something is written no answer begins until the one before has ended, or `APART_S` have passed, and after
an answer follows a rest of `REST` times its length. Whoever has little time left to its deadline is answered at once.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable

APART_S = 0.25
"""Begins of answers that take long, most of them waiting for drives."""
REST = 9
"""So that answers take about a tenth of the time."""
REST_S_MAX = 1.0
LOOK_S = 0.01
"""How often to look whether the writing has ended."""
HURRY_S = 2.0
"""Left to a deadline; the command line gives a question 30 s."""


class Courtesy:
    """Spreads the answers of one event loop."""

    def __init__(self, is_writing: Callable[[], bool]) -> None:
        """`is_writing` says whether shards are being written now."""
        self._is_writing = is_writing
        self._turn = asyncio.Lock()
        self._next_s = 0.0

    @contextlib.asynccontextmanager
    async def answering(self, left_s: float = math.inf) -> AsyncGenerator[None]:
        """Wait for this answer's turn, `left_s` before its deadline; the block makes it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s - HURRY_S if left_s < math.inf else None), self._turn:
                while self._is_writing() and time.monotonic() < self._next_s:  # noqa: ASYNC110  either ends it
                    await asyncio.sleep(LOOK_S)
        began_s = time.monotonic()
        mine_s = self._next_s = began_s + APART_S
        try:
            yield
        finally:
            ended_s = time.monotonic()
            rest_until_s = ended_s + min(REST * (ended_s - began_s), REST_S_MAX)
            self._next_s = rest_until_s if self._next_s == mine_s else max(self._next_s, rest_until_s)

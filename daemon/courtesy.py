"""While shards are written, questions wait a little: a person or a dashboard can, the drives and training cannot.

Answering holds the GIL that the drives' threads need, and clients that ask without end keep a core of their own busy
too. So while something is written answers begin apart from each other: a quick one is followed by a rest of `REST`
times its length, and until a long one has ended or `REST_S_MAX` has passed no other begins. Whoever has little time
left to its deadline is answered at once.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable

REST = 9
"""So that answers take about a tenth of the time."""
REST_S_MAX = 0.25
"""After a long one, which mostly waits for drives."""
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
    async def answering(self, left_s: float) -> AsyncGenerator[None]:
        """Wait for this answer's turn, `left_s` before its deadline; the block makes it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s - HURRY_S), self._turn:
                while self._is_writing() and time.monotonic() < self._next_s:  # noqa: ASYNC110  either ends it
                    await asyncio.sleep(LOOK_S)
        began_s = time.monotonic()
        mine_s = self._next_s = began_s + REST_S_MAX
        try:
            yield
        finally:
            if self._next_s == mine_s:
                ended_s = time.monotonic()
                self._next_s = min(mine_s, ended_s + REST * (ended_s - began_s))

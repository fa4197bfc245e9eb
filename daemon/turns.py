"""How many frames of one user are served in one round of the event loop, and whose turn it is then.

It counts all connections of a user: one that sends over hundreds of them gets no more of a round than over one, and
costs no more while they wait.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

FRAMES_AT_ONCE = 64
REST_S_MAX = 1.0
"""Whoever sends too much is not read for so long at once."""

ReadOn = Callable[[], None]


class Turns:
    """By uid. Owned by the event loop."""

    def __init__(self) -> None:
        self._served: dict[int, int] = {}

    def left(self, uid: int) -> int:
        """Return how many frames of this user may still be served in this round."""
        return max(0, FRAMES_AT_ONCE - self._served.get(uid, 0))

    def take(self, uid: int, count: int) -> None:
        """Count frames that were served."""
        if not self._served:
            asyncio.get_running_loop().call_soon(
                self._served.clear
            )  # before anything that the next round brings
        self._served[uid] = self._served.get(uid, 0) + count


class Rests:
    """The connections of each user that are read on later, one after the other, with one timer for all of them."""

    def __init__(self, turns: Turns, delay_s: Callable[[int], float]) -> None:
        """`delay_s` returns for how many seconds nothing of a user is read."""
        self._turns, self._delay_s = turns, delay_s
        self._waiting: dict[int, dict[ReadOn, None]] = {}
        """By uid, in their order. There is a timer for each uid that is in here."""
        self.held_bytes: Counter[int] = Counter()
        """Of what came and was not served, by uid."""

    def add(self, uid: int, read_on: ReadOn) -> None:
        """Call `read_on` when it is its turn, behind those that wait."""
        waiting = self._waiting.get(uid)
        if waiting is None:
            waiting = self._waiting[uid] = {}
            self._wait(uid)
        waiting[read_on] = None

    def discard(self, uid: int, read_on: ReadOn) -> None:
        """Do not call it any more, if it waits."""
        self._waiting.get(uid, {}).pop(read_on, None)

    def _wait(self, uid: int) -> None:
        loop, delay_s = asyncio.get_running_loop(), self._delay_s(uid)
        if delay_s > 0:
            loop.call_later(min(delay_s, REST_S_MAX), self._read_on, uid)
        else:
            loop.call_soon(self._read_on, uid)  # in the next round

    def _read_on(self, uid: int) -> None:
        waiting = self._waiting[uid]
        try:
            for read_on in list(waiting)[: self._turns.left(uid)]:
                if not self._turns.left(uid) or self._delay_s(uid) > 0:
                    break
                if read_on in waiting:  # none that another one's frame has closed
                    del waiting[read_on]
                    read_on()
        finally:
            if waiting:
                self._wait(uid)
            else:
                del self._waiting[uid]

"""How many frames of one user are served in one round of the event loop: then other users' clients have their turn.

It counts all connections of a user: one that sends over hundreds of them gets no more of a round than over one.
"""

import asyncio

FRAMES_AT_ONCE = 64


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

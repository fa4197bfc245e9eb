"""Where samples lie in a reader's staging: a ring, filled in order and freed in order. Pure."""

from collections import deque


class Ring:
    """Places in `size_bytes` bytes; each is one piece, so that the end of the ring may stay unused."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._places: deque[tuple[int, int]] = deque()
        """(begin, end) of what is in use, oldest first."""

    def __len__(self) -> int:
        """Return how many places are in use."""
        return len(self._places)

    def take(self, length: int) -> int | None:
        """Return the begin of a free place, in use from now on; None: there is no room now."""
        needed_bytes = max(length, 1)  # places are told apart by where they begin
        begin = self._begin(needed_bytes)
        if begin is not None:
            self._places.append((begin, begin + needed_bytes))
        return begin

    def _begin(self, needed_bytes: int) -> int | None:
        if not self._places:
            return 0 if needed_bytes <= self.size_bytes else None
        oldest, newest_end = self._places[0][0], self._places[-1][1]
        if self._places[-1][0] < oldest:  # it has gone round
            return newest_end if newest_end + needed_bytes <= oldest else None
        if newest_end + needed_bytes <= self.size_bytes:
            return newest_end
        return 0 if needed_bytes <= oldest else None

    def free(self, count: int) -> None:
        """Free the oldest `count` places."""
        for _ in range(count):
            self._places.popleft()

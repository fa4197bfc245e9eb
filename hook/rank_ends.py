"""How long ranks have until somebody ends them: each tells rank 0 over the Store, which plans by the least.

And whether rank 0 has found time for a last checkpoint after all. Clocks differ between nodes, so what travels is the
time left; it is as old as a poll of the Store when it is heard.
"""

import json
import threading
import time
from typing import TYPE_CHECKING

from .rank_store import present

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed's own, whose stub does not export it

AFTER_ALL = "after-all"
"""Whether the last boundary is saved, which had no time at first; by rank 0."""
_COUNT = "lefts"
"""Counts what ranks have said: rank 0 looks for the words themselves only when there are new ones."""


class RankEnds:
    """One rank's side. `ends_in` and `left_s` from any thread, the other methods on the agreement's."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._lock = threading.Lock()
        self._until_s: float | None = None
        """The least that this rank knows, by its clock."""
        self._is_told = True
        self._count = 0
        self.awaits_answer = False
        """This rank is to hear whether the last boundary is saved after all; set by the training thread."""
        self.answer: bool | None = None

    def ends_in(self, left_s: float) -> None:
        """Somebody ends this rank, or on rank 0 any other one, in so many seconds."""
        with self._lock:
            until_s = time.monotonic() + left_s
            if self._until_s is None or until_s < self._until_s:
                self._until_s, self._is_told = until_s, False

    @property
    def left_s(self) -> float | None:
        """The least time left now; None: nobody has announced an end."""
        with self._lock:
            return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def tell(self, store: "Store") -> None:
        """Let rank 0 know of what is new: to be called before anything is sent that was asked for because of it."""
        with self._lock:
            until_s, is_told, self._is_told = self._until_s, self._is_told, True
        if self._rank == 0 or is_told or until_s is None:
            return
        store.set(f"left/{self._rank}", repr(until_s - time.monotonic()))
        store.add(_COUNT, 1)

    def hear_answer(self, store: "Store") -> bool:
        """Take what rank 0 says of the last boundary; tell whether it came now."""
        if not self.awaits_answer or not store.check([AFTER_ALL]):
            return False
        self.answer, self.awaits_answer = bool(json.loads(store.get(AFTER_ALL))), False
        return True

    def hear(self, store: "Store") -> float | None:
        """Take, on rank 0, what the others have told; return the least they say if there is anything new."""
        count = store.add(_COUNT, 0)
        if count == self._count:
            return None
        self._count = count
        keys = present(store, [f"left/{rank}" for rank in range(1, self._world_size)])
        left_s = min(float(text) for text in store.multi_get(keys))
        self.ends_in(left_s)
        return left_s

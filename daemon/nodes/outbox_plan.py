"""What waits to be sent to one peer: samples by dataset, bounded in bytes. Pure: times are given."""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")

OUTBOX_BYTES_MAX = 64 * 1024 * 1024
OFFER_BYTES = 4 * 1024 * 1024
"""Of one message, unless one sample is larger."""
OFFER_COUNT_MAX = 4096


@dataclass(frozen=True, slots=True)
class Parcel:
    """One sample."""

    sample: int
    digest: int
    data: bytes


class Outbox(Generic[K]):
    """First come, first served, but for datasets that have to wait."""

    def __init__(self, size_bytes_max: int = OUTBOX_BYTES_MAX) -> None:
        self.size_bytes_max = size_bytes_max
        self.size_bytes = 0
        self._parcels: dict[K, deque[Parcel]] = {}
        self._not_before_s: dict[K, float] = {}

    def __len__(self) -> int:
        """Return how many samples wait."""
        return sum(map(len, self._parcels.values()))

    def put(self, key: K, parcel: Parcel) -> bool:
        """Add a sample; False: there is no room for it."""
        size_bytes = len(parcel.data)
        if self.size_bytes + size_bytes > self.size_bytes_max:
            return False
        self._parcels.setdefault(key, deque()).append(parcel)
        self.size_bytes += size_bytes
        return True

    def next_due(self, now_s: float) -> tuple[K, float] | None:
        """Return whose samples go next, and in how many seconds; None: there are none."""
        if not self._parcels:
            return None
        key = min(self._parcels, key=lambda each: self._not_before_s.get(each, 0.0))
        return key, max(0.0, self._not_before_s.get(key, 0.0) - now_s)

    def take(self, key: K) -> list[Parcel]:
        """Return the samples of one message; they are the caller's now."""
        waiting, taken, size_bytes = self._parcels[key], list[Parcel](), 0
        while waiting and len(taken) < OFFER_COUNT_MAX:
            if taken and size_bytes + len(waiting[0].data) > OFFER_BYTES:
                break
            taken.append(waiting.popleft())
            size_bytes += len(taken[-1].data)
        self.size_bytes -= size_bytes
        if not waiting:
            del self._parcels[key]
        return taken

    def put_back(self, key: K, parcels: list[Parcel], *, not_before_s: float) -> None:
        """Let samples that were taken wait again, before the others of their dataset, all of it until then."""
        self._parcels.setdefault(key, deque()).extendleft(reversed(parcels))
        self.size_bytes += sum(len(each.data) for each in parcels)
        self._not_before_s[key] = not_before_s

    def drop(self, key: K | None = None) -> int:
        """Forget the samples of a dataset, or all; return how many."""
        keys = list(self._parcels) if key is None else [key] * (key in self._parcels)
        count = 0
        for each in keys:
            parcels = self._parcels.pop(each)
            count += len(parcels)
            self.size_bytes -= sum(len(parcel.data) for parcel in parcels)
            self._not_before_s.pop(each, None)
        return count

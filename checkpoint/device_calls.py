"""Which devices stand still: calls on them have not returned, of whatever shard, and none has for a while."""

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

STANDS_STILL_S = 1.0
"""Less than what a device may be late: where all pause none seems free for so long that another one is."""


@dataclass(slots=True)
class _Calls:
    count: int = 0
    since_s: float = 0.0
    """When the last one returned, or the first of these began."""


class DeviceCalls:
    """The calls of all shards that a store writes. Thread-safe."""

    def __init__(self, device_ids: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._calls = {device_id: _Calls() for device_id in device_ids}

    @contextmanager
    def call(self, device_id: str) -> Generator[None]:
        """Know of a call on a device while the block runs."""
        with self._lock:
            calls = self._calls[device_id]
            calls.since_s = calls.since_s if calls.count else time.monotonic()
            calls.count += 1
        try:
            yield
        finally:
            with self._lock:
                calls.count -= 1
                calls.since_s = time.monotonic()

    def stands_still(self, device_id: str) -> bool:
        """Tell whether a device has calls to return and has not returned any lately."""
        with self._lock:
            calls = self._calls[device_id]
            return calls.count > 0 and time.monotonic() - calls.since_s > STANDS_STILL_S

"""What was promised is given back once, whoever settles it, and at the same moment as whom."""

import sys
import threading
from collections.abc import Iterator

import pytest

from everstep.checkpoint.space_ledger import Reservation

PARTS = 400


class Account:
    """A ledger that only sums up what comes back."""

    def __init__(self) -> None:
        self.given_bytes = 0
        self._lock = threading.Lock()

    def give_back(self, file_system_id: int, size_bytes: int) -> None:
        del file_system_id
        with self._lock:
            self.given_bytes += size_bytes


@pytest.fixture
def _often() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Let threads change places as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_often")
def test_lanes_that_settle_at_once_give_back_what_was_promised_and_no_more() -> None:
    for _ in range(20):
        account = Account()
        with Reservation(account, {"a": 2 * PARTS}, {"a": 1}) as reservation:  # type: ignore[arg-type]
            lanes = [
                threading.Thread(target=lambda: [reservation.settle("a", 1) for _ in range(PARTS)])
                for _ in range(2)
            ]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        assert account.given_bytes == 2 * PARTS

"""A ring never stops for good: every order in which its copier, writers and checksums can take their turns, tried.

The rules are those of the code: the copier takes the segments in order, and waits before segment i until segment i - W
is written and checksummed (`SlotSealing.before`). Each device has two lanes; a lane takes the next segment dealt to its
device, or, when there is none and its device has nothing in hand, perhaps the last one of another device
(`SegmentDealer.take`), and keeps it until it is copied and written. Checksum threads take the segments in order.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest

_T = TypeVar("_T")

LANES = 2
NOTHING, ENDED = -1, -2
"""In a lane's hand."""


@dataclass(frozen=True)
class Ring:
    """Where all of them are."""

    segments: int
    windows: int
    copied: int
    """Segments [0, copied)."""
    queues: tuple[tuple[int, ...], ...]
    lanes: tuple[tuple[int, ...], ...]
    written: frozenset[int]
    next_checksum: int
    summing: tuple[int, ...]
    summed: frozenset[int]

    @property
    def is_done(self) -> bool:
        return len(self.written) == len(self.summed) == self.segments

    def steps(self) -> Iterator["Ring"]:
        """Everything that may happen next."""
        passed = self.written & self.summed
        if self.copied < self.segments and (
            self.copied < self.windows or self.copied - self.windows in passed
        ):
            yield replace(self, copied=self.copied + 1)
        yield from self._lanes()
        yield from self._checksums()

    def _lanes(self) -> Iterator["Ring"]:
        for device, lane in itertools.product(range(len(self.lanes)), range(LANES)):
            held = self.lanes[device][lane]
            if held == NOTHING:
                yield from self._takes(device, lane)
            elif held != ENDED and held < self.copied:
                yield replace(self._hands(device, lane, NOTHING), written=self.written | {held})

    def _takes(self, device: int, lane: int) -> Iterator["Ring"]:
        own = self.queues[device]
        if own:
            yield replace(self._hands(device, lane, own[0]), queues=self._queue(device, own[1:]))
            return
        yield self._hands(device, lane, ENDED)
        if all(held < 0 for held in self.lanes[device]):
            for other, queue in enumerate(self.queues):
                if queue:
                    stolen = self._hands(device, lane, queue[-1])
                    yield replace(stolen, queues=self._queue(other, queue[:-1]))

    def _checksums(self) -> Iterator["Ring"]:
        for thread, held in enumerate(self.summing):
            if held == NOTHING and self.next_checksum < self.segments:
                yield replace(
                    self,
                    summing=_with(self.summing, thread, self.next_checksum),
                    next_checksum=self.next_checksum + 1,
                )
            elif NOTHING < held < self.copied:
                yield replace(self, summing=_with(self.summing, thread, NOTHING), summed=self.summed | {held})

    def _hands(self, device: int, lane: int, held: int) -> "Ring":
        return replace(self, lanes=_with(self.lanes, device, _with(self.lanes[device], lane, held)))

    def _queue(self, device: int, queue: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return _with(self.queues, device, queue)


def _with(items: tuple[_T, ...], index: int, item: _T) -> tuple[_T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def begun(dealt: tuple[int, ...], devices: int, windows: int, threads: int) -> Ring:
    queues = tuple(
        tuple(segment for segment, owner in enumerate(dealt) if owner == device) for device in range(devices)
    )
    return Ring(
        segments=len(dealt),
        windows=windows,
        copied=0,
        queues=queues,
        lanes=((NOTHING,) * LANES,) * devices,
        written=frozenset(),
        next_checksum=0,
        summing=(NOTHING,) * threads,
        summed=frozenset(),
    )


def one_of(ring: Ring) -> Ring:
    """Return one ring for all in which equal lanes or threads have changed their places."""
    return replace(
        ring,
        lanes=tuple(tuple(sorted(lanes)) for lanes in ring.lanes),
        summing=tuple(sorted(ring.summing)),
    )


def reachable(start: Ring) -> set[Ring]:
    found, left = {start}, [start]
    while left:
        for step in map(one_of, left.pop().steps()):
            if step not in found:
                found.add(step)
                left.append(step)
    return found


@pytest.mark.parametrize("windows", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_from_wherever_it_is_it_goes_on_to_the_end(windows: int, threads: int) -> None:
    for dealt in itertools.product(range(2), repeat=4):
        for ring in reachable(begun(dealt, 2, windows, threads)):
            assert ring.is_done or any(True for _ in ring.steps()), ring


def test_it_would_stop_if_checksums_were_taken_in_another_order() -> None:
    """The model can tell: the one checksum thread waits for a segment that needs the window of the first."""
    stuck = replace(begun((0, 0), 1, 1, 1), next_checksum=2, summing=(1,))
    assert any(not ring.is_done and not list(ring.steps()) for ring in reachable(stuck))

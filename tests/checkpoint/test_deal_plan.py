"""Deals: every segment once, never beyond the room, fair among equals, near the ideal end; and when to take over."""

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everstep.checkpoint.deal_plan import (
    SPACE_MARGIN_BYTES,
    STEAL_MARGIN,
    DeviceLoad,
    Work,
    deal,
    shortage,
    victim,
)
from everstep.core.errors import NoSpaceError

PLENTY = 1 << 60
sizes = st.lists(st.integers(0, 1 << 30), max_size=40)
speeds = st.floats(1e6, 1e10)


def loads(*speeds_bytes_per_s: float | None, backlog_bytes: int = 0) -> list[DeviceLoad]:
    """Devices on volumes of their own."""
    return [
        DeviceLoad(
            device_id=f"d{index}",
            name=f"/d{index}",
            volume=index,
            speed_bytes_per_s=speed,
            backlog_bytes=backlog_bytes,
        )
        for index, speed in enumerate(speeds_bytes_per_s)
    ]


def rooms(devices: list[DeviceLoad], room_bytes: int = PLENTY) -> dict[int, int]:
    return {device.volume: room_bytes for device in devices}


def end_s(sizes_bytes: list[int], dealt: tuple[str, ...], devices: list[DeviceLoad]) -> float:
    busy = {device.device_id: device.backlog_bytes / (device.speed_bytes_per_s or 1) for device in devices}
    for size, device_id in zip(sizes_bytes, dealt, strict=True):
        speed = next(device.speed_bytes_per_s for device in devices if device.device_id == device_id)
        busy[device_id] += size / (speed or 1)
    return max(busy.values())


@given(
    sizes,
    st.lists(
        st.tuples(st.none() | speeds, st.integers(0, 3), st.integers(0, 1 << 32)), min_size=1, max_size=6
    ),
    st.lists(st.integers(0, 1 << 35), min_size=4, max_size=4),
)
def test_every_segment_goes_to_one_device_and_no_volume_gets_more_than_its_room(
    sizes_bytes: list[int], facts: list[tuple[float | None, int, int]], room_bytes: list[int]
) -> None:
    devices = [
        DeviceLoad(
            device_id=f"d{index}",
            name=f"/d{index}",
            volume=volume,
            speed_bytes_per_s=speed,
            backlog_bytes=backlog,
        )
        for index, (speed, volume, backlog) in enumerate(facts)
    ]
    rooms_bytes = dict(enumerate(room_bytes))
    try:
        dealt = deal(sizes_bytes, devices, rooms_bytes)
    except NoSpaceError:
        # Only where it is tight: each volume has less left than one segment, or had from the start.
        used = sum(rooms_bytes[volume] for volume in {device.volume for device in devices})
        assert used < sum(sizes_bytes) + len(devices) * max(sizes_bytes)
        return
    assert dealt == deal(list(sizes_bytes), list(devices), dict(rooms_bytes))
    assert len(dealt) == len(sizes_bytes)
    volumes = {device.device_id: device.volume for device in devices}
    taken: Counter[int] = Counter()
    for size, device_id in zip(sizes_bytes, dealt, strict=True):
        taken[volumes[device_id]] += size
    assert all(taken[volume] <= rooms_bytes[volume] for volume in taken)


@given(
    st.integers(0, 64),
    st.integers(1, 8),
    st.integers(1, 1 << 30),
    st.none() | speeds,
    st.integers(0, 1 << 30),
)
def test_equal_devices_get_equal_counts_of_equal_segments(
    count: int, device_count: int, size: int, speed: float | None, backlog: int
) -> None:
    devices = loads(*[speed] * device_count, backlog_bytes=backlog)
    counts = Counter(deal([size] * count, devices, rooms(devices)))
    found = [counts[device.device_id] for device in devices]
    assert max(found) - min(found) <= 1


@given(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=40), st.lists(speeds, min_size=1, max_size=6))
def test_the_end_is_near_that_of_an_ideal_split(sizes_bytes: list[int], known: list[float]) -> None:
    """No deal ends before all devices together could; this one ends at most one segment later on any device."""
    devices = loads(*known)
    ideal_s = sum(sizes_bytes) / sum(known)
    found_s = end_s(sizes_bytes, deal(sizes_bytes, devices, rooms(devices)), devices)
    assert found_s >= ideal_s * (1 - 1e-9)
    assert found_s <= ideal_s + max(sizes_bytes) * len(known) / sum(known) + 1e-9


@pytest.mark.parametrize("device_count", [2, 4, 8])
def test_one_device_five_times_slower_costs_little(device_count: int) -> None:
    known = [200e6] * (device_count - 1) + [40e6]
    devices, sizes_bytes = loads(*known), [64 << 20] * (16 * device_count)
    ideal_s = sum(sizes_bytes) / sum(known)
    assert end_s(sizes_bytes, deal(sizes_bytes, devices, rooms(devices)), devices) <= 1.1 * ideal_s


def test_a_device_that_nobody_knows_counts_as_a_typical_one() -> None:
    devices = loads(100.0, None, 100.0)
    assert sorted(Counter(deal([10] * 30, devices, rooms(devices))).values()) == [10, 10, 10]


def test_what_is_queued_already_counts() -> None:
    busy = DeviceLoad(device_id="busy", name="busy", volume=0, speed_bytes_per_s=100.0, backlog_bytes=200)
    idle = DeviceLoad(device_id="idle", name="idle", volume=1, speed_bytes_per_s=100.0)
    assert Counter(deal([100] * 6, [busy, idle], {0: PLENTY, 1: PLENTY})) == {"busy": 2, "idle": 4}


def test_a_device_with_little_room_gets_what_fits() -> None:
    devices = loads(100.0, 100.0)
    assert Counter(deal([10] * 8, devices, {0: 25, 1: PLENTY})) == {"d0": 2, "d1": 6}
    with pytest.raises(
        NoSpaceError,
        match="/d0 has room for 25 bytes, /d1 has room for 30 bytes, 80 are needed in 8 segments",
    ):
        deal([10] * 8, devices, {0: 25, 1: 30})


def test_devices_of_one_volume_share_its_room() -> None:
    one, two = (DeviceLoad(device_id=name, name=name, volume=7) for name in ("a", "b"))
    with pytest.raises(NoSpaceError, match=r"^a has room for 15 bytes, 20 are needed"):
        deal([10, 10], [one, two], {7: 15})


def work(
    name: str, *waiting: int, speed: float | None = 100.0, running: int = 0, running_s: float = 0.0
) -> Work:
    return Work(
        device_id=name,
        waiting_bytes=waiting,
        running_bytes=running,
        running_s=running_s,
        speed_bytes_per_s=speed,
    )


@given(speeds, st.integers(1, 1 << 30), st.lists(st.booleans(), min_size=1, max_size=7), st.floats(0, 0.5))
def test_equal_devices_never_take_from_each_other(
    speed: float, size: int, has_waiting: list[bool], late: float
) -> None:
    """At the end of an equal deal a device may be late by up to half a segment."""
    works = [
        work(f"d{index}", size, speed=speed)
        if waits
        else work(f"d{index}", speed=speed, running=size, running_s=late * size / speed)
        for index, waits in enumerate(has_waiting)
    ]
    assert victim(speed, works) is None
    assert victim(None, [work("d", size, speed=None)]) is None


@given(
    st.none() | speeds,
    st.lists(st.tuples(st.lists(st.integers(1, 1 << 30), max_size=5), st.none() | speeds), max_size=6),
)
def test_who_loses_a_segment_has_one_and_would_clearly_have_ended_later(
    thief: float | None, facts: list[tuple[list[int], float | None]]
) -> None:
    works = [work(f"d{index}", *waiting, speed=speed) for index, (waiting, speed) in enumerate(facts)]
    chosen = victim(thief, works)
    assume(chosen is not None)
    lost = next(each for each in works if each.device_id == chosen)
    assert lost.waiting_bytes
    if thief is not None and lost.speed_bytes_per_s is not None:
        own_s = lost.waiting_bytes[-1] / thief
        assert sum(lost.waiting_bytes) / lost.speed_bytes_per_s > own_s * (1 + STEAL_MARGIN) * (1 - 1e-9)


def test_a_slow_device_is_relieved_and_a_running_segment_shows_that_it_is_slow() -> None:
    assert victim(100.0, [work("slow", 10, speed=20.0)]) == "slow"
    assert victim(100.0, [work("fast", 10), work("slow", 10, speed=20.0)]) == "slow"
    assert victim(100.0, [work("new", 10, speed=None, running=10, running_s=0.05)]) is None
    assert victim(100.0, [work("new", 10, speed=None, running=10, running_s=0.5)]) == "new"
    assert victim(100.0, [work("done", running=10, running_s=9.0)]) is None
    assert victim(100.0, []) is None


@given(st.integers(0, 2**50))
def test_a_shortage_is_what_the_margin_takes_all_of(free_bytes: int) -> None:
    text = shortage("/d0", free_bytes)
    assert bool(text) == (free_bytes <= SPACE_MARGIN_BYTES)
    assert not text or ("/d0 has no room" in text and "16.0 MiB of each file system stay free" in text)


def simulated(
    true_bytes_per_s: list[float], known_bytes_per_s: list[float | None], sizes_bytes: list[int]
) -> tuple[float, Counter[str]]:
    """Return when a shard is written by drives that take over from each other, and how many segments each wrote."""
    devices = loads(*known_bytes_per_s)
    owners = deal(sizes_bytes, devices, rooms(devices))
    names = [each.device_id for each in devices]
    waiting = {
        name: [size for size, owner in zip(sizes_bytes, owners, strict=True) if owner == name]
        for name in names
    }
    speeds = dict(zip(names, true_bytes_per_s, strict=True))
    known = dict(zip(names, known_bytes_per_s, strict=True))
    running: dict[str, tuple[float, int]] = {}  # when it began, and its size
    written: Counter[str] = Counter()
    now_s = 0.0
    while True:
        for thief in names:
            if thief in running:
                continue
            works = [
                Work(
                    device_id=name,
                    waiting_bytes=tuple(waiting[name]),
                    running_bytes=running[name][1] if name in running else 0,
                    running_s=now_s - running[name][0] if name in running else 0.0,
                    speed_bytes_per_s=known[name],
                )
                for name in names
                if name != thief
            ]
            loser = thief if waiting[thief] else victim(known[thief], works)
            if loser is not None:
                running[thief] = (now_s, waiting[loser].pop())
        if not running:
            assert not any(waiting.values()), "segments are left and nobody writes them"
            return now_s, written
        now_s, done = min((began + size / speeds[name], name) for name, (began, size) in running.items())
        del running[done]
        written[done] += 1


@given(
    st.floats(100, 1e6),
    st.integers(2, 8),
    st.integers(1, 16),
    st.integers(1 << 20, 1 << 30),
    st.floats(1e6, 1e10),
)
def test_a_drive_a_hundred_times_slower_and_more_holds_nobody_up_for_longer_than_one_segment(
    factor: float, device_count: int, segments_each: int, size: int, speed: float
) -> None:
    """Who does not know it, of all or of this one, gives it one segment; who does gives it none."""
    true = [speed] * (device_count - 1) + [speed / factor]
    sizes_bytes = [size] * (segments_each * device_count)
    slow = f"d{device_count - 1}"
    for known in ([None] * device_count, [*true[:-1], None], [*true]):
        end_s, written = simulated(true, [*known], sizes_bytes)
        assert written.total() == len(sizes_bytes)
        fast_s = -(-len(sizes_bytes) // (device_count - 1)) * size / speed
        if known[-1] is None:
            assert written[slow] == 1
            assert end_s <= max(fast_s, size * factor / speed) * (1 + 1e-9)
        else:
            assert written[slow] == 0
            assert end_s <= fast_s * (1 + 1e-9)


def test_no_speed_is_divided_by() -> None:
    """A drive that has moved nothing yet, or nothing for long, is as good as unknown; one that crawls gets nothing."""
    for speed in (0.0, 5e-324, None):
        devices = loads(speed, 100.0)
        counts = Counter(deal([10] * 8, devices, rooms(devices)))
        assert counts.total() == 8
        assert counts["d1"] == (8 if speed else 4)
        assert victim(100.0, [work("d0", 10, 10, speed=speed, running=10, running_s=1e9)]) == "d0"
        victim(speed, [work("d0", 10, speed=100.0)])
    devices = loads(0.0, 0.0)
    assert Counter(deal([10] * 8, devices, rooms(devices))) == {"d0": 4, "d1": 4}

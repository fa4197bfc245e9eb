"""What a sweep measures and recommends, on numbers that are given."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.engine import QUEUE_DEPTH_MAX, EngineKind, TransferKind
from everstep.checkpoint.io_sweep_plan import (
    GOOD_ENOUGH,
    MIB,
    QUEUE_FILLED_MIN,
    STALL_S,
    Cell,
    CellResult,
    Sample,
    cells,
    finalists,
    recommend,
    slow_devices,
    summarised,
    transfer_bytes,
)
from everstep.checkpoint.plain_engine import THREADS_MAX

ALL = cells(tuple(EngineKind), 256 * MIB)


def result(cell: Cell, speed: float) -> CellResult:
    return CellResult(cell=cell, write_bytes_per_s=speed, read_bytes_per_s=speed)


def cell(depth: int, block_mib: int = 1, engine: str = "aio") -> Cell:
    return Cell(engine=engine, block_size_bytes=block_mib * MIB, queue_depth=depth)


def test_every_queue_can_be_filled_several_times() -> None:
    assert len(set(ALL)) == len(ALL)
    assert all(QUEUE_FILLED_MIN * each.block_size_bytes * each.queue_depth <= 256 * MIB for each in ALL)
    assert {each.queue_depth for each in ALL if each.engine == "plain"} == {1, THREADS_MAX}
    assert cell(64) in ALL
    assert cell(64, 4) not in ALL
    assert cell(64, 4) in cells([EngineKind.AIO], 1024 * MIB)


@given(st.sampled_from(ALL), st.floats(1e5, 1e11), st.floats(0.001, 60))
def test_a_transfer_fits_the_file_and_fills_the_queue(
    chosen: Cell, bytes_per_s: float, wanted_s: float
) -> None:
    length = transfer_bytes(chosen, 256 * MIB, bytes_per_s, wanted_s)
    assert length % chosen.block_size_bytes == 0
    assert 2 * chosen.queue_depth * chosen.block_size_bytes <= length <= 256 * MIB


speeds = st.floats(1e6, 1e10)


@given(
    st.dictionaries(
        st.text(min_size=1),
        st.fixed_dictionaries(dict.fromkeys(ALL[::5], speeds)),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_recommended_is_good_on_every_device_and_nothing_smaller_is(
    measured: dict[str, dict[Cell, float]],
) -> None:
    devices = {
        name: [result(each, speed) for each, speed in found.items()] for name, found in measured.items()
    }
    found = recommend(devices)
    assert found is not None
    worth = {each: min(own[each] / max(own.values()) for own in measured.values()) for each in ALL[::5]}
    goal = GOOD_ENOUGH * max(worth.values())
    assert found.write_share >= goal
    size = found.saturating_depth * found.block_size_bytes
    better = [each for each, share in worth.items() if share >= goal]
    assert min(each.queue_depth * each.block_size_bytes for each in better) == size
    assert found.saturating_depth <= found.queue_depth <= QUEUE_DEPTH_MAX


def test_a_deep_queue_holds_work_for_a_stall() -> None:
    found = recommend({"nvme0": [result(cell(8), 2.5e9), result(cell(4), 2.0e9)]})
    assert found is not None
    assert (found.saturating_depth, found.block_size_bytes) == (8, MIB)
    assert found.queue_depth == 256  # the smallest power of two above 0.1 s at 2.5 GB/s
    assert found.queue_depth * MIB / 2.5e9 >= STALL_S > found.queue_depth / 2 * MIB / 2.5e9


def test_without_a_cell_on_every_device_nothing_is_recommended() -> None:
    assert recommend({}) is None
    assert recommend({"a": [], "b": [result(cell(1), 1e9)]}) is None
    assert recommend({"a": [result(cell(4), 1e9)], "b": [result(cell(1), 1e9)]}) is None


@pytest.mark.parametrize(
    ("best", "slow"),
    [
        ({"a": 1e9}, {}),
        ({"a": 1e9, "b": 0.4e9}, {}),
        ({"a": 1e9, "b": 0.2e9}, {"b": 5.0}),
        ({"a": 1e9, "b": 0.9e9, "c": 0.3e9}, {"c": 950 / 300}),
        ({"a": 1e9, "b": 0.0}, {"b": math.inf}),
    ],
)
def test_a_slow_device_is_named(best: dict[str, float], slow: dict[str, float]) -> None:
    assert slow_devices({name: [result(cell(1), speed)] for name, speed in best.items()}) == pytest.approx(
        slow
    )


def test_medians_and_the_fastest_quarter() -> None:
    samples = [
        Sample(cell=cell(depth), kind=kind, bytes_per_s=depth * speed)
        for depth in (1, 4, 8, 16)
        for kind in TransferKind
        for speed in (1e6, 5e6, 2e6)
    ]
    samples.append(Sample(cell=cell(32), kind=TransferKind.WRITE, bytes_per_s=1e12))  # never read
    assert summarised(samples) == [result(cell(depth), depth * 2e6) for depth in (1, 4, 8, 16)]
    assert finalists(samples) == [cell(16)]

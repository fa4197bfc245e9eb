import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.frequency_types import (
    BUDGET_LEAST,
    DRIVE_WRITES_LEAST,
    MOST_S,
    BoundKind,
    Limits,
)
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import LeafSpec
from everstep.checkpoint.prediction_plan import (
    BOUNDS,
    SLOTS_MAX,
    DeviceGroup,
    PlannedJob,
    bytes_per_parameter,
    parse_devices,
    predict,
)
from everstep.checkpoint.ring_layout_plan import HEADER_BYTES, SEGMENTS_MOST, WINDOW_BYTES_MIN
from everstep.core.errors import UsageError

GB, TB = 10**9, 10**12
DESCRIPTIONS = 8 * 8 * 2**20
"""In each slot of each of 8 ranks, the room for the description of its state."""


def job(**changes: Any) -> PlannedJob:
    """A 7 B model on 8 GPUs of one node with 4 drives of 3 GB/s, 7.68 TB each."""
    values: dict[str, Any] = {
        "parameters": 7e9,
        "bytes_per_parameter": 14.0,
        "gpus": 8,
        "gpus_per_node": 8,
        "is_replicated": False,
        "devices": [DeviceGroup(count=4, bytes_per_s=3e9)],
    }
    return PlannedJob(**(values | changes))


@pytest.mark.parametrize(
    ("optimizer", "precision", "size"),
    [
        ("adamw", "mixed", 14),
        ("adamw", "fp32", 12),
        ("adamw", "bf16", 6),
        ("sgd", "fp32", 4),
        ("lion", "mixed", 10),
    ],
)
def test_bytes_of_a_parameter(optimizer: str, precision: str, size: float) -> None:
    assert bytes_per_parameter(optimizer, precision) == size


def test_a_known_job() -> None:
    found = predict(job())
    assert (found.state_size_bytes, found.rank_size_bytes, found.node_size_bytes) == (
        98 * GB,
        12.25 * GB,
        98 * GB,
    )
    assert found.node_memory_bytes == 2 * (98 * GB + DESCRIPTIONS), (
        "each of 8 ranks describes its state in each slot"
    )
    assert found.copy_s == pytest.approx(0.49)
    assert found.persist_s == pytest.approx(98 / 12)
    assert found.stall_s == pytest.approx(0.005)
    assert found.slower_s == pytest.approx(0.0098)
    assert found.reason == "bound by persist bandwidth: 8.17 s"
    assert found.interval_s == pytest.approx(1.15 * 98 / 12)
    assert found.interval_steps is None
    assert found.cost_share < 0.035
    assert found.lost_by_node_s == pytest.approx(found.interval_s + 0.49 + 98 / 12)
    assert found.node_written_per_day_bytes == pytest.approx(98 * GB * 86400 / found.interval_s)
    assert found.drive_writes_per_day is None


def test_drives_of_a_known_size_are_spared() -> None:
    found = predict(job(devices=parse_devices("8x6GBps/7.68TB"), parameters=320e9 / 14))
    assert found.reason == "bound by endurance: 0.521 % of the drives each time, 1 drive write a day"
    assert found.interval_s == pytest.approx(450, rel=0.01)
    assert found.drive_writes_per_day == pytest.approx(1.0)


def test_the_drive_that_is_filled_soonest_is_spared() -> None:
    """Bytes go to drives by their speed: the small one gets 7 of 8."""
    found = predict(job(devices=parse_devices("1x7GBps/1TB,1x1GBps/15TB"), step_s=0.8))
    assert found.reason.startswith("bound by endurance: 8.58 % of the drives each time")
    assert found.drive_writes_per_day == pytest.approx(1.0, rel=0.001)
    assert found.node_written_per_day_bytes == pytest.approx(8 / 7 * TB, rel=0.001)


def test_a_part_of_a_byte_is_one() -> None:
    assert predict(job(parameters=1, bytes_per_parameter=0.125)).state_size_bytes == 1


@given(
    changes=st.fixed_dictionaries(
        {
            **{name: st.sampled_from(bounds) for name, bounds in BOUNDS.items() if name != "gpus_per_node"},
            "gpus_per_node": st.just(1),
            "is_replicated": st.booleans(),
            "slot_count": st.sampled_from([2, SLOTS_MAX]),
            "devices": st.sampled_from([parse_devices("1x1Bps/1B"), parse_devices("9999x1e15TBps/1e15TB")]),
        }
    ),
    limits=st.fixed_dictionaries(
        {
            "budget": st.sampled_from([BUDGET_LEAST, 0.999]),
            "drive_writes_per_day": st.sampled_from([DRIVE_WRITES_LEAST, 1e300]),
            "least_s": st.sampled_from([0.0, MOST_S]),
            "most_s": st.sampled_from([None, 1e-12, MOST_S]),
            "mtbf_s": st.sampled_from([None, 1e-12, MOST_S]),
        }
    ),
)
def test_what_is_just_allowed_is_predicted_in_finite_numbers(
    changes: dict[str, Any], limits: dict[str, Any]
) -> None:
    rank_bytes = predict(job(**(changes | {"memory_bytes": None}))).rank_size_bytes
    least_bytes = DESCRIPTIONS // 8 + min(rank_bytes, max(WINDOW_BYTES_MIN, rank_bytes // SEGMENTS_MOST))
    changes["memory_bytes"] = max(changes["memory_bytes"], least_bytes)
    found = predict(job(**changes, limits=Limits(**limits)))
    numbers = [value for value in asdict(found).values() if isinstance(value, int | float)]
    assert all(map(math.isfinite, numbers)), found


def test_replicated_ranks_write_everything() -> None:
    found = predict(job(parameters=1e9, is_replicated=True))
    assert found.rank_size_bytes == 14 * GB
    assert found.node_size_bytes == 8 * 14 * GB


def test_steps_shorter_than_the_copy_stall() -> None:
    found = predict(job(step_s=0.2))
    assert found.stall_s == pytest.approx(0.005 + 0.49 - 0.18)
    assert found.interval_steps is not None
    assert found.interval_s == pytest.approx(found.interval_steps * 0.2)
    assert {bound.kind for bound in found.bounds} >= {BoundKind.BUDGET, BoundKind.BANDWIDTH, BoundKind.SLOTS}
    assert predict(job(step_s=2.0)).stall_s == pytest.approx(0.005)


def test_without_a_step_one_is_as_long_as_the_copy_needs() -> None:
    found = predict(job(gpus=1, gpus_per_node=1, copy_bytes_per_s=5e9))
    assert found.interval_s == pytest.approx(found.copy_s / 0.9)
    assert found.reason == "bound by each step: 21.8 s at least, for the copy to fit beside it"
    assert found.stall_s == pytest.approx(0.005)
    asked = predict(job(gpus=1, gpus_per_node=1, copy_bytes_per_s=5e9, limits=Limits(least_s=30.0)))
    assert asked.reason == "bound by the least interval allowed: 30 s"


@pytest.mark.parametrize(
    ("size", "held", "too_few_for"),
    [
        ("97GB", "3.9", "the 3 that are kept and the one being written; set retention.keep_last = 2"),
        ("74GB", "3", "the 3 that are kept and the one being written; set retention.keep_last = 2"),
        ("73GB", "2.9", "the 2 that are always kept and the one being written"),
        ("10GB", "0.4", "the 2 that are always kept and the one being written"),
    ],
)
def test_what_is_kept_needs_room(size: str, held: str, too_few_for: str) -> None:
    found = predict(job(devices=parse_devices(f"4x3GBps/{size}")))
    assert found.room_missed == f"the drives of a node hold {held} checkpoints: too few for {too_few_for}"


def test_what_is_kept_has_room() -> None:
    found = predict(job(devices=parse_devices("4x3GBps/98GB")))
    assert (found.node_kept_bytes, found.room_missed) == (4 * 98 * GB, "")
    assert predict(job()).room_missed == ""


def test_failures_and_goals() -> None:
    assert predict(job(limits=Limits(mtbf_s=11_135))).reason.startswith(
        "bound by the best for a failure each 3.09 h"
    )
    assert "not possible" in predict(job(limits=Limits(most_s=10.0))).goal_missed
    assert predict(job(limits=Limits(mtbf_s=11_135, most_s=20.0))).interval_s <= 20.0


def test_slots_are_as_many_as_memory_holds() -> None:
    assert predict(job()).slot_count == 2
    assert predict(job(memory_bytes=200 * GB)) == predict(job())
    one = predict(job(memory_bytes=195 * GB))
    assert (one.slot_count, one.node_memory_bytes) == (1, 98 * GB + DESCRIPTIONS)
    assert predict(job(memory_bytes=196 * GB)).slot_count == 1, "the second one's description has no room"
    assert one.stall_s == predict(job()).stall_s
    held = {bound.kind: bound.need_s for bound in one.bounds}[BoundKind.SLOTS]
    assert held == pytest.approx(0.49 + 98 / 12)


def test_memory_is_what_a_layout_takes() -> None:
    found = predict(job(parameters=1e6, gpus=1, gpus_per_node=1))
    placed: dict[str, Any] = {
        "shape": (140_000,),
        "global_shape": (140_000,),
        "strides": (1,),
        "global_offset": (0,),
    }
    leaves = [LeafSpec(name=f"layer.{number}", dtype="uint8", **placed) for number in range(100)]
    layout = plan_layout(leaves, [], segment_count=4)
    assert layout.state_size_bytes == found.state_size_bytes
    headers_bytes = 4 * (HEADER_BYTES + 100 * 256)
    assert 0 <= layout.slot_size_bytes - found.node_memory_bytes // 2 <= headers_bytes


def test_what_does_not_fit_streams_and_optimizers_wait_for_the_drives() -> None:
    half = 49 * GB + DESCRIPTIONS
    ring = predict(job(memory_bytes=half, step_s=1.0))
    assert (ring.slot_count, ring.node_memory_bytes) == (0, half)
    assert ring.stall_s == pytest.approx(0.005 + 98 / 12 / 2 - 0.9), (
        "half is in the ring when the rest is written"
    )
    assert ring.interval_s > predict(job(step_s=1.0)).interval_s
    assert ring.cost_share <= 0.035
    assert predict(job(memory_bytes=half)).stall_s == pytest.approx(0.005 + 98 / 12 / 2)
    fast = predict(job(memory_bytes=half, step_s=1.0, devices=parse_devices("64x7GBps")))
    assert fast.stall_s == pytest.approx(0.005), "the copy is slower than the drives, and fits beside a step"


@pytest.mark.parametrize(
    ("parameters", "least_bytes"),
    [
        (1e6, 14_000_000 + DESCRIPTIONS),
        (1e9, DESCRIPTIONS + 8 * WINDOW_BYTES_MIN),
        (1e12, DESCRIPTIONS + 14 * GB),
    ],
    ids=["a slot", "a ring", "a ring of large windows"],
)
def test_memory_below_the_smallest_slot_or_ring_is_refused(parameters: float, least_bytes: int) -> None:
    few = job(parameters=parameters, memory_bytes=least_bytes)
    found = predict(few)
    assert found.lost_by_crash_s <= found.lost_by_node_s, "a copy is over before it is durable"
    with pytest.raises(UsageError, match=f"memory_bytes is {least_bytes - 1}, too little") as error:
        predict(replace(few, memory_bytes=least_bytes - 1))
    assert str(error.value.hint).startswith(f"{math.ceil(least_bytes / 2**20)}MiB at least")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("4x3GBps", [(4, 3e9, None)]),
        ("3GB/s", [(1, 3e9, None)]),
        ("8x6.5GBps/7.68TB", [(8, 6.5e9, 7.68 * TB)]),
        ("2x3GB/s/2TB, 2x500MBps/1TB", [(2, 3e9, 2 * TB), (2, 5e8, TB)]),
    ],
)
def test_devices_as_text(text: str, groups: list[tuple[int, float, float | None]]) -> None:
    found = parse_devices(text)
    assert [(group.count, group.bytes_per_s, group.capacity_bytes) for group in found] == groups


@pytest.mark.parametrize(
    "text", ["", "4x3GB", "x3GBps", "0x3GBps", "4x3GBps/", "4x0GBps", "4x3GBps,", "fast"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="describes no devices"):
        parse_devices(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parameters": 0}, "parameters is 0"),
        ({"gpus": 0}, "gpus is 0"),
        ({"devices": []}, "no devices"),
        ({"slot_count": 1}, "slots is 1"),
        ({"slot_count": 65}, "slots is 65"),
        ({"bytes_per_parameter": 1e308}, "bytes_per_parameter is 1e"),
        ({"parameters": 1e30}, "parameters is 1e"),
        ({"parameters": math.nan}, "parameters is nan"),
        ({"step_s": 1e-9}, "step_s is 1e-09"),
        ({"step_s": -1.0}, "step_s is -1.0"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"gpus": 12}, "12 GPUs do not fill nodes of 8"),
        ({"devices": parse_devices("1x1GBps,1x1GBps/1TB")}, "only some devices"),
        ({"limits": Limits(most_steps=10)}, "interval in steps"),
    ],
)
def test_a_job_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        predict(job(**changes))

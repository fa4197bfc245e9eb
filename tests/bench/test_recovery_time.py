"""What opening a store costs: a few calls for each checkpoint and device, metadata only, however many there are."""

from collections import Counter

from places import memory_folder
from recovery_time import calls_to_open, fill

PER_CHECKPOINT_MAX = 3
"""Calls on each device: a manifest read, the size and the stamp of a segment looked at."""
COUNTS = (20, 40, 80)
DATA = {"open_segment_for_read", "read_segment"}


def test_opening_makes_a_few_calls_for_each_checkpoint_and_reads_no_data() -> None:
    found: list[Counter[str]] = []
    before = 0
    with memory_folder() as folder:
        devices = [folder / name for name in "abc"]
        for path in devices:
            path.mkdir()
        for count in COUNTS:
            fill(devices, range(before + 1, count + 1), leaf_count=20)
            found.append(calls_to_open(devices))
            before = count
    first, second, third = found
    assert not DATA & third.keys()
    each = {name: (calls - second[name]) / (COUNTS[2] - COUNTS[1]) for name, calls in third.items()}
    assert each == {name: (second[name] - first[name]) / (COUNTS[1] - COUNTS[0]) for name in each}
    assert 0 < sum(each.values()) <= PER_CHECKPOINT_MAX * len(devices), each

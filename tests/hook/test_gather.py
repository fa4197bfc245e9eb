"""Copies in few calls: every byte at its place, early ends continued, a refusing kernel, addresses that are none."""

import errno
import mmap
import random
import subprocess
import sys
from array import array
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import NodeError
from everstep.hook import copies
from everstep.hook import gather as gather_module
from everstep.hook.copy_plan import GATHER_BYTES_MAX, CopyPlan, Placed, merged
from everstep.hook.gather import SCRATCH_MEAN_BYTES_MAX, Scratch, copy
from everstep.hook.tensor_bytes import BufferPin

WAYS = ("compiled", "kernel", "scratch") if copies.COPIES is not None else ("kernel", "scratch")

sizes = st.one_of(st.integers(0, 300), st.integers(GATHER_BYTES_MAX - 2, GATHER_BYTES_MAX + 2))


@given(
    st.lists(st.tuples(sizes, st.integers(0, 40), st.integers(0, 2)), max_size=12),
    st.integers(),
    st.sampled_from(WAYS),
)
def test_every_piece_comes_to_its_place_and_nothing_else_changes(
    wanted: Sequence[tuple[int, int, int]], seed: int, way: str
) -> None:
    """Pieces of some sizes, with gaps before them, in three segments one behind the other, in any order."""
    leaves: list[torch.Tensor] = []
    placed: list[Placed] = []
    expected = bytearray()
    for segment in range(3):
        for size, gap, _ in (each for each in wanted if each[2] == segment):
            expected += bytes([0xEE]) * gap
            leaf = torch.randint(0, 256, (size,), dtype=torch.uint8)
            placed.append(Placed(len(leaves), 0, size, len(expected), segment))
            leaves.append(leaf)
            expected += bytes(leaf.tolist())
    random.Random(seed).shuffle(placed)
    slot = bytearray([0xEE]) * max(1, len(expected))
    pin = BufferPin(memoryview(slot))
    plan = CopyPlan(placed)
    moves = plan.at(tuple(leaf.data_ptr() for leaf in leaves), pin.address)
    with closing(Scratch()) as scratch, pytest.MonkeyPatch.context() as patch:
        if way != "compiled":
            patch.setattr(copies, "COPIES", None)
        for each in moves:
            copy(each, scratch if way == "scratch" else None)
    pin.release()
    assert slot[: len(expected)] == expected
    assert [each.segment for each in moves] == sorted({segment for size, _, segment in wanted if size})
    assert plan.size_bytes == sum(size for size, _, _ in wanted)


def test_tiny_pieces_go_through_the_scratch_file_and_others_do_not() -> None:
    at_most = SCRATCH_MEAN_BYTES_MAX
    leaves = [torch.arange(each, dtype=torch.uint8) for each in (at_most - 1, at_most + 1, at_most)]
    slot = torch.zeros(at_most + 1, dtype=torch.uint8)
    with closing(Scratch()) as scratch:
        for numbers, is_tiny in (([0, 1], True), ([1, 2], False)):
            plan = CopyPlan(
                Placed(index, 0, leaves[number].nbytes, 0, 0) for index, number in enumerate(numbers)
            )
            (moves,) = plan.at(tuple(leaves[number].data_ptr() for number in numbers), slot.data_ptr())
            assert [scratch.gather(gather) for gather in moves.gathers] == [is_tiny]


LIMITED = """
import resource
import torch
from everstep.hook import copies
from everstep.hook.copy_plan import CopyPlan, Placed
from everstep.hook.gather import Scratch, copy

copies.COPIES = None
resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))
leaves, slot = [torch.arange(5), torch.arange(5, 12)], torch.zeros(13, dtype=torch.int64)
plan = CopyPlan([Placed(0, 0, 40, 0, 0), Placed(1, 0, 56, 48, 0)])
(moves,) = plan.at(tuple(leaf.data_ptr() for leaf in leaves), slot.data_ptr())
scratch = Scratch()
assert not scratch.gather(moves.gathers[0])
copy(moves, scratch)
print(slot.tolist())
"""


def test_where_files_may_not_grow_it_is_done_without() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str([*range(5), 0, *range(5, 12)]), done.stderr


def test_a_plan_follows_leaves_that_move_and_leaves_earlier_moves_as_they_were() -> None:
    plan = CopyPlan([Placed(0, 0, 4, 0, 0), Placed(1, 0, 4, 4, 0)])
    one, two, three = torch.tensor([1]).int(), torch.tensor([2]).int(), torch.tensor([3]).int()
    slot = torch.zeros(2, dtype=torch.int32)
    (first,) = plan.at((one.data_ptr(), two.data_ptr()), slot.data_ptr())
    (second,) = plan.at((one.data_ptr(), three.data_ptr()), slot.data_ptr())
    copy(second)
    assert slot.tolist() == [1, 3]
    copy(first)
    assert slot.tolist() == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=12))
def test_merged_are_the_same_bytes_in_the_same_order_and_nothing_is_left_to_merge(
    extents: list[tuple[int, int]],
) -> None:
    found = merged(extents)
    assert [at for begin, size in found for at in range(begin, begin + size)] == [
        at for begin, size in extents for at in range(begin, begin + size)
    ]
    assert all(sum(one) != other[0] for one, other in pairwise(found))


def test_many_small_leaves_take_few_calls_and_one_run_of_targets() -> None:
    plan = CopyPlan(Placed(index, 0, 8, 8 * index, 0) for index in range(3000))
    (moves,) = plan.at(tuple(range(3000)), 0)
    assert len(moves.gathers) == 3
    assert [len(gather.targets) for gather in moves.gathers] == [2, 2, 2]
    assert moves.large == ()


class Halting:
    """The kernel's call with less asked of it: so it may end early, wherever it likes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.calls = 0
        self.libc = gather_module._libc

    def process_vm_readv(self, pid: int, local: object, local_count: int, remote: object, *rest: int) -> int:
        del local_count
        self.calls += 1
        first = array("Q", bytes(gather_module._ffi.buffer(local))[:16])
        first[1] = min(first[1], self.most_bytes)
        return self.libc.process_vm_readv(pid, gather_module._ffi.from_buffer(first), 1, remote, *rest)


@pytest.mark.parametrize("most_bytes", [1, 3, 4, 5, 11, 100])
def test_what_ends_early_is_continued(monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    leaves = [torch.arange(10 * size, 11 * size, dtype=torch.uint8) for size in (4, 1, 6, 9)]
    slot = torch.zeros(24, dtype=torch.uint8)
    plan = CopyPlan(
        [Placed(0, 0, 4, 0, 0), Placed(1, 0, 1, 4, 0), Placed(2, 0, 6, 8, 0), Placed(3, 0, 9, 14, 0)]
    )
    (moves,) = plan.at(tuple(leaf.data_ptr() for leaf in leaves), slot.data_ptr())
    halting = Halting(most_bytes)
    monkeypatch.setattr(copies, "COPIES", None)
    monkeypatch.setattr(gather_module, "_libc", halting)
    copy(moves)
    expected = torch.cat([leaves[0], leaves[1], torch.zeros(3), leaves[2], leaves[3], torch.zeros(1)])
    assert slot.tolist() == expected.tolist()
    assert halting.calls >= 20 // most_bytes


REFUSING = """
import ctypes, platform, struct, sys
import torch
from everstep.hook import copies
from everstep.hook.copy_plan import CopyPlan, Placed
from everstep.hook.gather import copy

copies.COPIES = None

class Filter(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_char_p)]

number, errno = {"x86_64": 310, "aarch64": 270}[platform.machine()], int(sys.argv[1])
code = b"".join(struct.pack("HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno), (0x06, 0, 0, 0x7FFF0000)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(4, code)), 0, 0) == 0, ctypes.get_errno()
leaves = [torch.arange(5), torch.arange(5, 12)]
slot = torch.zeros(13, dtype=torch.int64)
plan = CopyPlan([Placed(0, 0, 40, 0, 0), Placed(1, 0, 56, 48, 0)])
for _ in range(2):
    for moves in plan.at(tuple(leaf.data_ptr() for leaf in leaves), slot.data_ptr()):
        copy(moves)
print(slot.tolist())
"""


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_kernel_that_refuses_is_done_without_and_that_is_said_once(number: int) -> None:
    """A real filter of system calls, as containers have, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", REFUSING, str(number)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str([*range(5), 0, *range(5, 12)]), done.stderr
    assert done.stderr.count("gather_refused") == 1
    assert errno.errorcode[number] in done.stderr


def test_an_address_that_is_none_is_an_error_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "COPIES", None)
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        pin = BufferPin(memoryview(page))
        unmapped = pin.address
        pin.release()
    slot = torch.zeros(4, dtype=torch.uint8)
    plan = CopyPlan([Placed(0, 0, 4, 0, 0)])
    (moves,) = plan.at((unmapped,), slot.data_ptr())
    with (
        closing(Scratch()) as scratch,
        pytest.raises(NodeError, match="process_vm_readv failed: Bad address"),
    ):
        copy(moves, scratch)

"""Block shuffles: true permutations that stay inside their windows, both ways, equal to their plain-Python twins."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import UsageError
from everstep.dataloader.block_format import BlockSpec, equal_blocks, listed_blocks
from everstep.dataloader.order_format import OrderKind, OrderSpec, ids_between
from everstep.dataloader.order_plan import order

GOLDEN_EQUAL = [9846026, 362578686, 712736, 643505991, 870259213]
GOLDEN_LISTED = [10, 13, 11, 14, 12, 15, 8, 9, 6, 0, 1, 3, 7, 2, 5, 4]

sizes_lists = st.lists(st.sampled_from([0, 1, 2, 5, 9, 40]), max_size=30)
blocks_of_any_kind = st.builds(listed_blocks, sizes_lists, st.integers(1, 8)) | st.builds(
    equal_blocks, st.integers(0, 300), st.integers(1, 40), st.integers(1, 8)
)


def spec(blocks: BlockSpec, seed: int = 0) -> OrderSpec:
    return OrderSpec(kind=OrderKind.BLOCKS, seed=seed, blocks=blocks)


def block_of_id(blocks: BlockSpec) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.repeat(np.arange(blocks.count), list(blocks.sizes()))


@given(blocks=blocks_of_any_kind, seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_a_permutation_with_its_inverse_and_its_twin(blocks: BlockSpec, seed: int, epoch: int) -> None:
    n = blocks.sample_count
    tested, everything = order(spec(blocks, seed), epoch, n), np.arange(n)
    ids = tested.at(everything)
    assert np.array_equal(np.sort(ids), everything)
    assert np.array_equal(tested.position_of(ids), everything)
    assert list(ids_between(spec(blocks, seed), epoch, n, (0, n))) == ids.tolist()
    middle = (n // 3, n - n // 4)
    assert list(ids_between(spec(blocks, seed), epoch, n, middle)) == ids[slice(*middle)].tolist()


@given(blocks=blocks_of_any_kind, seed=st.integers(0, 2**64 - 1))
def test_no_more_blocks_are_in_use_than_a_window_has(blocks: BlockSpec, seed: int) -> None:
    """That is what makes it fit for sequential media: a block is in use from its first sample to its last."""
    n = blocks.sample_count
    used = block_of_id(blocks)[order(spec(blocks, seed), 3, n).at(np.arange(n))]
    in_use = np.zeros(n + 1, dtype=np.int64)
    for block in np.unique(used):
        places = np.flatnonzero(used == block)
        in_use[places[0]] += 1
        in_use[places[-1] + 1] -= 1
    assert np.cumsum(in_use).max(initial=0) <= blocks.window


def test_equal_blocks_and_a_list_of_them_are_one_order() -> None:
    equal, listed = equal_blocks(1000, 64, 4), listed_blocks([64] * 15 + [40], 4)
    assert equal == listed
    cut = listed_blocks([64] * 15 + [39, 1], 4)
    assert cut.digest != equal.digest


def test_orders_are_part_of_the_format() -> None:
    """These numbers are in users' checkpoints: a change is a new `algo`, never an edit here."""
    equal, listed = equal_blocks(10**9, 1000, 16), listed_blocks([5, 0, 3, 7, 1], 2)
    assert order(spec(equal, 42), 3, 10**9).at(np.arange(5 * 10**8, 5 * 10**8 + 5)).tolist() == GOLDEN_EQUAL
    assert order(spec(listed, 42), 3, 16).at(np.arange(16)).tolist() == GOLDEN_LISTED


def test_ten_billion_samples_in_equal_blocks_cost_nothing() -> None:
    n = 10**10
    tracemalloc.start()
    try:
        tested = order(spec(equal_blocks(n, 1000, 16), 1), 0, n)
        for start in (0, n // 2, n - 1000):
            positions = np.arange(start, start + 1000)
            assert np.array_equal(tested.position_of(tested.at(positions)), positions)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_blocks_come_in_a_new_order_each_epoch_and_so_do_samples() -> None:
    blocks, n = equal_blocks(40_000, 100, 4), 40_000
    first, second = (order(spec(blocks), epoch, n).at(np.arange(n)) for epoch in (0, 1))
    windows = [ids.reshape(-1, 400) // 100 for ids in (first, second)]
    assert [len(set(map(tuple, map(np.unique, each)))) for each in windows] == [100, 100]
    together = [{frozenset(np.unique(row).tolist()) for row in each} for each in windows]
    assert len(together[0] & together[1]) == 0


def test_inside_a_window_the_order_is_uniform() -> None:
    """Of 4 blocks of 8, over 2,000 epochs: how often each block's sample stands at each of 32 places."""
    blocks, rounds = equal_blocks(32, 8, 4), 2000
    table = np.zeros((32, 32), dtype=np.int64)
    for epoch in range(rounds):
        table[np.arange(32), order(spec(blocks), epoch, 32).at(np.arange(32))] += 1
    degrees = 31**2
    chi_square = float(((table - rounds / 32) ** 2).sum() / (rounds / 32))
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)


def test_which_blocks_share_a_window_is_uniform() -> None:
    """Of 20 blocks in windows of 4, block 0 meets each other one with chance 3 / 19: chi-square over 3,000 epochs."""
    blocks, rounds = equal_blocks(200, 10, 4), 3000
    met = np.zeros(20, dtype=np.int64)
    for epoch in range(rounds):
        rows = (order(spec(blocks), epoch, 200).at(np.arange(200)) // 10).reshape(5, 40)
        window = next(row for row in rows if (row == 0).any())
        met[np.unique(window)] += 1
    assert met[0] == rounds
    expected = rounds * 3 / 19
    # the 19 counts sum to 3 per round; given that, chi-square is scaled by the variance of a hypergeometric draw
    chi_square = float(((met[1:] - expected) ** 2).sum() / (expected * (1 - 3 / 19))) * 18 / 19
    assert abs(chi_square - 18) < 5 * np.sqrt(2 * 18)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: equal_blocks(10, 0, 1), "at least one sample, got block=0"),
        (lambda: equal_blocks(10, 2, 0), "at least one block, got window=0"),
        (lambda: listed_blocks([2, -1], 1), "from 0, got -1"),
    ],
)
def test_what_is_no_block_is_refused(make: "object", message: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=message):
        make()


def test_outside_is_refused() -> None:
    tested = order(spec(equal_blocks(10, 3, 2)), 0, 10)
    for bad in (-1, 10):
        with pytest.raises(IndexError, match=r"\[0, 10\)"):
            tested.at(np.array([bad]))
        with pytest.raises(IndexError, match=r"\[0, 10\)"):
            tested.position_of(np.array([bad]))

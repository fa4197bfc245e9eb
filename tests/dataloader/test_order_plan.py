"""Orders: true permutations, equal to their plain-Python twins, and as random as a uniform shuffle."""

from collections.abc import Callable
from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.hash_format import mix64, mix64_twice
from everstep.dataloader.hash_vector import mix64_array, mix64_twice_array
from everstep.dataloader.order_format import OrderKind, OrderSpec, feistel_once, feistel_shape, ids_between
from everstep.dataloader.order_plan import FeistelOrder, Ids, Order, TableOrder, order

PERMUTED = OrderKind.PERMUTED
EDGES = sorted({n for k in range(1, 17) for n in (2**k - 1, 2**k, 2**k + 1)} | {1, 2, 3})
GOLDEN_SMALL = [0, 4, 1, 8, 6, 2, 7, 3, 5, 9]
GOLDEN_LARGE = [381967335, 605025203, 960841510, 261663874, 597297481]
LARGE_EDGES = [2**k + d for k in range(17, 21) for d in (-1, 0, 1)]


def spec(seed: int = 0) -> OrderSpec:
    return OrderSpec(kind=PERMUTED, seed=seed)


def assert_bijection(tested: Order, n: int) -> None:
    everything = np.arange(n, dtype=np.int64)
    ids = tested.at(everything)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), everything)
    assert np.array_equal(tested.position_of(ids), everything)


def test_every_small_n_is_a_permutation_in_both_constructions() -> None:
    for n in range(1, 301):
        assert_bijection(TableOrder(3, n, n), n)
        assert_bijection(FeistelOrder(3, n, n), n)


@pytest.mark.parametrize("n", EDGES)
def test_powers_of_two_and_their_neighbours_are_permutations(n: int) -> None:
    assert_bijection(FeistelOrder(1, 2, n), n)
    assert_bijection(order(spec(1), 2, n), n)


@pytest.mark.slow
@pytest.mark.parametrize("n", LARGE_EDGES)
def test_larger_powers_of_two_and_their_neighbours_are_permutations(n: int) -> None:
    assert_bijection(order(spec(1), 2, n), n)


@pytest.mark.slow
def test_every_n_up_to_5000_is_a_permutation() -> None:
    for n in range(301, 5001):
        assert_bijection(FeistelOrder(0, 0, n), n)


def test_no_samples_is_an_empty_order() -> None:
    assert order(spec(), 0, 0).at(np.arange(0)).size == 0
    assert list(ids_between(spec(), 0, 0, (0, 10))) == []


@given(n=st.integers(1, 2**62), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6), data=st.data())
def test_inverse_holds_at_any_size(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    tested = order(spec(seed), epoch, n)
    ids = tested.at(positions)
    assert ((ids >= 0) & (ids < n)).all()
    assert np.array_equal(tested.position_of(ids), positions)


@pytest.mark.parametrize("kind", list(OrderKind))
@pytest.mark.parametrize("n", [1, 2, 1000, 65536, 65537, 10**12])
def test_plain_python_gives_the_same_order(kind: OrderKind, n: int) -> None:
    both = OrderSpec(kind=kind, seed=17)
    span = (n // 2, min(n, n // 2 + 50))
    assert list(ids_between(both, 5, n, span)) == order(both, 5, n).at(np.arange(*span)).tolist()


@given(value=st.integers(0, 2**64 - 1), key_1=st.integers(0, 2**64 - 1), key_2=st.integers(0, 2**64 - 1))
def test_plain_python_mixes_the_same(value: int, key_1: int, key_2: int) -> None:
    array = np.array([value], dtype=np.uint64)
    assert int(mix64_array(array)[0]) == mix64(value)
    assert int(mix64_twice_array(array, key_1, key_2)[0]) == mix64_twice(value, key_1, key_2)


def test_orders_are_part_of_the_format() -> None:
    """These numbers are in users' checkpoints: a change is a new `algo`, never an edit here."""
    assert order(spec(42), 3, 10).at(np.arange(10)).tolist() == GOLDEN_SMALL
    assert order(spec(42), 3, 10**9).at(np.arange(5)).tolist() == GOLDEN_LARGE


def test_neighbouring_seeds_and_epochs_share_nothing() -> None:
    n = 5000
    seen = [order(spec(seed), epoch, n).at(np.arange(n)) for seed in range(4) for epoch in range(4)]
    for i, left in enumerate(seen):
        for right in seen[:i]:
            assert np.count_nonzero(left == right) < 12  # uniform: Poisson with mean 1


@pytest.mark.parametrize("tested", [TableOrder(0, 0, 10), FeistelOrder(0, 0, 10), order(spec(), 0, 10)])
@pytest.mark.parametrize("bad", [-1, 10])
def test_outside_is_refused(tested: Order, bad: int) -> None:
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        tested.at(np.array([bad]))
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        tested.position_of(np.array([bad]))


def test_feistel_is_a_permutation_of_its_whole_domain() -> None:
    shape = feistel_shape(9, 9, 100)
    assert sorted(feistel_once(shape, value) for value in range(128)) == list(range(128))


# -- quality: the same statistics for our orders and for numpy's uniform shuffle ------------------------------------


def z_score(observed: npt.NDArray[np.int64], degrees: int) -> float:
    """Chi-square of equal expectations as a standard normal number (Wilson and Hilferty 1931)."""
    expected = observed.sum() / observed.size
    chi_square = float(((observed - expected) ** 2).sum() / expected)
    spread = 2 / (9 * degrees)
    return float(((chi_square / degrees) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


def position_table(draw: Callable[[int], Ids], n: int, bins: int, rounds: int) -> npt.NDArray[np.int64]:
    table = np.zeros((bins, bins), dtype=np.int64)
    rows = np.arange(n) * bins // n
    for index in range(rounds):
        np.add.at(table, (rows, draw(index) * bins // n), 1)
    return table


def step_table(draw: Callable[[int], Ids], n: int, bins: int, rounds: int) -> npt.NDArray[np.int64]:
    """Distances between neighbours in the order, modulo n: uniform over 1 … n - 1."""
    table = np.zeros(bins, dtype=np.int64)
    for index in range(rounds):
        steps = np.diff(draw(index)) % n - 1
        table += np.bincount(steps * bins // (n - 1), minlength=bins)
    return table


def uniform(n: int) -> Callable[[int], Ids]:
    return lambda index: np.random.default_rng(index).permutation(n)


def by_seed(n: int) -> Callable[[int], Ids]:
    return lambda index: order(spec(index), 0, n).at(np.arange(n))


def by_epoch(n: int) -> Callable[[int], Ids]:
    return lambda index: order(spec(7), index, n).at(np.arange(n))


@pytest.mark.parametrize("source", [uniform, by_seed, by_epoch])
@pytest.mark.parametrize("n", [3, 5, 16, 52])
def test_small_orders_are_uniform(source: Callable[[int], Callable[[int], Ids]], n: int) -> None:
    rounds = 2500
    assert abs(z_score(position_table(source(n), n, n, rounds), (n - 1) ** 2)) < 5
    assert abs(z_score(step_table(source(n), n, n - 1, rounds), n - 2)) < 5


@pytest.mark.parametrize("source", [uniform, by_seed, by_epoch])
@pytest.mark.parametrize("n", [65537, 100_000])
def test_large_orders_are_uniform(source: Callable[[int], Callable[[int], Ids]], n: int) -> None:
    rounds, bins = 6, 32
    assert abs(z_score(position_table(source(n), n, bins, rounds), (bins - 1) ** 2)) < 5
    assert abs(z_score(step_table(source(n), n, 101, rounds), 100)) < 5


@pytest.mark.parametrize("source", [uniform, by_seed, by_epoch])
def test_all_permutations_of_four_are_equally_likely(source: Callable[[int], Callable[[int], Ids]]) -> None:
    index_of = {each: index for index, each in enumerate(permutations(range(4)))}
    counts = np.zeros(24, dtype=np.int64)
    for index in range(4800):
        counts[index_of[tuple(source(4)(index).tolist())]] += 1
    assert abs(z_score(counts, 23)) < 5

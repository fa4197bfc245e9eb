"""Orders: true permutations, equal to their plain-Python twins, and as random as a uniform shuffle."""

import tracemalloc
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
        everything = np.arange(n)
        for tested in (order(spec(), 0, n), FeistelOrder(0, 0, n)):
            assert np.array_equal(np.bincount(tested.at(everything), minlength=n), np.ones(n)), n


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


@pytest.mark.parametrize("kind", [OrderKind.PERMUTED, OrderKind.SEQUENTIAL, OrderKind.CONTINUED])
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


# -- five more statistics, each against its exact mean and variance under uniform permutations -----------------------


def fixed_points(ids: Ids) -> int:
    """Mean 1, variance 1 for n >= 2."""
    return int(np.count_nonzero(ids == np.arange(ids.size)))


def descents(ids: Ids) -> int:
    """Places where the next id is smaller: mean (n - 1) / 2, variance (n + 1) / 12."""
    return int(np.count_nonzero(ids[1:] < ids[:-1]))


def inversions(ids: Ids) -> int:
    """Pairs in the wrong order: mean n (n - 1) / 4, variance n (n - 1) (2 n + 5) / 72."""
    later = ids[None, :] < ids[:, None]
    return int(np.count_nonzero(np.triu(later, 1)))


def cycles(ids: Ids) -> int:
    """Cycles of the permutation: mean H_n, variance H_n minus the sum of 1 / k^2."""
    seen, count, table = [False] * ids.size, 0, ids.tolist()
    for start in range(ids.size):
        if not seen[start]:
            count, at = count + 1, start
            while not seen[at]:
                seen[at], at = True, table[at]
    return count


def rank_products(ids: Ids) -> int:
    """The sum of p * id(p): mean n (n - 1)^2 / 4, variance n^2 (n - 1) (n + 1)^2 / 144 (Spearman's rho, unscaled)."""
    return int((np.arange(ids.size) * ids).sum())


def moments(statistic: Callable[[Ids], int], n: int) -> tuple[float, float]:
    harmonic = sum(1 / k for k in range(1, n + 1))
    by_name: dict[str, tuple[float, float]] = {
        "fixed_points": (1.0, 1.0),
        "descents": ((n - 1) / 2, (n + 1) / 12),
        "inversions": (n * (n - 1) / 4, n * (n - 1) * (2 * n + 5) / 72),
        "cycles": (harmonic, harmonic - sum(1 / k**2 for k in range(1, n + 1))),
        "rank_products": (n * (n - 1) ** 2 / 4, n**2 * (n - 1) * (n + 1) ** 2 / 144),
    }
    return by_name[statistic.__name__]


STATISTICS = [fixed_points, descents, inversions, cycles, rank_products]


def feistel(n: int) -> Callable[[int], Ids]:
    return lambda index: FeistelOrder(index, 0, n).at(np.arange(n))


def between_epochs(n: int) -> Callable[[int], Ids]:
    """Where the samples of one epoch stand in the next one."""
    return lambda index: order(spec(5), index + 1, n).position_of(order(spec(5), index, n).at(np.arange(n)))


@pytest.mark.parametrize("source", [uniform, by_seed, by_epoch, between_epochs, feistel])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_statistics_have_the_mean_of_uniform_permutations(
    source: Callable[[int], Callable[[int], Ids]], statistic: Callable[[Ids], int]
) -> None:
    """The mean of 400 draws lies within 5 standard errors: by chance 1 test in 1.7 million would not.

    The Feistel network is looked at well below the size where it is used.
    """
    n, rounds = 300, 400
    mean, variance = moments(statistic, n)
    found = np.array([statistic(source(n)(index)) for index in range(rounds)], dtype=np.float64)
    assert abs(found.mean() - mean) < 5 * np.sqrt(variance / rounds)


@pytest.mark.parametrize("statistic", [fixed_points, descents, rank_products])
def test_statistics_of_large_orders(statistic: Callable[[Ids], int]) -> None:
    n, rounds = 100_003, 20
    mean, variance = moments(statistic, n)
    found = np.array([statistic(by_epoch(n)(index)) for index in range(rounds)], dtype=np.float64)
    assert abs(found.mean() - mean) < 5 * np.sqrt(variance / rounds)


def test_the_statistics_tell_poor_shuffles() -> None:
    """A rotation, and a permutation of tens that keeps the order inside: each fails where it must."""
    n = 300
    rotated = (np.arange(n) + 17) % n
    tens = (np.random.default_rng(0).permutation(n // 10)[:, None] * 10 + np.arange(10)).ravel()
    for poor in (rotated, tens):
        mean, variance = moments(descents, n)
        assert abs(descents(poor) - mean) > 5 * np.sqrt(variance)


def test_ten_billion_samples_cost_nothing() -> None:
    """Ids from the begin, the middle and the end, and back, within half a megabyte."""
    n = 10**10
    tracemalloc.start()
    try:
        tested = order(spec(1), 2, n)
        for start in (0, n // 2, n - 1000):
            positions = np.arange(start, start + 1000)
            assert np.array_equal(tested.position_of(tested.at(positions)), positions)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()

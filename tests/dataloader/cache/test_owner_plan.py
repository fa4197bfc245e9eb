"""Who owns a sample: balanced, the same on every node, and little moves when a member comes or goes."""

import collections
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.cache.owner_plan import Owners, members_digest, members_of
from everstep.dataloader.cache.placement import AmongNodes, ThisNode, placement

NAMES = st.lists(
    st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=12),
    min_size=1,
    max_size=9,
    unique=True,
)
SAMPLES = st.integers(0, 2**48 - 1)


@given(NAMES, st.text(min_size=1, max_size=20), st.lists(SAMPLES, min_size=1, max_size=50), st.randoms())
def test_every_node_gives_the_same_answer(
    names: list[str], fingerprint: str, samples: list[int], random: object
) -> None:
    """In whatever order it learnt of the members, in Python (daemon) and in numpy (reader)."""
    shuffled = list(names)
    random.shuffle(shuffled)  # pyright: ignore[reportAttributeAccessIssue]
    owners = Owners(fingerprint, members_of(names))
    assert owners == Owners(fingerprint, members_of(shuffled * 2))
    found = [owners.owner(each) for each in samples]
    assert set(found) <= set(names)
    for me in [*names, ""]:
        place = AmongNodes(fingerprint, shuffled, me)
        assert [place.owner(each) or me for each in samples] == found
        assert place.elsewhere(samples) == [
            each for each, owner in zip(samples, found, strict=True) if owner != me
        ]


@given(NAMES.filter(lambda names: len(names) > 1), st.lists(SAMPLES, min_size=1, max_size=200))
def test_only_the_samples_of_who_leaves_move(names: list[str], samples: list[int]) -> None:
    """Read the other way round: who joins takes samples, and nobody else gets any."""
    leaver, *rest = names
    before, after = Owners("f", members_of(names)), Owners("f", members_of(rest))
    for sample in samples:
        assert before.owner(sample) in (leaver, after.owner(sample))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_samples_are_shared_out_evenly(count: int) -> None:
    """Of consecutive numbers and of strided ones, within 4 standard deviations of a fair draw."""
    names = [f"node{each}:7077" for each in range(count)]
    for samples in (range(20_000), range(0, 20_000 * 4096, 4096), range(10**9, 10**9 + 20_000)):
        owners = Owners("images", members_of(names))
        shares = collections.Counter(map(owners.owner, samples))
        expected = 20_000 / count
        deviation = (20_000 * (1 / count) * (1 - 1 / count)) ** 0.5
        assert set(shares) == set(names)
        assert max(abs(each - expected) for each in shares.values()) < 4 * deviation, shares


def test_datasets_are_shared_out_differently() -> None:
    names = members_of(["a", "b"])
    first, second = Owners("one", names), Owners("two", names)
    same = sum(first.owner(each) == second.owner(each) for each in range(10_000))
    assert 4800 < same < 5200


def test_nothing_grows_with_the_dataset() -> None:
    owners = Owners("f", members_of(f"node{each}" for each in range(100)))
    size = sum(map(sys.getsizeof, (owners.members, owners.keys, *owners.members, *owners.keys)))
    assert size < 20_000
    place = AmongNodes("f", owners.members, "node1")
    last = [10**9 - 1, 10**12]
    assert place.elsewhere(last) == [each for each in last if place.owner(each) is not None]


def test_a_node_alone_owns_all() -> None:
    for members, me in (((), ""), (("a",), "a"), ((), "a")):
        assert isinstance(placement("f", members, me), ThisNode)
    assert isinstance(placement("f", ["a"], "b"), AmongNodes)
    assert ThisNode().elsewhere([1, 2]) == []
    assert ThisNode().owner(5) is None
    assert members_digest(["a", "b"]) != members_digest(["ab"])

"""What an epoch left out, by name: with the ids that came it is the dataset."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import LoaderStateError
from everstep.dataloader.block_format import listed_blocks
from everstep.dataloader.holes_format import united
from everstep.dataloader.ledger_format import LedgerRecord, Tally
from everstep.dataloader.left_out_format import EPOCHS_MAX, NAMED_MAX, LeftOut, Named, find_left_out
from everstep.dataloader.order_format import OrderKind, OrderSpec, ids_between
from everstep.dataloader.state_format import LoaderState

PERMUTED = OrderSpec(kind=OrderKind.PERMUTED, seed=5)


def left_out(
    tallies: dict[int, Tally], n: int = 60, spec: OrderSpec = PERMUTED, epoch: int = 1
) -> list[LeftOut]:
    source = None if spec.kind.is_numbered else {"x": 1}
    state = LoaderState(fingerprint="d", sample_count=n, order=spec, epoch=epoch, source=source)
    return find_left_out([LedgerRecord(5, tallies).to_dict()], state.to_dict())


@given(
    spans=st.lists(st.tuples(st.integers(0, 59), st.integers(1, 20)).map(lambda s: (s[0], min(60, sum(s))))),
    dropped=st.integers(0, 7),
    data=st.data(),
)
def test_named_and_handed_out_are_the_dataset(
    spans: list[tuple[int, int]], dropped: int, data: st.DataObject
) -> None:
    holes = united(spans).between(0, 60 - dropped)
    handed = [
        each
        for position, each in enumerate(ids_between(PERMUTED, 0, 60, (0, 60)))
        if position < 60 - dropped and not any(start <= position < stop for start, stop in holes)
    ]
    quarantined = data.draw(st.lists(st.sampled_from(handed), unique=True, max_size=3)) if handed else []
    tally = Tally(0, (0, 0), 0, dropped, holes, tuple(sorted(quarantined)))
    found = left_out({0: tally})
    named = [
        each
        for entry in found
        for part in (entry.quarantined, entry.skipped, entry.dropped)
        for each in part.ids
    ]
    assert sorted(named + [each for each in handed if each not in quarantined]) == list(range(60))
    assert bool(found) == bool(named)
    assert sum(p.count for e in found for p in (e.quarantined, e.skipped, e.dropped)) == len(named)


def test_many_are_counted_and_the_first_are_named() -> None:
    n = 10**12
    (entry,) = left_out({0: Tally(0, (0, 0), 0, 0, ((5, n - 5),))}, n=n)
    assert entry.skipped.count == n - 10
    assert entry.skipped.ids == tuple(ids_between(PERMUTED, 0, n, (5, 5 + NAMED_MAX)))
    assert f"… {n - 10} in all skipped, positions [5, {n - 5})" in entry.sentences()[0]
    tallies = {epoch: Tally(padding_count=1) for epoch in range(EPOCHS_MAX + 5)}
    assert [each.epoch for each in left_out(tallies)] == list(range(5, EPOCHS_MAX + 5))


def test_sentences() -> None:
    entry = LeftOut(
        epoch=3,
        quarantined=Named(count=2, ids=(4, 9)),
        skipped=Named(count=3),
        skipped_positions=((1, 3), (7, 8)),
        dropped=Named(count=1, ids=(5,)),
        padding_count=2,
    )
    assert entry.sentences() == [
        "epoch 3: less samples 4, 9 quarantined",
        "epoch 3: less 3 samples skipped, positions [1, 3), [7, 8)",
        "epoch 3: less sample 5 dropped at the end",
        "epoch 3: 2 repeated with weight 0",
    ]
    assert entry.is_less
    assert not LeftOut(epoch=1, padding_count=1).is_less


@pytest.mark.parametrize(
    "spec",
    [
        OrderSpec(kind=OrderKind.SAMPLER, seed=5),
        OrderSpec(kind=OrderKind.BLOCKS, seed=5, blocks=listed_blocks([1, 2] * 20, 3)),
    ],
)
def test_where_the_order_is_not_known_positions_are_counted(spec: OrderSpec) -> None:
    (entry,) = left_out({0: Tally(0, (0, 0), 0, 2, (), (8,))}, spec=spec)
    assert (entry.quarantined, entry.dropped) == (Named(count=1, ids=(8,)), Named(count=2))


def test_seeds_that_differ_are_refused() -> None:
    state = LoaderState(fingerprint="d", sample_count=9, order=PERMUTED).to_dict()
    with pytest.raises(LoaderStateError, match="under seed 6"):
        find_left_out([LedgerRecord(6, {0: Tally(padding_count=1)}).to_dict()], state)

"""What `everstep verify --ledger` says of loaders whose ledgers cannot prove everything; test_cli.py has the rest."""

from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from everstep.daemon.cli import render
from everstep.daemon.control.ledger_check import check_loaders
from everstep.daemon.control.views import CheckpointView, LoaderRecord
from everstep.dataloader.block_format import listed_blocks
from everstep.dataloader.ledger_format import LedgerRecord, Tally, sum_ids
from everstep.dataloader.order_format import OrderKind, OrderSpec, ids_between
from everstep.dataloader.state_format import LoaderState

TWO_RANKS = cast(CheckpointView, SimpleNamespace(world_size=2))
SIZES = [1, 2] * 10


def state_of(spec: OrderSpec, cursor: int, source: dict[str, object] | None = None) -> dict[str, object]:
    return LoaderState(
        fingerprint="d", sample_count=30, order=spec, epoch=0, cursor=cursor, source=source
    ).to_dict()


def records(states: list[dict[str, object]], ids: list[int], epoch: int = 0) -> list[LoaderRecord]:
    """The ids shared by two ranks."""
    ledgers = [
        LedgerRecord(5, {epoch: Tally(len(own), sum_ids(5, epoch, own))}) for own in (ids[::2], ids[1::2])
    ]
    return [
        LoaderRecord(rank=rank, place="loader", ledger=ledger.to_dict(), state=state)
        for rank, (ledger, state) in enumerate(zip(ledgers, states, strict=True))
    ]


def drawn(found: list[LoaderRecord]) -> str:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        for verdict in check_loaders(TWO_RANKS, found):
            render._ledger(console, verdict)
    return captured.get()


@pytest.mark.parametrize("kind", [OrderKind.SAMPLER, OrderKind.STREAM])
def test_a_users_own_order_is_not_proven_and_its_states_may_differ(kind: OrderKind) -> None:
    states = [state_of(OrderSpec(kind=kind, seed=5), 9 + rank, {"rank": rank}) for rank in range(2)]
    (verdict,) = check_loaders(TWO_RANKS, records(states, [1, 2, 3]))
    assert (verdict.problems, verdict.is_proven) == ((), False)
    assert verdict.position == "epoch 0, 9 samples of rank 0"
    text = drawn(records(states, [1, 2, 3]))
    assert "not proven" in text
    assert f"order '{kind.value}' is the user's own" in text


def test_many_block_sizes_prove_counts_and_finished_epochs() -> None:
    spec = OrderSpec(kind=OrderKind.BLOCKS, seed=5, blocks=listed_blocks(SIZES, 3))
    ids = list(ids_between(spec, 0, 30, (0, 12)))
    (running,) = check_loaders(TWO_RANKS, records([state_of(spec, 12)] * 2, ids))
    assert (running.problems, running.is_proven) == ((), False)
    assert "no room for the sizes of 20 blocks" in running.unproven
    (short,) = check_loaders(TWO_RANKS, records([state_of(spec, 12)] * 2, ids[:-1]))
    assert short.problems == ("epoch 0: 12 samples should have been handed out, the ledger counts 11",)
    (whole,) = check_loaders(TWO_RANKS, records([state_of(spec, 30)] * 2, [0, *range(29)]))
    assert "some were lost and others handed out twice" in whole.problems[0]


def test_few_block_sizes_prove_everything() -> None:
    spec = OrderSpec(kind=OrderKind.BLOCKS, seed=5, blocks=listed_blocks([4] * 7 + [2], 3))
    ids = list(ids_between(spec, 0, 30, (0, 12)))
    assert "each sample exactly once" in drawn(records([state_of(spec, 12)] * 2, ids))
    (wrong,) = check_loaders(TWO_RANKS, records([state_of(spec, 12)] * 2, list(range(12))))
    assert "some were lost and others handed out twice" in wrong.problems[0]


def test_ranks_that_stand_apart_are_found() -> None:
    spec = OrderSpec(kind=OrderKind.PERMUTED, seed=5)
    (verdict,) = check_loaders(TWO_RANKS, records([state_of(spec, 4), state_of(spec, 6)], [1, 2, 3, 4]))
    assert verdict.problems == ("the ranks' loaders do not stand at the same position",)

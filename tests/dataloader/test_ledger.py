"""Ledgers: equal with and without numpy, additive over ranks, and blind to nothing that matters."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import LoaderStateError
from everstep.dataloader.ledger import Ledger, VectorClosedForms, sum_id_array
from everstep.dataloader.ledger_format import (
    LedgerRecord,
    PlainClosedForms,
    Tally,
    ledger_problems,
    parse_ledger,
    sum_ids,
)
from everstep.dataloader.order_format import OrderKind, OrderSpec
from everstep.dataloader.order_plan import order
from everstep.dataloader.state_format import LoaderState

SPEC = OrderSpec(kind=OrderKind.PERMUTED, seed=11)
ids_lists = st.lists(st.integers(0, 2**62), max_size=50)


def state(n: int, epoch: int, cursor: int) -> dict[str, object]:
    return LoaderState(fingerprint="d", sample_count=n, order=SPEC, epoch=epoch, cursor=cursor).to_dict()


def ids(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def ledgers_of(n: int, epoch: int, cursor: int, rank_count: int) -> list[Ledger]:
    """What ranks that took turns sample by sample would hold at (epoch, cursor)."""
    ledgers = [Ledger(11) for _ in range(rank_count)]
    for past in range(epoch + 1):
        stream = order(SPEC, past, n).at(np.arange(cursor if past == epoch else n))
        for rank, ledger in enumerate(ledgers):
            ledger.add(past, stream[rank::rank_count])
    return ledgers


def both_verdicts(ledgers: list[Ledger], loader_state: dict[str, object]) -> list[str]:
    """The verdict of the command line's path, which must equal the one over arrays."""
    plain = ledger_problems([json.loads(json.dumps(ledger.state())) for ledger in ledgers], loader_state)
    assert Ledger.verify(ledgers, loader_state) == plain
    return plain


@given(values=ids_lists, seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**9))
def test_vectors_sum_as_plain_python(values: list[int], seed: int, epoch: int) -> None:
    assert sum_id_array(seed, epoch, ids(values)) == sum_ids(seed, epoch, values)


@pytest.mark.parametrize("n", [1, 1000, 70_000])
def test_closed_forms_agree(n: int) -> None:
    plain, vector, span = PlainClosedForms(), VectorClosedForms(), (n // 3, n // 3 + min(n, 500))
    assert plain.whole(11, 2, n) == vector.whole(11, 2, n)
    assert plain.between(SPEC, 2, n, (span[0], min(n, span[1]))) == vector.between(
        SPEC, 2, n, (span[0], min(n, span[1]))
    )


@given(batches=st.lists(st.tuples(st.integers(0, 3), ids_lists, st.integers(0, 2))), where=st.integers(0, 20))
def test_tallies_do_not_depend_on_batches_ranks_or_saving(
    batches: list[tuple[int, list[int], int]], where: int
) -> None:
    whole, left, right = Ledger(5), Ledger(5), Ledger(5)
    for index, (epoch, values, padding) in enumerate(batches):
        whole.add(epoch, ids(values), padding)
        if index == where:
            left = Ledger.from_state(json.loads(json.dumps(left.state())))
        (left if index % 2 else right).add(epoch, ids(values), padding)
    left.merge(right)
    assert left.state() == whole.state()
    for epoch in range(4):
        expected = [each for each in batches if each[0] == epoch]
        assert whole.tally(epoch).count == sum(len(values) for _, values, _ in expected)
        assert whole.tally(epoch).padding_count == sum(padding for _, _, padding in expected)


@given(
    n=st.integers(0, 60),
    epoch=st.integers(0, 3),
    rank_count=st.integers(1, 4),
    share=st.floats(0, 1, allow_nan=False),
)
def test_exactly_once_verifies(n: int, epoch: int, rank_count: int, share: float) -> None:
    cursor = int(share * n)
    assert both_verdicts(ledgers_of(n, epoch, cursor, rank_count), state(n, epoch, cursor)) == []


@pytest.mark.parametrize("cursor", [30, 90])
def test_one_sample_lost_repeated_or_exchanged_is_found(cursor: int) -> None:
    stream = order(SPEC, 0, 100).at(np.arange(100))
    given_out = stream[:cursor]
    for wrong, expected in [
        (given_out[:-1], "the ledger counts"),
        (np.append(given_out, stream[0]), "the ledger counts"),
        (np.append(given_out[:-1], stream[0]), "lost and others handed out twice"),
        (np.append(given_out[:-1], stream[cursor]), "lost and others handed out twice"),
    ]:
        ledger = Ledger(11)
        ledger.add(0, wrong)
        (problem,) = both_verdicts([ledger], state(100, 0, cursor))
        assert expected in problem


def test_a_lost_epoch_and_one_from_the_future_are_found() -> None:
    ledger = Ledger(11)
    ledger.add(0, order(SPEC, 0, 10).at(np.arange(10)))
    ledger.add(5, ids([1]))
    problems = both_verdicts([ledger], state(10, 2, 0))
    assert len(problems) == 2
    assert "epoch 5 is ahead" in problems[0]
    assert "epoch 1: 10 samples" in problems[1]


def test_the_ledger_of_one_rank_alone_is_not_enough() -> None:
    assert both_verdicts(ledgers_of(20, 1, 10, 2)[:1], state(20, 1, 10)) != []


def test_declared_drops_are_subtracted_and_undeclared_ones_found() -> None:
    stream = order(SPEC, 0, 10).at(np.arange(8))
    honest, silent = Ledger(11), Ledger(11)
    honest.add(0, stream)
    honest.finish(0, 2)
    silent.add(0, stream)
    assert both_verdicts([honest], state(10, 1, 0)) == []
    assert both_verdicts([silent], state(10, 1, 0)) != []


def test_quarantined_samples_are_listed_and_any_other_loss_is_found() -> None:
    """Two ranks, one of which left out sample 7; through JSON and merged, as at a restore."""
    stream = order(SPEC, 0, 20).at(np.arange(20))
    ledgers = [Ledger(11), Ledger(11)]
    ledgers[0].add(0, stream[:10][stream[:10] != 7], quarantined=(7,) if 7 in stream[:10] else ())
    ledgers[1].add(0, stream[10:][stream[10:] != 7], quarantined=(7,) if 7 in stream[10:] else ())
    assert both_verdicts(ledgers, state(20, 1, 0)) == []
    merged = Ledger.from_state(json.loads(json.dumps(ledgers[0].state())))
    merged.merge(ledgers[1])
    assert merged.tally(0).quarantined == (7,)
    assert both_verdicts([merged], state(20, 1, 0)) == []
    merged.add(0, ids([]), quarantined=(8,))
    assert "beside 2 quarantined ones, the ledger counts 19" in both_verdicts([merged], state(20, 1, 0))[0]


@pytest.mark.parametrize("bad", ["7", 7, [-1], [1.5], [True], {"a": 1}])
def test_a_list_of_quarantined_samples_is_checked(bad: object) -> None:
    entry = {"epoch": 0, "count": 0, "sum": "0" * 32, "padding": 0, "dropped": 0, "quarantined": bad}
    with pytest.raises(LoaderStateError, match="quarantined of a ledger"):
        parse_ledger({"format": "everstep-ledger/1", "seed": 1, "epochs": [entry]})


def test_drops_are_said_by_every_rank_about_the_whole_epoch() -> None:
    assert (Tally(3, (1, 2), 4, 5) + Tally(3, (2**64 - 1, 1), 1, 5)) == Tally(6, (0, 3), 5, 5)


def test_many_problems_are_cut_short() -> None:
    problems = both_verdicts([Ledger(11)], state(1, 2**62, 0))
    assert len(problems) == 101


def test_other_seeds_are_refused() -> None:
    other = Ledger(12)
    other.add(0, ids([1]))
    with pytest.raises(LoaderStateError, match="under seed 12, expected seed 11"):
        ledger_problems([other.state()], state(10, 0, 1))
    with pytest.raises(LoaderStateError, match="seed 12"):
        Ledger(11).merge(other)


GOLDEN = {
    "format": "everstep-ledger/1",
    "seed": 42,
    "epochs": [
        {"epoch": 3, "count": 3, "sum": "4ff75f811e4fa6cc77baaded837a4bdc", "padding": 1, "dropped": 0},
    ],
}
GOOD: dict[str, object] = {"epoch": 0, "count": 1, "sum": "0" * 32, "padding": 0, "dropped": 0}


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        {"format": "everstep-ledger/2", "seed": 1, "epochs": []},
        {"format": "everstep-ledger/1", "seed": -1, "epochs": []},
        {"format": "everstep-ledger/1", "seed": 1, "epochs": "x"},
        {"format": "everstep-ledger/1", "seed": 1, "epochs": [GOOD, GOOD]},
        *(
            {"format": "everstep-ledger/1", "seed": 1, "epochs": [{**GOOD, key: value}]}
            for key, value in [
                ("count", True),
                ("epoch", -1),
                ("sum", "0" * 31),
                ("sum", "G" * 32),
                ("dropped", None),
            ]
        ),
    ],
)
def test_garbage_is_refused(bad: object) -> None:
    with pytest.raises(LoaderStateError):
        parse_ledger(bad)


def test_form_on_disk() -> None:
    """These numbers are in users' checkpoints."""
    ledger = Ledger(42)
    ledger.add(3, ids([0, 1, 2]), 1)
    assert ledger.state() == GOLDEN
    assert parse_ledger(GOLDEN) == LedgerRecord(42, {3: ledger.tally(3)})


def test_the_command_lines_path_imports_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, everstep.dataloader.ledger_format, everstep.dataloader.state_format;"
        "print(sorted({'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Splits: every position exactly once, whatever the ranks, also when their number changes in mid-epoch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.split_plan import Part, Split, Uneven

sizes = st.integers(1, 9)
counts = st.integers(0, 200)


def step(
    count: int, batch: int, world: int, cursor: int, uneven: Uneven = Uneven.WEIGHT
) -> list[Part | None]:
    return [
        Split(sample_count=count, batch_size=batch, rank=rank, world_size=world, uneven=uneven).part(cursor)
        for rank in range(world)
    ]


def taken(parts: list[Part]) -> list[int]:
    """The positions of one step in the order of the ranks, less padding; checks what holds at every step."""
    assert len({(part.cursor, part.next_cursor) for part in parts}) == 1
    sizes_ = [0 if part.is_padding else part.stop - part.start for part in parts]
    assert max(sizes_) - min(sizes_) <= 1
    total = sum(sizes_)
    assert parts[0].next_cursor - parts[0].cursor == total
    for part, size in zip(parts, sizes_, strict=True):
        assert part.weight == pytest.approx(len(parts) * size / total)
        assert part.is_padding == (size == 0)
    return [p for part in parts if not part.is_padding for p in range(part.start, part.stop)]


@given(
    count=counts,
    batch=sizes,
    plan=st.lists(st.tuples(sizes, st.integers(1, 5)), min_size=1, max_size=6),
    uneven=st.sampled_from([Uneven.WEIGHT, Uneven.STEP]),
)
def test_every_position_once_at_any_and_changing_number_of_ranks(
    count: int, batch: int, plan: list[tuple[int, int]], uneven: Uneven
) -> None:
    """`plan`: (world size, steps until the job is killed and resumed at the next world size)."""
    cursor, seen = 0, list[int]()
    for world, step_count in [*plan, (3, 10**6)]:
        for _ in range(step_count):
            parts = step(count, batch, world, cursor, uneven)
            whole = [part for part in parts if part is not None]
            if not whole:
                assert cursor == count
                break
            assert len(whole) == world
            seen += taken(whole)
            cursor = whole[0].next_cursor
    assert seen == list(range(count))


@given(count=counts, batch=sizes, world=sizes, uneven=st.sampled_from(Uneven), drop_last=st.booleans())
def test_step_count_is_the_number_of_steps(
    count: int, batch: int, world: int, uneven: Uneven, drop_last: bool
) -> None:
    split = Split(
        sample_count=count, batch_size=batch, rank=0, world_size=world, uneven=uneven, drop_last=drop_last
    )
    cursors = [0]
    while (part := split.part(cursors[-1])) is not None:
        cursors.append(part.next_cursor)
    assert [split.step_count(cursor) for cursor in cursors] == list(range(len(cursors)))[::-1]


@given(count=counts, batch=sizes, world=sizes)
def test_drop_shares_evenly_and_loses_less_than_one_sample_per_rank(
    count: int, batch: int, world: int
) -> None:
    cursor = 0
    while (parts := step(count, batch, world, cursor, Uneven.DROP))[0] is not None:
        whole = [part for part in parts if part is not None]
        assert {part.stop - part.start for part in whole} == {whole[0].stop - whole[0].start}
        assert {part.weight for part in whole} == {1.0}
        cursor = whole[0].next_cursor
    assert parts == [None] * world
    assert 0 <= count - cursor < world


@given(count=counts, batch=sizes, world=sizes)
def test_step_shares_evenly_and_gives_the_rest_in_one_step_more(count: int, batch: int, world: int) -> None:
    cursor, totals = 0, list[int]()
    while (parts := step(count, batch, world, cursor, Uneven.STEP))[0] is not None:
        whole = [part for part in parts if part is not None]
        assert len({part.stop - part.start for part in whole}) == 1, "batches of one size"
        totals.append(len(taken(whole)))
        cursor = whole[0].next_cursor
    assert cursor == sum(totals) == count
    assert [total for total in totals if total % world] == [count % world] * (count % world > 0)


def test_drop_last_leaves_out_the_whole_short_step() -> None:
    split = Split(sample_count=23, batch_size=3, rank=1, world_size=2, drop_last=True)
    assert split.step_count() == 3
    assert split.part(18) is None


def test_weight_makes_the_mean_of_means_exact() -> None:
    values = [float(v * v) for v in range(11)]
    parts = [part for part in step(11, 4, 3, 0) if part is not None]
    assert [part.stop - part.start for part in parts] == [4, 4, 3]
    means = [sum(values[part.start : part.stop]) / (part.stop - part.start) for part in parts]
    averaged = sum(part.weight * mean for part, mean in zip(parts, means, strict=True)) / 3
    assert averaged == pytest.approx(sum(values) / 11)


def test_more_ranks_than_samples_repeats_with_weight_zero() -> None:
    parts = [part for part in step(2, 4, 5, 0) if part is not None]
    assert [part.is_padding for part in parts] == [False, False, True, True, True]
    assert [part.weight for part in parts] == [2.5, 2.5, 0, 0, 0]
    assert all(0 <= part.start < part.stop <= 2 for part in parts)


@pytest.mark.parametrize(("count", "rest"), [(24, 0), (22, 0), (23, 5), (25, 1)])
def test_uneven_rest_is_what_cannot_be_shared(count: int, rest: int) -> None:
    assert Split(sample_count=count, batch_size=3, rank=0, world_size=2).uneven_rest() == rest


@pytest.mark.parametrize(("rank", "world", "batch"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)])
def test_nonsense_is_refused(rank: int, world: int, batch: int) -> None:
    with pytest.raises(ValueError, match="not a split"):
        Split(sample_count=1, batch_size=batch, rank=rank, world_size=world)

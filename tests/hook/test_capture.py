"""Capture: each byte of memory once, aliases for the rest, the same structure every time."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.leaf import NAME_LENGTH_MAX
from everstep.core.errors import StateTypeError, UsageError
from everstep.hook.capture import StateCapture, capture_state
from everstep.hook.component import Laziness, Sink
from everstep.hook.state_testing import bits, store
from everstep.hook.stored_state import StoredState
from everstep.hook.tensor_bytes import byte_range

EAGER, OWNED, FROZEN = Laziness.EAGER, Laziness.OWNED, Laziness.FROZEN


class Tensors:
    """A component of named tensors."""

    def __init__(self, *tensors: tuple[str, torch.Tensor, Laziness], name: str = "t") -> None:
        self.name = name
        self.tensors = tensors

    checks_bytes = True

    def capture(self, sink: Sink) -> None:
        for name, tensor, laziness in self.tensors:
            sink.leaf(name, tensor, laziness)
        sink.value([name for name, _, _ in self.tensors])

    def check(self, stored: StoredState) -> None:
        for name, _, _ in self.tensors:
            stored.spec(name)

    def apply(self, stored: StoredState) -> None:
        for name, tensor, _ in self.tensors:
            stored.copy_to(name, tensor)


def shape_of(capture: StateCapture) -> tuple[list[tuple[str, Laziness]], list[tuple[str, str, int]]]:
    leaves = [(leaf.spec.name, leaf.laziness) for leaf in capture.leaves]
    return leaves, [(alias.name, alias.of, alias.offset_bytes) for alias in capture.aliases]


def test_leaves_keep_their_order_and_values_their_component() -> None:
    one = Tensors(("b", torch.zeros(2), EAGER), ("a", torch.zeros(3), OWNED))
    two = Tensors(("c", torch.zeros(1), FROZEN), name="u")
    capture = capture_state([one, two])
    assert shape_of(capture) == ([("b", EAGER), ("a", OWNED), ("c", FROZEN)], [])
    assert capture.values == {"t": ["b", "a"], "u": ["c"]}
    assert capture.leaves[0].tensor is one.tensors[0][1]


def test_tied_tensors_are_stored_once_under_the_first_name() -> None:
    tensor = torch.zeros(4)
    capture = capture_state(
        [Tensors(("z", tensor, OWNED), ("a", tensor, OWNED), ("m", tensor.view(2, 2), OWNED))]
    )
    assert shape_of(capture) == ([("a", OWNED)], [("z", "a", 0), ("m", "a", 0)])
    assert capture.aliases[1].shape == (2, 2)


def test_views_of_one_storage_lie_in_the_largest() -> None:
    flat = torch.zeros(10, dtype=torch.float64)
    capture = capture_state(
        [Tensors(("a", flat[2:4], OWNED), ("flat", flat, OWNED), ("b", flat[4:].view(2, 3).t(), OWNED))]
    )
    assert shape_of(capture) == ([("flat", OWNED)], [("a", "flat", 16), ("b", "flat", 32)])
    assert capture.aliases[1].strides == (1, 3)


def test_views_of_another_dtype_are_aliases_too() -> None:
    flat = torch.zeros(4, dtype=torch.float32)
    capture = capture_state([Tensors(("bytes", flat.view(torch.uint8)[4:8], EAGER), ("flat", flat, EAGER))])
    (alias,) = capture.aliases
    assert (alias.of, alias.offset_bytes, alias.dtype) == ("flat", 4, "uint8")


def test_overlapping_tensors_of_which_none_holds_the_other_are_both_stored() -> None:
    flat = torch.arange(10.0)
    component = Tensors(("a", flat[:6], EAGER), ("b", flat[4:], EAGER), ("c", flat[4:6], EAGER))
    capture = capture_state([component])
    assert shape_of(capture) == ([("a", EAGER), ("b", EAGER)], [("c", "b", 0)])
    stored = store([component])
    assert bits(stored.tensor("c")) == bits(flat[4:6])


@pytest.mark.parametrize(
    ("first", "second", "third", "all_three"),
    [(OWNED, OWNED, OWNED, OWNED), (OWNED, OWNED, EAGER, EAGER), (EAGER, FROZEN, FROZEN, EAGER)],
)
def test_overlapping_tensors_wait_no_longer_than_all_of_them_may(
    first: Laziness, second: Laziness, third: Laziness, all_three: Laziness
) -> None:
    """The first and the third have nothing in common, but for the second; what lies apart waits as it may."""
    flat = torch.zeros(12)
    leaves = [
        ("a", flat[:5], first),
        ("b", flat[4:8], second),
        ("c", flat[7:11], third),
        ("d", flat[11:], OWNED),
    ]
    capture = capture_state([Tensors(*leaves)])
    assert shape_of(capture) == ([("a", all_three), ("b", all_three), ("c", all_three), ("d", OWNED)], [])


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (OWNED, OWNED, OWNED),
        (FROZEN, FROZEN, FROZEN),
        (EAGER, OWNED, EAGER),
        (OWNED, EAGER, EAGER),
        (FROZEN, EAGER, EAGER),
        (OWNED, FROZEN, EAGER),
        (EAGER, EAGER, EAGER),
    ],
)
def test_shared_memory_is_as_lazy_as_all_its_leaves_allow(
    one: Laziness, other: Laziness, both: Laziness
) -> None:
    tensor = torch.zeros(4)
    capture = capture_state([Tensors(("a", tensor, one), ("b", tensor[1:], other))])
    assert shape_of(capture)[0] == [("a", both)]


def test_empty_tensors_are_leaves_of_their_own() -> None:
    flat = torch.zeros(4)
    capture = capture_state(
        [Tensors(("a", flat, EAGER), ("b", flat[2:2], EAGER), ("c", torch.zeros(0, 3), EAGER))]
    )
    assert shape_of(capture) == ([("a", EAGER), ("b", EAGER), ("c", EAGER)], [])


def test_a_tensor_that_is_not_dense_is_copied_now() -> None:
    tensor = torch.arange(6.0)[::2]
    (leaf,) = capture_state([Tensors(("a", tensor, OWNED))]).leaves
    assert leaf.laziness is EAGER
    tensor.zero_()
    assert leaf.tensor.tolist() == [0.0, 2.0, 4.0]


def test_what_a_view_with_holes_looks_at_does_not_wait() -> None:
    """Nor does what overlaps with that; what lies beside the view waits as it may."""
    flat = torch.zeros(40)
    leaves = [
        ("before", flat[:10], OWNED),
        ("view", flat[12:19:2], EAGER),
        ("seen", flat[18:24], OWNED),
        ("shared", flat[22:30], OWNED),
        ("after", flat[30:], FROZEN),
        ("elsewhere", torch.zeros(4), OWNED),
        ("nothing", flat.view(20, 2)[:0, 0], EAGER),
        ("expanded", torch.zeros(1).expand(3), EAGER),
    ]
    lazinesses = dict(shape_of(capture_state([Tensors(*leaves)]))[0])
    assert [name for name, laziness in lazinesses.items() if laziness is not EAGER] == [
        "before",
        "after",
        "elsewhere",
    ]


@given(st.data())
def test_every_view_of_a_waiting_tensor_is_noticed(draw: st.DataObject) -> None:
    flat = torch.zeros(60)
    begin = draw.draw(st.integers(0, 59))
    weight = flat[begin : begin + draw.draw(st.integers(1, 20))]
    offset = draw.draw(st.integers(0, 30))
    shape = (draw.draw(st.integers(1, 4)), draw.draw(st.integers(1, 4)))
    view = flat.as_strided(shape, (draw.draw(st.integers(0, 5)), draw.draw(st.integers(0, 4))), offset)
    lazinesses = dict(shape_of(capture_state([Tensors(("w", weight, OWNED), ("v", view, EAGER))]))[0])
    view.fill_(1)
    assert not weight.any() or lazinesses.get("w", EAGER) is EAGER


def test_one_name_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="two leaves are named 'a'"):
        capture_state([Tensors(("a", torch.zeros(1), EAGER), ("a", torch.zeros(1), EAGER))])


def test_a_tensor_that_cannot_be_saved_is_refused_by_name() -> None:
    with pytest.raises(StateTypeError, match=r"model\.w is on the meta device"):
        capture_state([Tensors(("model.w", torch.zeros(1, device="meta"), EAGER))])


def test_names_that_are_too_long_or_no_text_are_refused_by_the_path() -> None:
    longest = "t." + "x" * (NAME_LENGTH_MAX - 2)
    component = Tensors((longest, torch.ones(2), EAGER), ("t.ü", torch.ones(3), EAGER))
    assert store([component]).tensor(longest).tolist() == [1.0, 1.0]
    with pytest.raises(StateTypeError, match=r"t\.xxx.*… has a name of 4097 characters, more than 4096"):
        capture_state([Tensors((longest + "x", torch.zeros(2), EAGER))])
    with pytest.raises(StateTypeError, match=r"the name 't\.\\ud800' has lone surrogates.*rename the module"):
        capture_state([Tensors(("t.\ud800", torch.zeros(2), EAGER))])


def test_free_names_are_the_same_in_every_capture() -> None:
    class Twice(Tensors):
        def capture(self, sink: Sink) -> None:
            for _ in range(3):
                sink.leaf(sink.free_name("x"), torch.zeros(1), EAGER)
            sink.value(None)

    for _ in range(2):
        assert [leaf.spec.name for leaf in capture_state([Twice()]).leaves] == ["x", "x#2", "x#3"]


def test_the_last_capture_spares_work_and_changes_nothing() -> None:
    tensor = torch.zeros(2, 3)
    first = capture_state([Tensors(("a", tensor, EAGER), ("b", tensor[0], EAGER))])
    second = capture_state([Tensors(("a", tensor, EAGER), ("b", tensor[0], EAGER))], previous=first)
    assert second.leaves[0].spec is first.leaves[0].spec
    assert (shape_of(second), second.aliases) == (shape_of(first), first.aliases)
    for changed in (torch.zeros(3, 2), torch.zeros(3, 2).t(), torch.zeros(2, 3).double()):
        third = capture_state([Tensors(("a", changed, EAGER))], previous=second)
        assert third.leaves[0].spec == capture_state([Tensors(("a", changed, EAGER))]).leaves[0].spec


ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 24)), max_size=10)


@given(ranges, st.integers(1, 3))
def test_any_views_come_back_and_no_holder_lies_in_another(
    ranges: Sequence[tuple[int, int]], device_count: int
) -> None:
    flat = torch.randint(0, 256, (64,), dtype=torch.uint8)
    views = [(f"v{number}", flat[begin : begin + size], EAGER) for number, (begin, size) in enumerate(ranges)]
    capture = capture_state([Tensors(*views)])
    holders = [byte_range(leaf.tensor) for leaf in capture.leaves]
    for index, (begin, size) in enumerate(holders):
        for other, (other_begin, other_size) in enumerate(holders):
            inside = other_begin <= begin and begin + size <= other_begin + other_size
            assert index == other or not inside or not size
    stored = store([Tensors(*views)], device_count=device_count)
    for name, view, _ in views:
        assert bits(stored.tensor(name)) == bits(view)

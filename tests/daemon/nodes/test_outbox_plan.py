"""What waits for a peer: bounded, in order, by dataset."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.nodes.outbox_plan import OFFER_BYTES, Outbox, Parcel


def parcel(number: int, size_bytes: int = 10) -> Parcel:
    return Parcel(number, 0, bytes(size_bytes))


def test_samples_leave_in_order_in_messages_of_bounded_size() -> None:
    box: Outbox[str] = Outbox()
    third = OFFER_BYTES // 3
    for number in range(5):
        assert box.put("a", parcel(number, third))
    assert [each.sample for each in box.take("a")] == [0, 1, 2]
    assert [each.sample for each in box.take("a")] == [3, 4]
    assert box.next_due(0.0) is None
    assert box.size_bytes == 0
    assert box.put("a", parcel(7, 2 * OFFER_BYTES)), "one large sample is a message of its own"
    assert box.put("a", parcel(8))
    assert [each.sample for each in box.take("a")] == [7]


def test_a_dataset_that_waits_does_not_hold_the_others() -> None:
    box: Outbox[str] = Outbox()
    box.put("a", parcel(1))
    box.put("a", parcel(2))
    taken = box.take("a")
    box.put_back("a", taken, not_before_s=5.0)
    assert box.next_due(1.0) == ("a", 4.0)
    box.put("b", parcel(3))
    assert box.next_due(1.0) == ("b", 0.0)
    assert box.drop("b") == 1
    assert box.next_due(6.0) == ("a", 0.0)
    assert [each.sample for each in box.take("a")] == [1, 2]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "take", "back", "drop"]), st.sampled_from("abc"), st.integers(0, 60)),
    max_size=100,
)


@given(OPERATIONS)
def test_bytes_are_counted_and_bounded(operations: list[tuple[str, str, int]]) -> None:
    box: Outbox[str] = Outbox(size_bytes_max=100)
    here: dict[str, list[Parcel]] = {}
    out: list[tuple[str, list[Parcel]]] = []
    for what, key, size in operations:
        total = sum(len(each.data) for waiting in here.values() for each in waiting)
        if what == "put":
            added = parcel(size, size)
            assert box.put(key, added) == (total + size <= 100)
            if total + size <= 100:
                here.setdefault(key, []).append(added)
        elif what == "take" and here.get(key):
            taken = box.take(key)
            assert taken == here.pop(key)
            out.append((key, taken))
        elif what == "back" and out:
            back_key, parcels = out.pop()
            box.put_back(back_key, parcels, not_before_s=1.0)
            here[back_key] = [*parcels, *here.get(back_key, [])]
        elif what == "drop":
            assert box.drop(key) == len(here.pop(key, []))
        assert box.size_bytes == sum(len(each.data) for waiting in here.values() for each in waiting)
        assert len(box) == sum(map(len, here.values()))

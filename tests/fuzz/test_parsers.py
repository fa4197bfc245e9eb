"""Whatever a disk, a socket or a user hands in: only declared errors, little time, little memory."""

import pytest
from changes import inputs
from fuzzing import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import TARGETS, sign_manifest


@pytest.mark.parametrize("name", TARGETS)
def test_good_inputs_are_taken(name: str) -> None:
    target = TARGETS[name]
    for content in target.seeds:
        target.parse(content)


def test_a_manifest_that_was_signed_again_is_the_same() -> None:
    (content,) = TARGETS["manifest"].seeds
    assert sign_manifest(content) == content


@pytest.mark.parametrize("name", TARGETS)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_other_input_raises_only_what_is_declared(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    check(target, data.draw(inputs(target)))


ABSURD = {
    "deep": b"[" * 1_000_000,
    "deep_objects": b'{"a":' * 500_000,
    "long_number": b"9" * 1_000_000,
    "zeros": bytes(1_000_000),
}
LONG_LIST = b"9223372036854775807," * 20_000


@pytest.mark.parametrize("kind", ABSURD)
@pytest.mark.parametrize("name", TARGETS)
def test_absurd_inputs_take_neither_time_nor_memory(name: str, kind: str) -> None:
    """Each alone, and in place of the first list and the first number of a good input."""
    target = TARGETS[name]
    check(target, ABSURD[kind])
    for seed in target.seeds:
        for mark in (b"[", b":1", b":2"):
            place = seed.find(mark)
            if place >= 0:
                content = seed[: place + len(mark) - 1] + ABSURD[kind] + seed[place + len(mark) :]
                check(target, target.sign(content))


@pytest.mark.parametrize("name", TARGETS)
def test_a_list_of_absurdly_many_numbers_takes_neither_time_nor_memory(name: str) -> None:
    """Before the first element of each list of a good input, e.g. in a shape, whose product nobody needs."""
    target = TARGETS[name]
    for seed in target.seeds:
        places = [place for place in range(len(seed)) if seed[place : place + 1] == b"["]
        for place in places:
            check(target, target.sign(seed[: place + 1] + LONG_LIST + seed[place + 1 :]))

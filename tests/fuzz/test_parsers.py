"""Whatever a disk, a socket or a user hands in: only declared errors, little time, little memory."""

import pytest
from changes import inputs
from fuzzing import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import TARGETS, sign_manifest

from everstep.core.errors import CorruptDataError


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


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'[["loss",1]]', b"[3]", "pairs of key and count"),
        (b'[["loss",1]]', b'[["loss"]]', "pairs of key and count"),
        (b'"$leaf":"model._extra_state.tensor"', b'"$leaf":[["model"]]', "names a leaf by"),
        (b'"$leaf":"model._extra_state.tensor"', b'"$leaf":[]', "names a leaf by"),
        (b'"state":{"loader":{', b'"state":[],"other":{"loader":{', "of loader is not an object"),
        (b'"ledger":{"format"', b'"other":{"format"', "no field 'ledger'"),
        (b'"shape":[624]', b'"shape":[' + LONG_LIST + b"1]", "are no array of <u4"),
    ],
)
def test_documents_that_fit_no_component_are_refused_with_the_reason(
    old: bytes, new: bytes, reason: str
) -> None:
    target = TARGETS["documents"]
    (content,) = target.seeds
    assert old in content
    check(target, content.replace(old, new))
    with pytest.raises(CorruptDataError, match=reason):
        target.parse(content.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"interval_steps":20', b'"interval_steps":0'),
        (b"[16,0.5,0.1]", b"[0,0.5,0.1]"),
        (b"[16,0.5,0.1]", b"[16,0.0,0.1]"),
        (b"[16,0.5,0.1]", b"[16,0.5,-1]"),
        (b'"size_bytes":1000000000', b'"size_bytes":-1'),
        (b'"trained_s":5000.0', b'"trained_s":1e300'),
    ],
)
def test_what_no_controller_can_have_measured_is_refused(old: bytes, new: bytes) -> None:
    target = TARGETS["frequency_memory"]
    content = target.seeds[0]
    assert old in content
    with pytest.raises(CorruptDataError, match="beyond all bounds"):
        target.parse(content.replace(old, new))

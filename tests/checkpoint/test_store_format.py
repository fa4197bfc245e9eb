import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.store_format import (
    Attempt,
    DamagedShard,
    DamageList,
    DiskId,
    Floor,
    LockHolder,
    RetiredDevice,
    RunId,
    ScrubMark,
    ScrubPlace,
    decode_attempt,
    decode_damage,
    decode_disk_id,
    decode_floor,
    decode_lock,
    decode_run,
    decode_scrub_mark,
    encode_attempt,
    encode_damage,
    encode_disk_id,
    encode_floor,
    encode_lock,
    encode_run,
    encode_scrub_mark,
)
from everstep.core.errors import ConfigError, CorruptDataError, DataError, FormatVersionError
from everstep.core.ids import CheckpointId

DISK_ID = DiskId(
    device_id="a" * 32, store_id="b" * 32, members={"a" * 32: "/nvme0", "c" * 32: "/nvme1 ü"}, is_ready=True
)
DISK_ID_WITH_CHANGES = DiskId(
    device_id="a" * 32,
    store_id="b" * 32,
    members={"a" * 32: "/nvme0", "c" * 32: "/nvme1"},
    is_ready=True,
    draining=frozenset({"c" * 32}),
    retired={
        "d" * 32: RetiredDevice(
            path="/nvme2", retired_unix_s=1.5e9, highest={f"1000/{'e' * 32}": CheckpointId(2, 70)}
        )
    },
    missing_since_unix_s={"c" * 32: 1.6e9},
)
RUN = RunId.of("größe ✓", 1000)
ATTEMPT = Attempt(attempt=3, fresh=True)
FLOOR = Floor(newest=CheckpointId(3, 9), previous=CheckpointId(2, 1))
DAMAGE = DamageList(
    change=3,
    shards=(DamagedShard(checkpoint=CheckpointId(2, 0), rank=1, generation="a" * 32, problem="größe ✓"),),
)
SCRUB_BEGUN = ScrubMark(store_id="b" * 32, started_unix_s=1.5e9)
SCRUB_ENDED = ScrubMark(
    store_id="b" * 32,
    started_unix_s=1.5e9,
    ended_unix_s=1.6e9,
    checkpoint_count=7,
    place=ScrubPlace(owner_uid=1000, run_id="e" * 32, checkpoint=CheckpointId(2, 0)),
)
HOLDER = LockHolder(pid=7, socket="/run/x", uid=0, kind="node")
FORMATS: list[tuple[Callable[[Any], bytes], Callable[[bytes, str], object], object]] = [
    (encode_disk_id, decode_disk_id, DISK_ID),
    (encode_disk_id, decode_disk_id, DISK_ID_WITH_CHANGES),
    (encode_run, decode_run, RUN),
    (encode_attempt, decode_attempt, ATTEMPT),
    (encode_floor, decode_floor, FLOOR),
    (encode_damage, decode_damage, DAMAGE),
    (encode_damage, decode_damage, DamageList(change=1, shards=())),
    (encode_scrub_mark, decode_scrub_mark, SCRUB_BEGUN),
    (encode_scrub_mark, decode_scrub_mark, SCRUB_ENDED),
]


def test_every_file_reads_back() -> None:
    assert decode_disk_id(encode_disk_id(DISK_ID), "x") == DISK_ID
    assert decode_run(encode_run(RUN), "x") == RUN
    assert decode_attempt(encode_attempt(ATTEMPT), "x") == ATTEMPT
    assert decode_floor(encode_floor(FLOOR), "x") == FLOOR
    assert decode_floor(encode_floor(Floor(newest=CheckpointId(1, 0), previous=None)), "x").previous is None
    for encode, decode, value in FORMATS:
        assert decode(encode(value), "x") == value
    assert decode_lock(encode_lock(HOLDER)) == HOLDER
    assert "node daemon (pid 7, uid 0, socket /run/x)" in str(HOLDER)


@pytest.mark.parametrize("decode", [decode_disk_id, decode_run, decode_attempt, decode_floor, decode_damage])
def test_newer_versions_and_garbage_are_told_apart(decode: object) -> None:
    for content, error in [(b'{"format":3}', FormatVersionError), (b'{"format":1}', CorruptDataError)]:
        with pytest.raises(error, match="where"):
            decode(content, "where")  # pyright: ignore[reportCallIssue]


@given(st.binary(max_size=60), st.integers(0, 300), st.integers(0, 20))
def test_decoding_raises_only_declared_errors(insert: bytes, place: int, cut: int) -> None:
    for encode, decode, value in FORMATS:
        whole = encode(value)
        for content in (insert, whole[:place] + insert + whole[place + cut :], b"[" * 5000):
            with contextlib.suppress(DataError):
                decoded = decode(content, "x")
                assert decode(encode(decoded), "x") == decoded
            assert isinstance(decode_lock(content), LockHolder | None)


def test_a_run_has_the_id_of_its_name() -> None:
    with pytest.raises(CorruptDataError, match="does not have the id"):
        decode_run(encode_run(RunId(run_id="0" * 32, name="demo", owner_uid=0)), "x")
    with pytest.raises(CorruptDataError, match="printable"):
        decode_run(encode_run(RunId(run_id="0" * 32, name="a\nb", owner_uid=0)), "x")


def test_whoever_holds_a_device_is_told_as_what_it_is() -> None:
    assert str(HOLDER) == "a node daemon (pid 7, uid 0, socket /run/x)"
    command = LockHolder(pid=8, socket="", uid=5, kind="everstep rm")
    assert str(command) == "`everstep rm` (pid 8, uid 5)"


def test_disk_id_has_the_version_that_it_needs() -> None:
    assert b'"format":1,' in encode_disk_id(DISK_ID)
    assert b"retired" not in encode_disk_id(DISK_ID)
    content = encode_disk_id(DISK_ID_WITH_CHANGES)
    assert b'"format":2,' in content
    with pytest.raises(CorruptDataError, match="more than its format version 1 can"):
        decode_disk_id(content.replace(b'"format":2', b'"format":1'), "x")


@pytest.mark.parametrize(
    "changed",
    [
        {"members": {"c" * 32: "/nvme1"}},
        {"draining": frozenset({"d" * 32})},
        {"missing_since_unix_s": {"d" * 32: 1.0}},
        {"members": {"a" * 32: "/nvme0", "d" * 32: "/nvme2"}},
    ],
)
def test_a_disk_id_that_contradicts_itself_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError, match=r"agree with itself|its own device"):
        decode_disk_id(encode_disk_id(replace(DISK_ID_WITH_CHANGES, **changed)), "x")


def test_a_disk_id_that_nobody_could_read_is_never_written() -> None:
    record = RetiredDevice(
        path="/nvme2",
        retired_unix_s=0,
        highest={f"{number}/{'e' * 32}": CheckpointId(1, 1) for number in range(30_000)},
    )
    with pytest.raises(ConfigError, match="at most"):
        encode_disk_id(replace(DISK_ID, retired={"d" * 32: record}))

"""Megatron's tokenised datasets: sequences, documents, windows; damaged indices."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_checks import check_in_workers, check_source, contents
from source_data import BOUNDS, LENGTHS, TOKENS, write_megatron

from everstep.core.errors import CorruptDataError, FormatVersionError, SourceChangedError, UsageError
from everstep.dataloader.sources import MegatronSource, TokenWindows
from everstep.dataloader.sources.megatron_format import (
    HEADER,
    MAGIC,
    TOKEN_TYPES,
    MegatronIndex,
    encode_megatron_index,
)


def test_the_layout_is_megatrons(tmp_path: Path) -> None:
    """Written here step by step, as Megatron's IndexedDatasetBuilder does with numpy."""
    path = write_megatron(tmp_path)
    by_hand = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", 8)
    by_hand += struct.pack("<Q", 4) + struct.pack("<Q", 4)
    by_hand += np.array(LENGTHS, dtype=np.int32).tobytes()
    by_hand += np.array([0, 6, 6, 14], dtype=np.int64).tobytes()
    by_hand += np.array(BOUNDS, dtype=np.int64).tobytes()
    assert path.with_suffix(".idx").read_bytes() == by_hand
    with_modes = by_hand + bytes(4)
    path.with_suffix(".idx").write_bytes(with_modes)
    assert len(MegatronSource(path)) == 4


def test_sequences_and_documents(tmp_path: Path) -> None:
    path = write_megatron(tmp_path)
    source = MegatronSource(path)
    raw = TOKENS.tobytes()
    check_source(source, [raw[:6], b"", raw[6:14], raw[14:]])
    assert source.token_count == 8
    assert source.tokens(source.get_bytes(2)).tolist() == [103, 104, 105, 106]
    documents = MegatronSource(path.with_suffix(".bin"), unit="document")
    check_source(documents, [raw[:6], b"", raw[6:]])
    assert documents.fingerprint() != source.fingerprint()
    assert list(source.files()) == [f"{path}.bin", f"{path}.idx"]
    assert source.fingerprint() == "megatron-1:57c607377d447b795fbd33181e7d15b8"


def test_windows(tmp_path: Path) -> None:
    path = write_megatron(tmp_path)
    windows = TokenWindows(path, length=3)
    assert [windows.tokens(windows.get_bytes(i)).tolist() for i in range(len(windows))] == [
        [100, 101, 102, 103],
        [103, 104, 105, 106],
    ]
    check_source(windows, contents(windows))
    assert (
        TokenWindows(path, length=7).tokens(TokenWindows(path, length=7).get_bytes(0)).tolist()
        == TOKENS.tolist()
    )
    assert len(TokenWindows(MegatronSource(path), length=1)) == 7
    assert TokenWindows(path, length=2).fingerprint() != windows.fingerprint()
    for bad in (0, -1, 8):
        with pytest.raises(UsageError):
            TokenWindows(path, length=bad)


@given(st.integers(2, 300), st.integers(1, 40))
def test_each_token_but_the_first_is_a_target_once(tokens: int, length: int) -> None:
    count = max(0, (tokens - 1) // length)
    targets = [i * length + 1 + j for i in range(count) for j in range(length)]
    assert targets == list(range(1, count * length + 1))
    assert tokens - 1 - len(targets) < length


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_it(tmp_path: Path, method: str) -> None:
    source = TokenWindows(write_megatron(tmp_path), length=2)
    check_in_workers(source, contents(source), method)


def test_files_that_change(tmp_path: Path) -> None:
    path = write_megatron(tmp_path)
    source = MegatronSource(path)
    copy = pickle.loads(pickle.dumps(source))
    assert source.get_bytes(3)
    with path.with_suffix(".bin").open("r+b") as file:
        file.truncate(14)
    with pytest.raises(SourceChangedError, match=r"data\.bin ends at 14, sample 3 lies at \[14, 16\)"):
        source.get_bytes(3)
    with pytest.raises(
        SourceChangedError, match=r"data\.bin has 14 bytes, 16 when it was indexed \(sample 2\)"
    ):
        copy.get_bytes(2)
    with path.with_suffix(".idx").open("r+b") as file:
        file.truncate(50)
    with pytest.raises(CorruptDataError, match="ends at"):
        source.get_bytes(0)
    with pytest.raises(SourceChangedError, match=r"data\.idx has 50 bytes"):
        pickle.loads(pickle.dumps(source)).get_bytes(0)
    before = source.fingerprint()
    write_megatron(tmp_path)
    tokens = TOKENS.copy()
    tokens[4] += 1
    path.with_suffix(".bin").write_bytes(tokens.tobytes())
    assert MegatronSource(path).fingerprint() != before


def test_what_is_no_dataset(tmp_path: Path) -> None:
    path = write_megatron(tmp_path)
    with pytest.raises(UsageError, match=r"there is no file .*none\.bin"):
        MegatronSource(tmp_path / "none")
    with pytest.raises(UsageError, match="unit='page'"):
        MegatronSource(path, unit="page")
    good = path.with_suffix(".idx").read_bytes()
    for data, error, message in [
        (b"", UsageError, "no Megatron index"),
        (b"other" * 20, UsageError, "no Megatron index"),
        (good[:20], CorruptDataError, "ends after 20 bytes"),
        (good[:-1], CorruptDataError, "has 114 bytes, this one 113"),
        (good + b"xx", CorruptDataError, "this one"),
        (good[:9] + b"\2" + good[10:], FormatVersionError, "version 2"),
        (good[:17] + b"\x09" + good[18:], CorruptDataError, "code 9"),
        (good[:17] + b"\x04" + good[18:], CorruptDataError, "16 bytes"),
    ]:
        path.with_suffix(".idx").write_bytes(data)
        with pytest.raises(error, match=message):
            MegatronSource(path)


@given(
    st.sampled_from([name for name, _ in TOKEN_TYPES.values()]),
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6),
)
def test_round_trip(token_type: str, documents: list[list[int]]) -> None:
    """Documents of sequences of random lengths, laid out and found again."""
    size = dict(TOKEN_TYPES.values())[token_type]
    lengths = [length for document in documents for length in document]
    bounds = [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    data = encode_megatron_index(token_type, lengths, bounds)
    index = MegatronIndex(lambda at, count: data[at : at + count], len(data), sum(lengths) * size)
    assert index.header.token_type == token_type
    assert [index.sequence(i)[1] for i in range(len(lengths))] == [length * size for length in lengths]
    assert [index.document(i)[1] for i in range(len(documents))] == [sum(each) * size for each in documents]


@given(st.data())
def test_fuzzed_indices_end_in_declared_errors(data: st.DataObject) -> None:
    damaged = bytearray(encode_megatron_index("uint16", LENGTHS, BOUNDS))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(damaged) - 8))
        value = data.draw(
            st.sampled_from([0, 1, 1 << 31, 1 << 63, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1)
        )
        width = data.draw(st.sampled_from([1, 4, 8]))
        damaged[place : place + width] = value.to_bytes(8, "little")[:width]
    given_ = bytes(damaged)
    try:
        index = MegatronIndex(lambda at, count: given_[at : at + count], len(given_), 16)
        for i in range(index.header.sequence_count):
            offset, size = index.sequence(i)
            assert 0 <= offset <= offset + size <= 16
        for i in range(index.header.bound_count - 1):
            offset, size = index.document(i)
            assert 0 <= offset <= offset + size <= 16
    except (CorruptDataError, UsageError, FormatVersionError):
        pass


def test_header_is_34_bytes() -> None:
    assert HEADER.size == 34
    assert len(MAGIC) == 9

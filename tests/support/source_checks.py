"""What holds for every source, whatever its format."""

import multiprocessing
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from everstep.dataloader.sources import Source
from everstep.dataloader.sources.index_format import NEVER_CURRENT

LONG_AGO_S = 1_700_000_000
assert NEVER_CURRENT < LONG_AGO_S


def settle(*paths: Path, at_s: int = LONG_AGO_S) -> None:
    """Give files, or trees, a time long ago: an index does not trust what was changed within two seconds."""
    for path in paths:
        for folder, _, names in os.walk(path, topdown=False):
            for name in names:
                os.utime(Path(folder) / name, (at_s, at_s))
            os.utime(folder, (at_s, at_s))
        os.utime(path, (at_s, at_s))


def contents(source: Source) -> list[bytes]:
    return [bytes(source.get_bytes(index)) for index in range(len(source))]


def check_source(source: Source, expected: Sequence[bytes]) -> None:
    """Check length, contents, refused indices, fingerprint, threads, and workers by fork and spawn."""
    assert isinstance(source, Source)
    assert len(source) == len(expected)
    assert contents(source) == list(expected)
    for index in (-1, len(expected), len(expected) + 7, -len(expected)):
        with pytest.raises(IndexError, match=rf"has samples 0 to {len(expected) - 1}, not {index}"):
            source.get_bytes(index)
    print_ = source.fingerprint()
    assert 0 < len(print_) <= 128
    assert print_.isascii()
    assert print_.isprintable()
    copy: Source = pickle.loads(pickle.dumps(source))
    assert contents(copy) == list(expected)
    assert copy.fingerprint() == print_
    with ThreadPoolExecutor(4) as pool:
        assert [bytes(data) for data in pool.map(source.get_bytes, list(range(len(source))) * 3)] == (
            list(expected) * 3
        )


def check_in_workers(source: Source, expected: Sequence[bytes], method: str) -> None:
    """Check contents and fingerprint in two real worker processes; the source has been used here before."""
    assert contents(source) == list(expected)
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        found = list(pool.map(_read_there, [source] * 2))
    assert found == [(os.getpid(), list(expected), source.fingerprint())] * 2
    assert contents(source) == list(expected)


def _read_there(source: Source) -> tuple[int, list[bytes], str]:
    return os.getppid(), contents(source), source.fingerprint()

"""Which tensors cannot be written to: those of a file mapped for reading, whatever part of it they are."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from everstep.hook.unwritable import unwritable


@pytest.mark.filterwarnings("ignore:.*not writable:UserWarning")
def test_only_what_is_mapped_for_reading_counts(tmp_path: Path) -> None:
    file = tmp_path / "table.npy"
    np.save(file, np.zeros((1024, 8), np.float32))
    table = torch.from_numpy(np.load(file, mmap_mode="r"))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        octets = torch.frombuffer(mapped, dtype=torch.uint8)
        closed = [table, table[3:5], table.T, table.detach(), octets]
        free = [
            torch.zeros(3),
            torch.from_numpy(np.load(file, mmap_mode="c")),
            torch.from_numpy(np.zeros(3)),
            torch.frombuffer(bytearray(8), dtype=torch.uint8),
            torch.zeros(3).share_memory_(),
            torch.eye(2).to_sparse(),
            torch.zeros(3, device="meta"),
        ]
        assert unwritable([*closed, *free]) == {id(tensor) for tensor in closed}
        del octets, closed
    assert unwritable(free) == set()

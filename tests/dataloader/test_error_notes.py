"""An error of the dataset or of collation keeps its class and message, and names the samples."""

import traceback
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from everstep.dataloader import DataLoader


class Broken(Dataset[torch.Tensor]):
    """Storage fails at sample 4; sample 7 has another length than the others."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            raise OSError(5, "Input/output error", "/nfs/photos/4.jpg")
        return torch.zeros(2 if index == 7 else 1)


def said(**arguments: Any) -> tuple[Exception, str]:
    loader = DataLoader[torch.Tensor](Broken(), **arguments)
    with pytest.raises((OSError, RuntimeError)) as raised:
        list(loader)
    return raised.value, "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(num_workers: int) -> None:
    error, text = said(batch_size=3, num_workers=num_workers)
    assert type(error) is OSError
    assert "while sample 4 of Broken was read" in text
    assert "/nfs/photos/4.jpg" in text
    assert "collated" not in text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_do_not_fit_together_are_named(num_workers: int) -> None:
    error, text = said(sampler=range(5, 25), batch_size=10, num_workers=num_workers)
    assert type(error) is RuntimeError
    assert "stack expects each tensor to be equal size" in text
    assert "while the batch of samples 5, 6, 7, 8, 9, 10, 11, 12 … of Broken was collated" in text

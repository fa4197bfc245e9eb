"""A stream that does not say where it stands, attached to a run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from in_process import refused, service, training
from torch.utils.data import IterableDataset

from everstep.core.errors import LoaderStateError
from everstep.dataloader import DataLoader


@pytest.fixture
def storage(tmp_path: Path) -> list[Path]:
    path = tmp_path / "d0"
    path.mkdir()
    return [path]


def test_it_is_named_at_its_first_checkpoint_and_refused_with_nothing_changed(
    storage: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    class Silent(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(1000))

    stream = DataLoader(Silent(), batch_size=2)
    with service():
        with training(storage, more=stream) as trained:
            next(iter(stream))
            trained.save()
            trained.save()
        assert caplog.text.count("loader_not_resumable name=more: ") == 1
        with training(storage, more=DataLoader(Silent(), batch_size=2)) as again:
            before = again.weights()
            with refused(LoaderStateError, "Silent did not say where it stands", hint="leave the loader out"):
                again.run.restore()
            assert torch.equal(again.weights(), before)
        with training(storage) as without:
            restored = without.run.restore()
            assert restored is not None
            assert restored.not_attached == ("more",)

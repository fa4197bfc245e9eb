"""What restore() leaves in the process: the generators as they were, and tensors that training may write to."""

import contextlib
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Training, refused, service, training
from overlapping import Loop, attached, data, simple
from torch import nn

from everstep.core.errors import EverstepError, StateMismatchError, UsageError
from everstep.dataloader import DataLoader
from everstep.hook.restore import Restored


def save(loop: Loop, devices: list[Path]) -> None:
    """Save the loop's state as it is."""
    with attached(loop, devices) as run:
        for _ in range(2):  # the first one allocates the arena
            run.checkpoint()
            run.step()
            assert run.wait(20)
        assert run.report().checkpoints_complete


def draw() -> list[float]:
    return [random.random(), float(np.random.random_sample()), float(torch.rand(()))]


class Shuffled:
    """A sampler that shuffles when it is made, and again when its state comes back."""

    def __init__(self) -> None:
        self.order = self._shuffled()

    def state_dict(self) -> dict[str, int]:
        return {"next": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = torch.randperm(100).tolist()  # as many that no two are the same by chance
        random.shuffle(order)
        np.random.shuffle(order)
        return order


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def shuffling() -> Loop:
    objects: dict[str, Any] = {"sampler": Shuffled(), "model": nn.Linear(2, 2)}
    return Loop(objects, lambda number, run: None)


def test_what_objects_draw_while_they_are_restored_is_undone(devices: list[Path]) -> None:
    loop = shuffling()
    save(loop, devices)
    expected = draw()
    again = shuffling()
    with attached(again, devices) as run:
        assert run.restore() is not None
        assert again.objects["sampler"].order != loop.objects["sampler"].order
        assert draw() == expected


def test_and_at_the_first_batch_of_a_loader_again(devices: list[Path]) -> None:
    def make() -> Loop:
        loop = shuffling()
        loop.objects["loader"] = DataLoader(Numbers(), batch_size=4)
        return loop

    save(make(), devices)
    expected = draw()
    again = make()
    with attached(again, devices) as run:
        assert run.restore() is not None
        assert draw() == expected
        next(iter(again.objects["loader"]))
        assert draw() == expected


Mode = Callable[[], contextlib.AbstractContextManager[object]]


class Adds(nn.Module):
    """Forward makes a buffer on its first call, and keeps a sparse one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("last", None)
        self.register_buffer("seen", torch.eye(2).to_sparse())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.last = batch.mean(0) if self.last is None else self.last.add_(batch.mean(0))
        return self.layer(batch)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
def test_a_restore_in_any_mode_makes_tensors_that_training_writes_to(devices: list[Path], mode: Mode) -> None:
    loop, again = (simple(seed, Adds) for seed in (0, 99))
    with attached(loop, devices) as run:
        loop.iterate(0, run)
    save(loop, devices)
    with attached(again, devices) as run:
        with mode():
            assert run.restore() is not None
        model, optimizer = again.objects["model"], again.objects["optimizer"]
        states = [each for state in optimizer.state.values() for each in state.values()]
        assert not any(each.is_inference() for each in [*states, *model.parameters(), *model.buffers()])
        for number in range(3):
            for each in (loop, again):
                each.iterate(number, run)
    batch = data(7, 4, 6)
    assert torch.equal(model(batch), loop.objects["model"](batch))


def transposed(made: torch.Tensor) -> Loop:
    model = nn.Linear(4, 3).requires_grad_(False)
    model.weight.data = made
    return Loop({"model": model}, lambda number, run: None)


@pytest.mark.parametrize("mode", [torch.inference_mode, contextlib.nullcontext])
def test_a_restore_writes_to_tensors_that_were_made_in_inference_mode(
    devices: list[Path], mode: Mode
) -> None:
    """By other strides, so that elements are copied, as on CUDA."""
    save(transposed(torch.arange(12.0).view(3, 4)), devices)
    with torch.inference_mode():
        again = transposed(torch.zeros(4, 3).t())
        assert again.objects["model"].weight.is_inference()
    with attached(again, devices) as run:
        with mode():
            assert run.restore() is not None
        assert again.objects["model"].weight.flatten().tolist() == list(range(12))


class Mapped(nn.Module):
    """A frozen table and a buffer in a file that is mapped for reading."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        table, bias = np.load(file, mmap_mode="r"), np.load(file, mmap_mode="r")[0]
        with warnings.catch_warnings(action="ignore"):  # that it is not writable
            self.table = nn.Parameter(torch.from_numpy(table), requires_grad=False)
            self.register_buffer("bias", torch.from_numpy(bias))
        self.layer = nn.Linear(8, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch)


def test_what_lies_in_a_file_mapped_for_reading_comes_back_beside_it(
    devices: list[Path], tmp_path: Path
) -> None:
    def made(seed: int) -> Loop:
        file = tmp_path / f"{seed}.npy"
        np.save(file, np.full((512, 8), seed, np.float32))
        model = Mapped(file)
        return Loop({"model": model}, lambda number, run: None)

    save(made(1), devices)
    again = made(2)
    with attached(again, devices) as run:
        assert run.restore() is not None
    model = again.objects["model"]
    assert torch.equal(model.table, torch.ones(512, 8))
    assert torch.equal(model.bias, torch.ones(8))
    assert np.load(tmp_path / "2.npy").max() == 2


def encodings(*values: float, shared: bool = False) -> Loop:
    """Parts with a table each, or one part in their places."""
    parts = [nn.Module() for _ in values]
    for part, value in zip(parts, values, strict=True):
        part.register_buffer("table", torch.full((1000,), value))
    return Loop({"model": nn.ModuleList(parts[:1] * 2 if shared else parts)}, lambda number, run: None)


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_a_part_in_two_places_takes_what_two_had_where_it_is_the_same(tmp_path: Path, source: str) -> None:
    """Read before anything is written: where it is not, nothing has changed."""
    storage, again = [tmp_path / "d0"], encodings(5.0, 5.0, shared=True)
    storage[0].mkdir()

    def restored(values: tuple[float, float]) -> Restored | None:
        with contextlib.ExitStack() as daemon:
            daemon.enter_context(service())
            save(encodings(*values), storage)
            if source == "disk":
                daemon.close()
                daemon.enter_context(service())
            with attached(again, storage) as run:
                return run.restore()
        return None

    table = again.objects["model"][1].table
    with refused(StateMismatchError, "0.table and 1.table are one tensor here", hint="fresh=True"):
        restored((1.0, 2.0))
    assert torch.equal(table, torch.full((1000,), 5.0))
    found = restored((3.0, 3.0))
    assert found is not None
    assert found.source == source
    assert torch.equal(table, torch.full((1000,), 3.0))


def refuse_to_restore(trained: Training) -> None:
    """Do as a script does that takes any error of a restore for "there is nothing"."""
    with contextlib.suppress(EverstepError):
        trained.run.restore()


@pytest.mark.parametrize("options", [{"width": 9}, {"back_to": "7.1"}])
def test_a_run_that_was_refused_its_checkpoint_does_not_train_and_replaces_nothing(
    devices: list[Path], options: dict[str, Any]
) -> None:
    with training(devices) as trained:
        trained.save()
    with training(devices, **options) as trained:
        refuse_to_restore(trained)
        for call in (trained.run.step, lambda: next(trained.run.epochs(2))):
            with refused(UsageError, "restore() raised", "would replace", hint="fresh=True"):
                call()
        trained.run.close()
    with training(devices) as trained:
        found = trained.run.restore()
        assert found is not None
        assert found.attempt == 1

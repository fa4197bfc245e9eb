"""What goes on from one iteration into the next and was not attached is said once, and nothing else is said."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from everstep.dataloader import DataLoader
from everstep.hook.forgotten import Forgotten

Watch = Callable[..., tuple[Forgotten, list[str]]]


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Make one over attached objects; gives it and the events that it told."""
    made: list[Forgotten] = []

    def make(**objects: object) -> tuple[Forgotten, list[str]]:
        told: list[str] = []

        def tell(event: str, text: str) -> None:
            assert "attach(..., " in text
            told.append(event)

        made.append(Forgotten(objects, tell))
        return made[-1], told

    yield make
    for each in made:
        each.close()


def loader() -> DataLoader[int]:
    return DataLoader(Numbers(), batch_size=4)


def steps(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


# -- loaders


def test_a_loader_that_feeds_the_loop_and_was_not_attached_is_said_once(watch: Watch) -> None:
    forgotten, told = watch()
    feeding, another = loader(), loader()
    for _, _ in zip(feeding, another, strict=True):
        forgotten.boundary()
    assert told == ["loader_not_attached"]


def test_a_loader_that_was_attached_is_not(watch: Watch) -> None:
    feeding = loader()
    forgotten, told = watch(loader=feeding)
    for _ in feeding:
        forgotten.boundary()
    assert told == []


class Data:
    """Holds its loader, and says so in its state."""

    def __init__(self) -> None:
        self.loaders = {"train": loader()}

    def state_dict(self) -> dict[str, object]:
        return self.loaders["train"].state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.loaders["train"].load_state_dict(state)


def test_a_loader_in_an_attached_object_is_not(watch: Watch) -> None:
    data = Data()
    forgotten, told = watch(data=data)
    for _ in data.loaders["train"]:
        forgotten.boundary()
    assert told == []


def test_an_evaluation_between_boundaries_is_not_whole_or_broken_off(watch: Watch) -> None:
    feeding, whole, part = loader(), loader(), loader()
    forgotten, told = watch(loader=feeding)
    for number, _ in enumerate(feeding):
        for _ in whole:
            pass
        if number == 3:
            held = iter(part)  # kept by a variable, as in a notebook
            next(held)
        forgotten.boundary()
    assert told == []


def test_a_loader_of_one_batch_an_epoch_stands_at_no_boundary(watch: Watch) -> None:
    forgotten, told = watch()
    single = DataLoader(Numbers(), batch_size=64)
    for _ in range(3):
        for _ in single:
            pass
        forgotten.boundary()
    assert told == []


# -- optimizers


def test_an_optimizer_of_an_attached_model_that_was_not_attached_is_said_once(watch: Watch) -> None:
    model = nn.Linear(2, 1)
    forgotten, told = watch(model=model)
    two = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters())]
    for _ in range(3):
        for optimizer in two:
            steps(optimizer, model)
        assert told in ([], ["optimizer_not_attached"])
        forgotten.boundary()
    assert told == ["optimizer_not_attached"]


def test_telling_leaves_the_hooks_of_others_as_they_are_until_the_boundary(watch: Watch) -> None:
    """torch goes through all of them meanwhile, and raised in the script's own `optimizer.step()`."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (first, told), (second, also_told) = watch(model=model), watch(model=model)
    for _ in range(3):
        steps(optimizer, model)
        first.boundary()
        second.boundary()
    assert (told, also_told) == (["optimizer_not_attached"], ["optimizer_not_attached"])


def test_an_optimizer_that_only_its_schedule_knows_is_said(watch: Watch) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    forgotten, told = watch(model=model, schedule=StepLR(optimizer, 10))
    for _ in range(2):
        steps(optimizer, model)
        forgotten.boundary()
    assert told == ["optimizer_not_attached"]


class Sharp(torch.optim.SGD):
    """An optimizer around another, which shares its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)
        self.inner.state = self.state

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.inner.step()


class Wrapper:
    """An object with an optimizer in it, of which its state speaks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def no_others() -> dict[str, Any]:
    """An optimizer of a model that nobody attached: of an evaluation's probe, or of another run."""
    model = nn.Linear(2, 1)
    return {"model": nn.Linear(2, 1), "steps": torch.optim.SGD(model.parameters()), "of": model}


def attached() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    return {"model": model, "optimizer": optimizer, "steps": optimizer, "of": model}


def inner() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = Sharp(model.parameters())
    return {"model": model, "optimizer": optimizer, "steps": optimizer, "of": model}


def wrapped() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    return {"model": model, "trainer": Wrapper(optimizer), "steps": optimizer, "of": model}


@pytest.mark.parametrize("case", [no_others, attached, inner, wrapped])
def test_an_optimizer_whose_state_is_saved_or_nobodys_is_not_said(
    case: Callable[[], dict[str, Any]], watch: Watch
) -> None:
    objects = case()
    optimizer, model = objects.pop("steps"), objects.pop("of")
    forgotten, told = watch(**objects)
    for _ in range(3):
        steps(optimizer, model)
        forgotten.boundary()
    assert told == []


def test_an_optimizer_that_lives_within_an_iteration_is_not_said(watch: Watch) -> None:
    """The inner loop of meta-learning."""
    model = nn.Linear(2, 1)
    outer = torch.optim.SGD(model.parameters())
    forgotten, told = watch(model=model, outer=outer)
    for _ in range(3):
        quick = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            steps(quick, model)
        steps(outer, model)
        forgotten.boundary()
    assert told == []


def test_an_optimizer_without_a_hash_steps_and_is_said(watch: Watch) -> None:
    class Equal(torch.optim.SGD):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        __hash__ = None  # pyright: ignore[reportAssignmentType]

    model = nn.Linear(2, 1)
    optimizer = Equal(model.parameters())
    forgotten, told = watch(model=model)
    for _ in range(3):
        steps(optimizer, model)
        forgotten.boundary()
    assert told == ["optimizer_not_attached"]


def test_after_its_end_nothing_is_watched_nor_kept_alive(watch: Watch) -> None:
    model = nn.Linear(2, 1)
    forgotten, told = watch(model=model)
    optimizer = torch.optim.SGD(model.parameters())
    steps(optimizer, model)
    forgotten.boundary()
    forgotten.close()
    steps(optimizer, model)
    assert told == []
    left = Forgotten({"model": model}, lambda event, text: told.append(event))
    gone = weakref.ref(left)
    del left
    gc.collect()
    assert gone() is None
    steps(optimizer, model)

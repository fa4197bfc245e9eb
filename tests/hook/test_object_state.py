"""Objects of a training loop: schedulers, scalers, generators, loaders and what users write."""

import itertools
import random
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.utils.data import DataLoader as TorchDataLoader

from everstep.core.errors import LoaderStateError, StateMismatchError, StateTypeError
from everstep.dataloader.loader import DataLoader
from everstep.hook.capture import capture_state
from everstep.hook.component import Laziness, make_components
from everstep.hook.state_testing import bits, transfer


def optimizer(*, tensor_lr: bool = False) -> Optimizer:
    lr = torch.tensor(0.5) if tensor_lr else 0.5
    return Adam([nn.Parameter(torch.zeros(1))], lr=lr, betas=(0.9, 0.99), foreach=False)


def sequential(target: Optimizer) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.LinearLR(target, start_factor=0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(target, T_max=10)
    return lr_scheduler.SequentialLR(target, [warm, cosine], milestones=[3])


class Decay:
    """A callable object: LambdaLR saves its attributes."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, epoch: int) -> float:
        return self.rate**epoch


SCHEDULERS = {
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 2, 5], gamma=0.5),
    "sequential": sequential,
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o)]
    ),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, cycle_momentum=False),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, Decay(0.9)),
    "lambda function": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*scheduler.step.*:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_a_scheduler_goes_on_alike(kind: str) -> None:
    saved, fresh = SCHEDULERS[kind](optimizer()), SCHEDULERS[kind](optimizer())
    for _ in range(4):
        saved.optimizer.step()
        saved.step()
    transfer({"scheduler": saved}, {"scheduler": fresh})
    fresh.optimizer.param_groups[0].update(
        {key: value for key, value in saved.optimizer.param_groups[0].items() if key != "params"}
    )
    for _ in range(4):
        for scheduler in (saved, fresh):
            scheduler.optimizer.step()
            scheduler.step()
        assert saved.get_last_lr() == fresh.get_last_lr()
        assert saved.optimizer.param_groups[0]["lr"] == fresh.optimizer.param_groups[0]["lr"]


def test_a_plateau_scheduler() -> None:
    saved, fresh = (lr_scheduler.ReduceLROnPlateau(optimizer(), patience=1) for _ in range(2))
    for loss in (3.0, 4.0, 5.0, 6.0):
        saved.step(loss)
    transfer({"scheduler": saved}, {"scheduler": fresh})
    assert fresh.state_dict() == saved.state_dict()


def test_a_scheduler_over_a_tensor_learning_rate() -> None:
    saved, fresh = (lr_scheduler.StepLR(optimizer(tensor_lr=True), 2) for _ in range(2))
    saved.optimizer.step()
    saved.step()
    transfer({"scheduler": saved}, {"scheduler": fresh})
    assert fresh.state_dict() == saved.state_dict()


def scaler(**given: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **given)


@pytest.mark.parametrize("used", [False, True])
def test_a_grad_scaler(used: bool) -> None:
    saved, fresh = scaler(init_scale=4.0, growth_interval=1), scaler()
    parameter = nn.Parameter(torch.ones(1))
    target = SGD([parameter], lr=0.1)
    if used:
        saved.scale(parameter.sum()).backward()
        saved.step(target)
        saved.update()
        fresh.scale(parameter.sum())
    transfer({"scaler": saved}, {"scaler": fresh})
    assert saved.get_scale() == (8.0 if used else 4.0)
    assert fresh.state_dict() == saved.state_dict()
    captured = capture_state(make_components({"scaler": saved}, world_size=1))
    assert [leaf.laziness for leaf in captured.leaves] == [Laziness.EAGER] * 2 * used


class Decaying(torch.amp.GradScaler):
    """With a state of its own."""

    factor = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.factor = state_dict.pop("factor")
        super().load_state_dict(state_dict)


def test_a_scaler_with_a_state_of_its_own() -> None:
    saved, fresh = Decaying("cpu", init_scale=4.0), Decaying("cpu")
    saved.factor = 0.5
    transfer({"scaler": saved}, {"scaler": fresh})
    assert (fresh.factor, fresh.get_scale()) == (0.5, 4.0)


def test_a_jagged_tensor_is_refused_by_what_it_is() -> None:
    jagged = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
    kept = Ema(1.0)
    kept.state["jagged"] = jagged
    with pytest.raises(StateTypeError, match=r"NestedTensor, which cannot be saved \(save its inner tensors"):
        capture_state(make_components({"kept": kept}, world_size=1))


def test_a_disabled_scaler() -> None:
    transfer({"scaler": scaler(enabled=False)}, {"scaler": scaler(enabled=False)})
    with pytest.raises(StateMismatchError, match="enabled here, not in the checkpoint"):
        transfer({"scaler": scaler(enabled=False)}, {"scaler": scaler()})
    with pytest.raises(StateMismatchError, match="disabled here, not in the checkpoint"):
        transfer({"scaler": scaler()}, {"scaler": scaler(enabled=False)})


class Ema:
    """What users write: shadow tensors in a dict, counters, a history."""

    def __init__(self, fill: float) -> None:
        self.state: dict[object, object] = {
            "shadow": {"w": torch.full((3,), fill)},
            "seen": {1: 10**30, 2: float("nan")},
            "best": (None, True, b"\0"),
            "array": np.full(2000, fill),
        }

    def state_dict(self) -> dict[object, object]:
        return self.state

    def load_state_dict(self, state: dict[object, object]) -> None:
        self.state = state


def test_a_users_object() -> None:
    saved, fresh = Ema(2.0), Ema(1.0)
    transfer({"ema": saved}, {"ema": fresh}, device_count=3)
    assert repr(fresh.state) == repr(saved.state)
    shadow = fresh.state["shadow"]
    assert isinstance(shadow, dict)
    shadow["w"].zero_()
    assert bits(saved.state["shadow"]["w"]) != bits(shadow["w"])  # pyright: ignore[reportIndexIssue]


def test_a_torch_generator() -> None:
    saved, fresh = torch.Generator().manual_seed(3), torch.Generator()
    torch.rand(5, generator=saved)
    transfer({"generator": saved}, {"generator": fresh})
    assert torch.equal(torch.rand(4, generator=saved), torch.rand(4, generator=fresh))


def test_a_python_generator() -> None:
    saved, fresh = random.Random(3), random.Random()
    saved.gauss(0, 1)
    transfer({"rand": saved}, {"rand": fresh})
    assert [saved.gauss(0, 1) for _ in range(5)] == [fresh.gauss(0, 1) for _ in range(5)]


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox, np.random.MT19937, np.random.SFC64])
def test_a_numpy_generator(kind: type[np.random.BitGenerator]) -> None:
    saved, fresh = np.random.Generator(kind(3)), np.random.Generator(kind(4))
    saved.integers(5, dtype=np.int32)
    transfer({"rng_np": saved}, {"rng_np": fresh})
    assert saved.normal(size=5).tolist() == fresh.normal(size=5).tolist()


def test_a_numpy_generator_of_another_kind_is_refused() -> None:
    with pytest.raises(StateMismatchError, match=r"numpy\.random\.PCG64.*numpy\.random\.Philox"):
        transfer({"g": np.random.default_rng(1)}, {"g": np.random.Generator(np.random.Philox(1))})


def test_a_numpy_random_state() -> None:
    saved, fresh = np.random.RandomState(3), np.random.RandomState(4)
    saved.normal()
    transfer({"r": saved}, {"r": fresh})
    assert saved.normal(size=5).tolist() == fresh.normal(size=5).tolist()


def loader(count: int = 10, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(list(range(count)), batch_size=2, shuffle=True, seed=seed)  # pyright: ignore[reportArgumentType]


def test_everstep_s_own_loader_goes_on_with_its_ledger() -> None:
    saved, fresh = loader(), loader(seed=2)
    batches = iter(saved)
    first = [cast(torch.Tensor, next(batches)).tolist() for _ in range(2)]
    transfer({"loader": saved}, {"loader": fresh})
    assert fresh.ledger.state() == saved.ledger.state()
    rest = [cast(torch.Tensor, batch).tolist() for batch in fresh]
    assert rest == [cast(torch.Tensor, batch).tolist() for batch in batches]
    assert sorted(itertools.chain(*first, *rest)) == list(range(10))


def test_a_loader_of_another_dataset_is_refused_before_anything_changes() -> None:
    fresh = loader(11)
    with pytest.raises(LoaderStateError, match="10 samples, 'loader' has"):
        transfer({"loader": loader()}, {"loader": fresh})
    assert fresh.ledger.state() == loader(11).ledger.state()


class OwnState(random.Random):
    """A generator whose state is its own."""

    def getstate(self) -> tuple[Any, ...]:
        return (7, "mine")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (None, "leave it out"),
        (TorchDataLoader([1]), "everstep.dataloader.DataLoader"),  # pyright: ignore[reportArgumentType]
        (torch.zeros(1), "register it as a buffer"),
        ([nn.Linear(1, 1)], "its own keyword"),
        ({"a": 1}, "its own keyword"),
        (random.SystemRandom(), "state_dict"),
        (OwnState(3), "give its class state_dict"),
        (3, "state_dict"),
    ],
)
def test_other_objects_are_refused_with_what_to_do(value: object, hint: str) -> None:
    with pytest.raises(StateTypeError, match=rf"thing is a .*cannot be saved \(.*{hint}"):
        make_components({"thing": value}, world_size=1)


def test_what_an_object_cannot_say_is_refused_with_the_path() -> None:
    broken = Ema(1.0)
    broken.state["inner"] = {"f": [open]}
    with pytest.raises(StateTypeError, match=r"ema\.inner\.f\[0\] is a builtins\.builtin_function_or_method"):
        capture_state(make_components({"ema": broken}, world_size=1))


def test_a_key_may_be_of_any_length_where_it_names_no_tensor_and_no_text() -> None:
    fresh = Shadow({})
    transfer({"shadow": Shadow({"k" * 5000: 3, "\ud800": torch.ones(2)})}, {"shadow": fresh})
    assert fresh.content["k" * 5000] == 3
    assert bits(cast("torch.Tensor", fresh.content["\ud800"])) == bits(torch.ones(2))
    with pytest.raises(StateTypeError, match=r"shadow\.kkk.*… has a name of 5007 characters.*shorten"):
        capture_state(make_components({"shadow": Shadow({"k" * 5000: torch.ones(2)})}, world_size=1))


class Shadow:
    def __init__(self, content: dict[str, object]) -> None:
        self.content = content

    def state_dict(self) -> dict[str, object]:
        return self.content

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.content = state


def test_another_scheduler_of_torchs_is_refused() -> None:
    """StepLR's state made a CosineAnnealingLR of neither schedule, and a SequentialLR raised KeyError."""
    one, other = optimizer(), optimizer()
    step = lr_scheduler.StepLR(one, 2)
    for here in (lr_scheduler.CosineAnnealingLR(other, 10), sequential(other)):
        with pytest.raises(
            StateMismatchError, match=f"torch.optim StepLR saved it, and here is a {type(here).__name__}"
        ):
            transfer({"sched": step}, {"sched": here})


class Particular:
    """Takes no state."""

    def state_dict(self) -> dict[str, int]:
        return {"one": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("two")


def test_an_object_that_does_not_take_its_state_is_named() -> None:
    words = r"does not fit 'odd': its load_state_dict\(\) raised KeyError: 'two'"
    with pytest.raises(StateMismatchError, match=words):
        transfer({"odd": Particular()}, {"odd": Particular()})


class Silent:
    """Gives no state."""

    def state_dict(self) -> dict[str, int]:
        raise KeyError("two")

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_an_object_whose_state_cannot_be_read_is_named_beside_its_own_error() -> None:
    with pytest.raises(KeyError, match="two") as raised:
        transfer({"odd": Silent()}, {"odd": Silent()})
    assert raised.value.__notes__ == ["while state_dict() of 'odd' was read for a snapshot"]

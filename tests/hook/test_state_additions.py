"""What a `state_dict()` of an object's own adds is said by its keys, and of torch's wrappers nothing."""

import copy
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from overlapping import Loop, attached
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from everstep.daemon.testing import daemon_process
from everstep.hook.state_additions import notes_on_additions

SGD = torch.optim.SGD


class Counting(torch.optim.AdamW):
    """Keeps a counter in its state_dict, as torch's documentation shows it."""

    global_step = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"global_step": self.global_step}


class Around(SGD):
    """Shows the state of the optimizer inside it, which has to be attached, too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.base = SGD(self.param_groups, lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"base": self.base.state_dict()}


class Same(SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


class Table(nn.Linear):
    """Saves an attribute as if it were a buffer."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.table = torch.zeros(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "table"] = self.table


class Nested(nn.Module):
    """Its state_dict is one of several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "seen": {"samples": 3}}


class Renamed(Nested):
    """Leaves its wrapper's name out, as wrappers do, and drops what is frozen."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: value for key, value in self.inner.state_dict().items() if "running" not in key}


class Extra(nn.Linear):
    """Says all that it adds by its extra state, and overrides what it need not."""

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 3}

    def set_extra_state(self, state: Any) -> None: ...

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)


def tied() -> nn.Module:
    model = nn.Sequential(Extra(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def adds(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "rounds"] = 3

    model[1].register_state_dict_post_hook(adds)
    return model


def notes(**objects: object) -> list[str]:
    return notes_on_additions(objects)


def parameters() -> list[nn.Parameter]:
    return list(nn.Linear(2, 2).parameters())


def test_what_an_optimizer_adds_is_said() -> None:
    (note,) = notes(optimizer=Counting(parameters()))
    assert note.startswith(
        "optimizer.state_dict() adds global_step, which no checkpoint holds: keep them in "
    )
    optimizer = SGD(parameters(), lr=0.1)
    optimizer.register_state_dict_post_hook(lambda optimizer, state: state | {"epoch": 3})
    (note,) = notes(o=optimizer)
    assert "o.state_dict() adds epoch, which" in note


@pytest.mark.parametrize("kind", [SGD, Same, Around, torch.optim.LBFGS])
def test_of_optimizers_that_add_nothing_nothing_is(kind: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = kind(parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert notes(optimizer=optimizer) == []


@pytest.mark.parametrize(
    ("build", "keys"),
    [
        (Table, "table"),
        (lambda: nn.Sequential(nn.Linear(1, 1), Table(), Table()), "1.table, 2.table"),
        (lambda: nn.ModuleList([Table()] * 2), "0.table"),
        (lambda: nn.ModuleList([Table() for _ in range(8)]), "0.table, 1.table, 2.table, 3.table, 4.table and 3 more"),
        (lambda: AveragedModel(Table()), "module.table"),
        (lambda: checkpoint_wrapper(nn.Sequential(Table())), "0.table"),
        (lambda: torch.compile(Table(), backend="eager"), "table"),
        (Nested, "seen.samples"),
        (hooked, "1.rounds"),
    ],
)  # fmt: skip
def test_what_a_module_adds_is_said(build: Callable[[], nn.Module], keys: str) -> None:
    (note,) = notes(model=build())
    assert note.startswith(f"model.state_dict() adds {keys}, which no checkpoint holds: return them from ")


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        lambda model: nn.Sequential(nn.Embedding(3, 3), model),
        AveragedModel,
        copy.deepcopy,
        checkpoint_wrapper,
        nn.DataParallel,
        nn.LazyLinear,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: torch.jit.script(nn.Linear(2, 2)),
        lambda model: parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda model: parametrizations.spectral_norm(nn.Linear(3, 3)),
        lambda model: parametrizations.orthogonal(nn.Linear(3, 3)),
        lambda model: nn.utils.weight_norm(nn.Linear(3, 3)),
        lambda model: nn.utils.spectral_norm(nn.Linear(3, 3)),
    ],
)
@pytest.mark.parametrize("build", [tied, Renamed, lambda: Extra(2, 2)])
def test_of_modules_that_add_nothing_nothing_is(
    wrap: Callable[[Any], nn.Module], build: Callable[[], nn.Module]
) -> None:
    model = wrap(build()) if wrap is not nn.LazyLinear else nn.Sequential(nn.LazyLinear(2), build())
    assert notes(model=model) == []


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_wrapped_model_goes_by_its_own_names() -> None:
    parallel = nn.parallel.DistributedDataParallel
    assert notes(model=parallel(tied())) == []
    (note,) = notes(model=parallel(nn.Sequential(Table())))
    assert "adds 0.table, which" in note


def test_a_state_dict_that_fails_is_said() -> None:
    class Fails(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            raise RuntimeError("not before the first epoch")

    (note,) = notes(model=Fails(1, 1))
    assert "model.state_dict() fails" in note
    assert "not before the first epoch" in note


def test_objects_that_are_asked_by_state_dict_are_not_looked_at() -> None:
    assert notes(scheduler=torch.optim.lr_scheduler.ConstantLR(SGD(parameters(), lr=0.1))) == []


def test_a_run_says_it_once_in_the_log_and_in_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Table()
    loop = Loop({"model": model, "optimizer": Counting(model.parameters())}, lambda number, run: None)
    with (
        caplog.at_level(logging.WARNING),
        daemon_process(Path(os.environ["EVERSTEP_SOCKET"])),
        attached(loop, [tmp_path]) as run,
    ):
        for _ in range(3):
            run.step()
        notes = run.report().notes
    logged = [each.getMessage() for each in caplog.records if "state_dict_adds" in each.getMessage()]
    assert logged == [f"state_dict_adds run=overlap: {note}" for note in notes]
    assert [note.partition(",")[0] for note in notes] == [
        "model.state_dict() adds table",
        "optimizer.state_dict() adds global_step",
    ]


def test_a_lazy_module_is_said_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    loop = Loop({"model": model}, lambda number, run: None)
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])), attached(loop, [tmp_path]) as run:
        (note,) = run.report().notes
        model(torch.zeros(1, 2))
        run.step()
        assert run.report().notes == (note,)
    assert note.startswith("model.1.weight has no shape yet")
    assert f"module_is_lazy run=overlap: {note}" in caplog.messages

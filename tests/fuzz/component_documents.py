"""What a checkpoint holds beside tensors: a document for each component, and what ranks and attempts tell each other.

A component is asked whether it could be restored from the document (`check`): it changes nothing, so that all inputs
meet the same objects. What the frequency controller kept is put to use as well: an interval of 0 is no wrong type.
"""

import random

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from everstep.checkpoint.drift_machine import Block, Spread
from everstep.checkpoint.frequency_format import dump_memory, load_memory
from everstep.checkpoint.frequency_machine import FixedInterval, FrequencyMachine, FrequencyMemory
from everstep.checkpoint.frequency_meter_machine import LongSteps, MeterMemory
from everstep.checkpoint.frequency_types import CheckpointTaken, Figures, Limits, StepEnded
from everstep.core.errors import CorruptDataError, DataError, LoaderStateError, StateMismatchError
from everstep.dataloader import DataLoader
from everstep.hook.component import Component, make_components
from everstep.hook.history import History
from everstep.hook.horizon_machine import Plan
from everstep.hook.leaf_bytes import ArenaLeaves
from everstep.hook.rank_format import PlanMessage, RankState, dump_plan, dump_state
from everstep.hook.rng_state import RngState
from everstep.hook.run_state import RunState
from everstep.hook.state_testing import store_files
from everstep.hook.stored_state import StoredState
from everstep.hook.sweep_machine import Mark

REFUSALS = (DataError, StateMismatchError, LoaderStateError)


class _Model(nn.Module):
    """Parameters, buffers of every kind and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.register_buffer("mask", torch.eye(3).to_sparse())
        self.register_buffer("cache", torch.arange(4.0), persistent=False)

    def get_extra_state(self) -> object:
        return {"names": ("a", "b"), "seen": 7, "tensor": torch.ones(2)}

    def set_extra_state(self, state: object) -> None:
        del state


def _memory() -> FrequencyMemory:
    blocks = (Block(16, 0.5, 0.1), Block(1, 0.4, 0.0))
    meter = MeterMemory(
        step=blocks,
        stall=blocks,
        slower=blocks,
        persist=blocks,
        held=blocks,
        size_bytes=10**9,
        trained_s=5000.0,
        trainer_failures=2,
        node_failures=1,
        slower_but_long=blocks,
        long_steps=LongSteps(near=40, near_long=5, far=300, far_long=2),
    )
    return FrequencyMemory(meter=meter, interval_steps=20, slower_s=0.25)


def _components() -> list[Component]:
    torch.manual_seed(7)
    model = _Model()
    optimizer = torch.optim.AdamW(
        [{"params": model.layers[0].parameters()}, {"params": model.layers[1].parameters(), "lr": 0.5}]
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.layers(torch.ones(4, 3)).sum()).backward()
    optimizer.step()
    history = History()
    history.append(1, {"loss": 0.5})
    run = RunState(lambda: dump_memory(_memory()))
    run.step, run.epoch = 40, 2
    objects = {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "scaler": scaler,
        "loader": DataLoader(torch.utils.data.TensorDataset(torch.arange(10.0))),
        "generator": random.Random(7),
    }
    return [*make_components(objects, world_size=1), history, RngState(), run]


def _same_every_time() -> list[Component]:
    """Make them with the same random states in every process, and leave the process's own as they are."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(7)
    np.random.seed(7)
    try:
        return _components()
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)


_COMPONENTS = _same_every_time()
_FILES = store_files(_COMPONENTS)
_LEAVES = ArenaLeaves(_FILES.manifest, _FILES.slot, _FILES.offsets)
DOCUMENTS = _FILES.manifest.values


def parse_documents(content: bytes) -> object:
    """Ask every component whether the documents fit it, each for itself; raise the first refusal."""
    stored = StoredState(replace(_FILES.manifest, values=content), _LEAVES)
    refusals = [refusal for each in _COMPONENTS if (refusal := _refusal(each, stored)) is not None]
    if refusals:
        raise refusals[0]
    return stored.components


def _refusal(component: Component, stored: StoredState) -> Exception | None:
    try:
        component.check(stored)
    except REFUSALS as error:
        return error
    return None


MEMORIES = tuple(msgspec.json.encode(dump_memory(each)) for each in (_memory(), FrequencyMemory()))


def parse_memory(content: bytes) -> object:
    """Go on for some steps with what the last attempt kept."""
    try:
        document = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDataError("no JSON") from error
    machine = FrequencyMachine(Limits(most_s=600.0), memory=load_memory(document))
    for step in range(1, 5):
        machine.due(step, step + 2)
        machine.observe(CheckpointTaken(step=step))
        machine.observe(StepEnded(at_s=float(step), step_s=0.5, is_busy=bool(step % 2)))
    return machine.decision, machine.figures, machine.memory


_FIGURES = Figures(step=Spread(mean=0.5, deviation=0.1, count=9), stall=Spread(mean=0.1), fill={"node": 0.25})
RANK_STATE = dump_state(RankState(figures=_FIGURES, needed_s=1.5, mark=Mark(plan=3, step=40))).encode()
PLAN = dump_plan(
    PlanMessage(
        plan=Plan(number=7, start=40, horizon=44, steps=(40, 42), end="SIGTERM"),
        decision=FixedInterval(2).decision,
        needed_s=1.5,
    )
).encode()

import json
from dataclasses import replace
from typing import Any

import pytest
from training_simulator import Training, World

from everstep.checkpoint.drift_machine import Block, Spread
from everstep.checkpoint.frequency_format import dump_figures, dump_memory, load_figures, load_memory
from everstep.checkpoint.frequency_machine import CALM_CHECKPOINTS, FrequencyMemory
from everstep.checkpoint.frequency_meter_machine import LONG_KEPT, LongSteps, MeterMemory
from everstep.checkpoint.frequency_types import Figures
from everstep.core.errors import CorruptDataError, FormatVersionError


def through_json(document: object) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


def test_memory_comes_back_and_is_small() -> None:
    memory = Training(lambda _: World(noise=0.3)).run(1000).machine.memory
    document = through_json(dump_memory(memory))
    assert load_memory(document) == memory
    assert len(json.dumps(document)) < 16_000
    assert load_memory(through_json(dump_memory(FrequencyMemory()))) == FrequencyMemory()


def test_what_an_everstep_of_before_has_kept_is_taken_as_long_unchanged() -> None:
    memory = Training(lambda _: World()).run(1000).machine.memory
    document = through_json(dump_memory(memory))
    for name in ("unchanged", "low", "limits"):
        del document["memory"][name]
    assert load_memory(document) == replace(memory, unchanged=CALM_CHECKPOINTS, low=None, limits="")


def test_a_single_step_of_no_time_is_no_reason_to_forget_all() -> None:
    step = (Block(32, 0.2, 0.0), Block(1, 0.0, 0.0))
    memory = FrequencyMemory(meter=MeterMemory(step=step))
    assert load_memory(through_json(dump_memory(memory))) == memory
    nothing = FrequencyMemory(meter=MeterMemory(step=step[1:]))
    with pytest.raises(CorruptDataError, match="beyond all bounds"):
        load_memory(through_json(dump_memory(nothing)))


@pytest.mark.parametrize(
    "steps",
    [
        LongSteps(near=1, near_long=2),
        LongSteps(far=1, far_long=-1),
        LongSteps(far=2**60, far_long=LONG_KEPT + 1),
    ],
    ids=str,
)
def test_counts_of_long_steps_that_nobody_can_have_made_are_refused(steps: LongSteps) -> None:
    memory = FrequencyMemory(meter=MeterMemory(long_steps=steps))
    with pytest.raises(CorruptDataError, match="beyond all bounds"):
        load_memory(through_json(dump_memory(memory)))


def test_figures_come_back_and_are_small() -> None:
    figures = Training(lambda _: World(noise=0.3)).run(1000).machine.figures
    document = through_json(dump_figures(figures))
    assert load_figures(document) == figures
    assert len(json.dumps(document)) < 1000
    empty = Figures(step=Spread(mean=1.0))
    assert load_figures(through_json(dump_figures(empty))) == empty


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(FormatVersionError, match="format 2"):
        load_memory(through_json(dump_memory(FrequencyMemory())) | {"format": 2})


@pytest.mark.parametrize(
    "document", [None, [], {}, {"format": 1}, {"format": 1, "memory": {"slower_s": "x"}}, {"format": 0}]
)
def test_anything_else_is_refused(document: object) -> None:
    with pytest.raises(CorruptDataError, match="cannot be read"):
        load_memory(document)
    with pytest.raises(CorruptDataError, match="cannot be read"):
        load_figures(3)

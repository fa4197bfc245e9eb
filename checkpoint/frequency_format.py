"""The controller's memory and a rank's figures as JSON values: the only writer and the only reader of both. Pure."""

from functools import reduce
from typing import Literal, TypeVar

import msgspec

from ..core.converter import Converter
from ..core.errors import CorruptDataError, FormatVersionError
from .drift_machine import Block
from .frequency_machine import FrequencyMemory
from .frequency_meter_machine import LONG_KEPT, TIME_S_MAX
from .frequency_types import Decision, Figures

MEMORY_FORMAT = 1

_STEP_S_MIN = 1e-9
"""No step is shorter on average."""
_COUNT_MAX = 2**63 - 1

_Kind = TypeVar("_Kind")


class _Version(msgspec.Struct):
    format: int


class _Memory(msgspec.Struct):
    format: Literal[1]
    memory: FrequencyMemory


_VERSION = Converter(_Version)
_MEMORY = Converter(_Memory)
_FIGURES = Converter(Figures)
_DECISION = Converter(Decision)


def dump_memory(memory: FrequencyMemory) -> object:
    """Return what goes into a checkpoint: a few kilobytes."""
    return msgspec.to_builtins(_Memory(format=MEMORY_FORMAT, memory=memory))


def load_memory(document: object) -> FrequencyMemory:
    """Return what `dump_memory` was given.

    Raises:
        FormatVersionError: a newer everstep wrote it.
        CorruptDataError: it is something else.
    """
    version = _read(document, _VERSION).format
    if version > MEMORY_FORMAT:
        raise FormatVersionError(
            f"the frequency controller's memory has format {version}, this everstep knows {MEMORY_FORMAT}",
            hint="upgrade everstep, or start with fresh=True",
        )
    memory = _read(document, _MEMORY).memory
    if not _is_possible(memory):
        raise CorruptDataError(
            "figures of the frequency controller cannot be read: they are beyond all bounds"
        )
    return memory


def _is_possible(memory: FrequencyMemory) -> bool:
    """Tell whether what is kept can have been measured: the controller divides by it."""
    meter = memory.meter
    but_long = meter.slower_but_long or ()
    blocks = (*meter.step, *meter.stall, *meter.slower, *but_long, *meter.persist, *meter.held)
    waiting = (value for each in meter.waiting for value in each)
    counts = (meter.size_bytes, meter.trainer_failures, meter.node_failures)
    checkpoints = (memory.unchanged, memory.low or 0)
    steps = meter.long_steps
    return (
        all(1 <= block.samples <= _COUNT_MAX for block in blocks)
        and all(abs(block.mean) <= TIME_S_MAX and 0 <= block.squares <= TIME_S_MAX**3 for block in blocks)
        and all(block.mean > 0 or block.mean == block.squares == 0 for block in meter.step)
        and (not meter.step or reduce(Block.joined, meter.step).mean >= _STEP_S_MIN)
        and all(0 <= count <= _COUNT_MAX for count in (*counts, *checkpoints))
        and all(0 <= time_s <= TIME_S_MAX for time_s in (meter.trained_s, memory.slower_s, *waiting))
        and 0 <= steps.near_long <= min(steps.near, LONG_KEPT)
        and 0 <= steps.far_long <= min(steps.far, LONG_KEPT)
        and max(steps.near, steps.far) <= _COUNT_MAX
        and (memory.interval_steps is None or 1 <= memory.interval_steps <= _COUNT_MAX)
    )


def dump_figures(figures: Figures) -> object:
    """Return what a rank sends to rank 0: below a kilobyte."""
    return msgspec.to_builtins(figures)


def load_figures(document: object) -> Figures:
    """Return what `dump_figures` was given.

    Raises:
        CorruptDataError: it is something else.
    """
    return _read(document, _FIGURES)


def dump_decision(decision: Decision) -> object:
    """Return what rank 0 tells the others with a plan."""
    return msgspec.to_builtins(decision)


def load_decision(document: object) -> Decision:
    """Return what `dump_decision` was given.

    Raises:
        CorruptDataError: it is something else.
    """
    return _read(document, _DECISION)


def _read(document: object, converter: Converter[_Kind]) -> _Kind:
    try:
        return converter.convert(document)
    except msgspec.ValidationError as error:
        raise CorruptDataError(f"figures of the frequency controller cannot be read: {error}") from error

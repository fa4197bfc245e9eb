"""What ranks tell each other through the Store, as JSON: the only writer and the only reader. Pure."""

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ..checkpoint.frequency_format import dump_decision, dump_figures, load_decision, load_figures
from ..checkpoint.frequency_types import Decision, Figures
from ..core.errors import CorruptDataError
from .horizon_machine import Plan
from .sweep_machine import Mark

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What a rank tells rank 0 of itself."""

    figures: Figures
    """What it has measured."""
    mark: Mark


class _State(msgspec.Struct):
    figures: object
    mark: Mark


class _Plan(msgspec.Struct):
    plan: Plan
    decision: object


def dump_plan(plan: Plan, decision: Decision) -> str:
    """Return what all ranks read of a plan."""
    return msgspec.json.encode(_Plan(plan=plan, decision=dump_decision(decision))).decode()


def load_plan(text: bytes) -> tuple[Plan, Decision]:
    """Return what `dump_plan` was given.

    Raises:
        CorruptDataError: it is something else.
    """
    said = _read(text, _Plan)
    return said.plan, load_decision(said.decision)


def dump_state(state: RankState) -> str:
    """Return what rank 0 reads."""
    return msgspec.json.encode(_State(figures=dump_figures(state.figures), mark=state.mark)).decode()


def load_state(text: bytes) -> RankState:
    """Return what `dump_state` was given.

    Raises:
        CorruptDataError: it is something else.
    """
    said = _read(text, _State)
    return RankState(figures=load_figures(said.figures), mark=said.mark)


def _read(text: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(text, type=kind, strict=True)
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptDataError(
            f"what another rank said cannot be read: {error}", hint="all ranks must run the same version"
        ) from error

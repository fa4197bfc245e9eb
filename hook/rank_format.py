"""What ranks tell each other through the Store, as JSON: the only writer and the only reader. Pure."""

from dataclasses import dataclass, field
from typing import TypeVar, cast

import msgspec

from ..checkpoint.frequency_format import dump_decision, dump_figures, load_decision, load_figures
from ..checkpoint.frequency_types import Decision, Figures
from ..core.errors import CorruptDataError, EverstepError, error_from_code
from .horizon_machine import Plan
from .steering_machine import Steering
from .sweep_machine import Mark

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What a rank tells rank 0 of itself."""

    figures: Figures
    """What it has measured."""
    needed_s: float | None
    """How long a checkpoint takes it (`Pace.own_needed_s`)."""
    mark: Mark
    steering: Steering = field(default_factory=Steering)
    """What operators have asked of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMessage:
    """A plan, and what all ranks should know with it."""

    plan: Plan
    decision: Decision
    needed_s: float | None
    """How long a checkpoint takes the slowest rank."""
    left_s: float | None = None
    """Until somebody ends a rank, the first of them; None: nobody has announced it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank changes while it lives."""

    number: int
    silent: tuple[int, ...] = ()
    """Rank 0 says which others it does not hear, or which end at another boundary than it does."""
    step: int = 0
    """The newest boundary that it has come to."""
    is_last: bool = False
    """It passes no other one."""
    has_closed: bool = False
    """It says and hears no more."""


class _State(msgspec.Struct):
    figures: object
    needed_s: float | None
    mark: Mark
    steering: Steering


class _Plan(msgspec.Struct):
    plan: Plan
    decision: object
    needed_s: float | None
    left_s: float | None


_STATE = msgspec.json.Decoder(_State)
_PLAN = msgspec.json.Decoder(_Plan)
_BEAT = msgspec.json.Decoder(Beat)


def dump_plan(message: PlanMessage) -> str:
    """Return what all ranks read of a plan."""
    decision = dump_decision(message.decision)
    said = _Plan(plan=message.plan, decision=decision, needed_s=message.needed_s, left_s=message.left_s)
    return msgspec.json.encode(said).decode()


def load_plan(text: bytes) -> PlanMessage:
    """Return what `dump_plan` was given.

    Raises:
        CorruptDataError: it is something else.
    """
    said = _read(text, _PLAN)
    decision = load_decision(said.decision)
    return PlanMessage(plan=said.plan, decision=decision, needed_s=said.needed_s, left_s=said.left_s)


def dump_state(state: RankState) -> str:
    """Return what rank 0 reads."""
    said = _State(
        figures=dump_figures(state.figures),
        needed_s=state.needed_s,
        mark=state.mark,
        steering=state.steering,
    )
    return msgspec.json.encode(said).decode()


def load_state(text: bytes) -> RankState:
    """Return what `dump_state` was given.

    Raises:
        CorruptDataError: it is something else.
    """
    said = _read(text, _STATE)
    figures = load_figures(said.figures)
    return RankState(figures=figures, needed_s=said.needed_s, mark=said.mark, steering=said.steering)


def dump_beat(beat: Beat) -> str:
    """Return what other ranks read of a beat."""
    return msgspec.json.encode(beat).decode()


def load_beat(text: bytes) -> Beat:
    """Return what `dump_beat` was given.

    Raises:
        CorruptDataError: it is something else.
    """
    return _read(text, _BEAT)


def _read(text: bytes, decoder: msgspec.json.Decoder[_Kind]) -> _Kind:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptDataError(
            f"what another rank said cannot be read: {error}", hint="all ranks must run the same version"
        ) from error


def dump_error(error: EverstepError) -> dict[str, str]:
    """Return what other ranks hear of an error, as JSON-able data."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def load_error(item: object, rank: int) -> EverstepError | None:
    """Return the error of another rank, which its message names; None: what it says is none."""
    said = cast("dict[str, str]", item)
    if "code" not in said:
        return None
    return error_from_code(said["code"], f"rank {rank}: {said['message']}", said["hint"])

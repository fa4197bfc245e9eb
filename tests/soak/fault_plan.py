"""Which fault comes when: a pure function of a seed, so that a soak is repeated by its number."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

LONG_FORM_S = 1800.0
"""From here on faults come every 30 to 120 seconds; a shorter soak has them more often, but for a bound."""
GAP_S = (30.0, 120.0)
GAP_LEAST_S = 8.0
"""A daemon that was killed is found again by its trainers, and something becomes durable, before the next fault."""
CALM_S = 12.0
"""At the beginning, and at the end."""


class FaultKind(Enum):
    """What is done to the node."""

    KILL_TRAINER = "kill -9 of a trainer"
    KILL_DAEMON = "kill -9 of the daemon"
    STOP_TRAINER = "SIGSTOP of a trainer"
    STOP_DAEMON = "SIGSTOP of the daemon"
    FULL_DRIVE = "a full drive"
    SLOW_DRIVE = "a slow drive"
    LOST_DRIVE = "a drive that answers EIO"
    CLOCK_JUMP = "a jump of the clock"


HOLD_S = {
    FaultKind.KILL_TRAINER: (0.0, 0.0),
    FaultKind.KILL_DAEMON: (0.0, 2.0),
    FaultKind.STOP_TRAINER: (1.0, 6.0),
    FaultKind.STOP_DAEMON: (1.0, 6.0),
    FaultKind.FULL_DRIVE: (2.0, 6.0),
    FaultKind.SLOW_DRIVE: (2.0, 6.0),
    FaultKind.LOST_DRIVE: (2.0, 5.0),
    FaultKind.CLOCK_JUMP: (0.0, 0.0),
}
"""How long each lasts: least and most."""
NEEDS_DRIVES = frozenset({FaultKind.FULL_DRIVE, FaultKind.LOST_DRIVE})
"""These need file systems of their own, and with them root."""
JUMPS_S = (-86_400.0, -3_600.0, -5.0, 5.0, 3_600.0, 86_400.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: when it begins, in seconds since the soak's beginning, to what it is done and for how long."""

    at_s: float
    kind: FaultKind
    target: int
    """Number of a trainer or of a drive, modulo how many there are."""
    hold_s: float
    amount: float
    """Seconds of a jump, bytes per second of a slow drive; 0 for the others."""

    def facts(self) -> dict[str, object]:
        """Return what a record says of it."""
        return {**asdict(self), "kind": self.kind.value}


def plan_faults(seed: int, duration_s: float, kinds: Sequence[FaultKind] = tuple(FaultKind)) -> list[Fault]:
    """Return the faults of a soak: each kind comes once before any comes again, in an order that the seed decides."""
    source = random.Random(seed)
    least_s, most_s = gap_s(duration_s)
    faults, at_s, deck = list[Fault](), CALM_S, list[FaultKind]()
    while True:
        deck = deck or source.sample(list(kinds), len(kinds))
        kind = deck.pop()
        hold_s = source.uniform(*HOLD_S[kind])
        fault = Fault(
            at_s=at_s,
            kind=kind,
            target=source.randrange(1 << 16),
            hold_s=hold_s,
            amount=_amount(kind, source),
        )
        if at_s + hold_s > duration_s - CALM_S:
            return faults
        faults.append(fault)
        at_s += hold_s + source.uniform(least_s, most_s)


def gap_s(duration_s: float) -> tuple[float, float]:
    """Return how long it is calm between two faults: least and most."""
    scale = min(1.0, duration_s / LONG_FORM_S)
    return max(GAP_LEAST_S, GAP_S[0] * scale), max(1.5 * GAP_LEAST_S, GAP_S[1] * scale)


def _amount(kind: FaultKind, source: random.Random) -> float:
    match kind:
        case FaultKind.CLOCK_JUMP:
            return source.choice(JUMPS_S)
        case FaultKind.SLOW_DRIVE:
            return source.uniform(200_000, 2_000_000)
        case _:
            return 0.0

"""When a job fails: processes of failures with a given mean time between them, the same for the same seed."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random

from .frequency_types import FailureKind

GPU_MTBF_S = 54 * 86400 * 16384 / 419
"""Of one GPU with its share of everything: Llama 3 405B, 419 unexpected interruptions in 54 days on 16,384 H100."""
HARDWARE_SHARE = 0.78
"""Of these were hardware, after which memory is lost; the others leave the node and what its memory holds."""

WEIBULL_SHAPE = 0.7
"""Below 1: a job that has just failed fails again sooner, as field studies of clusters find."""
BURST_SIZE = 3.0
"""Mean failures of a burst: a node that is repaired in vain, a switch that flaps."""
BURST_GAP_S = 600.0
SPOT_NOTICE_S = 120.0
"""What AWS gives; GCP and Azure give 30 s."""


class FailureProcess(Enum):
    """How failures follow each other."""

    EXPONENTIAL = "exponential"
    WEIBULL = "weibull"
    BURSTS = "bursts"
    SPOT = "spot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure of the whole job."""

    at_s: float
    kind: FailureKind
    notice_s: float = 0.0
    """How long before it is known."""


def mtbf_of_gpus(count: int) -> float:
    """Return the mean time between failures of a job on so many GPUs at the rate of Llama 3."""
    return GPU_MTBF_S / count


def failures_of(process: FailureProcess, mtbf_s: float, until_s: float, seed: int) -> tuple[Failure, ...]:
    """Return the failures before `until_s`, in order. The mean time between them is `mtbf_s` in each process."""
    draw = Random(f"{process.value} {seed}")
    times = _TIMES[process](draw, mtbf_s)
    found: list[Failure] = []
    for at_s in times:
        if at_s >= until_s:
            break
        is_spot = process is FailureProcess.SPOT
        is_hardware = is_spot or draw.random() < HARDWARE_SHARE
        found.append(
            Failure(
                at_s=at_s,
                kind=FailureKind.NODE if is_hardware else FailureKind.TRAINER,
                notice_s=SPOT_NOTICE_S if is_spot else 0.0,
            )
        )
    return tuple(found)


def _exponential(draw: Random, mtbf_s: float) -> Iterator[float]:
    at_s = 0.0
    while True:
        at_s += draw.expovariate(1 / mtbf_s)
        yield at_s


def _weibull(draw: Random, mtbf_s: float) -> Iterator[float]:
    scale_s = mtbf_s / math.gamma(1 + 1 / WEIBULL_SHAPE)
    at_s = 0.0
    while True:
        at_s += draw.weibullvariate(scale_s, WEIBULL_SHAPE)
        yield at_s


def _bursts(draw: Random, mtbf_s: float) -> Iterator[float]:
    """Each failure is followed by another one of its burst, or by the long wait for the next burst."""
    more = 1 - 1 / BURST_SIZE
    gap_s = min(BURST_GAP_S, mtbf_s / 2)
    wait_s = BURST_SIZE * mtbf_s - (BURST_SIZE - 1) * gap_s
    at_s = draw.expovariate(1 / wait_s)
    while True:
        yield at_s
        at_s += draw.expovariate(1 / (gap_s if draw.random() < more else wait_s))


_TIMES: dict[FailureProcess, Callable[[Random, float], Iterator[float]]] = {
    FailureProcess.EXPONENTIAL: _exponential,
    FailureProcess.WEIBULL: _weibull,
    FailureProcess.BURSTS: _bursts,
    FailureProcess.SPOT: _exponential,
}

"""Runs a parser on one input and says what it must not do; and all parsers for a long time."""

import time
import tracemalloc
from collections.abc import Sequence

from changes import inputs
from hypothesis import HealthCheck, Phase, given, seed, settings
from summary import Summary
from targets import TARGETS, Target

TIME_MAX_S = 1.0
MEMORY_MAX_BYTES = 64 << 20
_TRIES = 3
_ROUND_EXAMPLES = 300


def check(target: Target, content: bytes) -> None:
    """Parse, and fail on an error that is not declared, on more than a second and on more than 64 MiB.

    The best of a few tries counts: what ran in this process before may be collected meanwhile, or loaded at first use.
    """
    for _ in range(_TRIES - 1):
        taken_s, peak_bytes = _measured(target, content)
        if taken_s < TIME_MAX_S and peak_bytes < MEMORY_MAX_BYTES:
            return
    taken_s, peak_bytes = _measured(target, content)
    assert taken_s < TIME_MAX_S, f"{taken_s:.2f} s for {len(content)} bytes"
    assert peak_bytes < MEMORY_MAX_BYTES, f"{peak_bytes} bytes of memory for {len(content)} bytes"


def _measured(target: Target, content: bytes) -> tuple[float, int]:
    """Parse, and return the seconds and the bytes that it took; only declared errors."""
    tracemalloc.start()
    started_s = time.thread_time()
    try:
        target.parse(content)
    except target.errors:
        pass
    finally:
        taken_s = time.thread_time() - started_s
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return taken_s, peak_bytes


def fuzz(*, duration_s: float, seed_number: int, names: Sequence[str] = tuple(TARGETS)) -> Summary:
    """Give these parsers new inputs until the time is over, and return what they must not have done."""
    deadline_s = time.monotonic() + duration_s
    counts = dict.fromkeys(names, 0)
    failures: dict[str, str] = {}
    rounds = 0
    while time.monotonic() < deadline_s and len(failures) < len(names):
        for name in names:
            if name not in failures and time.monotonic() < deadline_s:
                try:
                    counts[name] += _round(TARGETS[name], seed_number + rounds)
                except Exception as exc:  # noqa: BLE001 (whatever it is, it is the finding)
                    failures[name] = f"{name}, seed {seed_number + rounds}: {type(exc).__name__}: {exc}"
        rounds += 1
    return Summary(
        what="inputs of parsers",
        count=sum(counts.values()),
        failures=tuple(failures.values()),
        seed=seed_number,
        counted={"rounds over all parsers": rounds},
    )


def _round(target: Target, number: int) -> int:
    """Try a few hundred inputs that this number decides, and return how many."""
    count = 0

    @seed(number)
    @settings(
        max_examples=_ROUND_EXAMPLES,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
    )
    @given(inputs(target))
    def search(content: bytes) -> None:
        nonlocal count
        count += 1
        check(target, content)

    search()
    return count

"""Calls that fail, in stores, of kinds and at numbers that no test has: what `test_faults.py` does once, for long."""

import errno
import math
import random
import sys
import time
from collections import Counter
from pathlib import Path

from fault_operations import CLOSED_OPERATIONS, OPERATIONS, ClosedOperation, Operation
from fault_template import LEAVES, Kind, Template, make_template
from faults import CALLS_MAX, FOREVER, Failing, fail
from places import memory_folder
from summary import Summary

from everstep.checkpoint.leaf import LeafSpec, whole_leaf
from everstep.checkpoint.testing import Mode

_NUMBERS = (errno.EIO, errno.EIO, errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENODEV)
_OPERATIONS: dict[str, Operation | ClosedOperation] = {**OPERATIONS, **CLOSED_OPERATIONS}
_PASSES_PER_STORE = 12
"""Operations, each with a failure at every call, on copies of one store."""


class _Search:
    def __init__(self, source: random.Random) -> None:
        self.failures: list[str] = []
        self.count = 0
        self.counted: Counter[str] = Counter()
        self._random = source

    def run(self, folder: Path, count_max: int, deadline_s: float) -> None:
        """Let operations fail in one store, in each of its kinds."""
        shape = self._random.randint(2, 3), self._leaves(), self._random.randrange(1 << 20)
        templates = {
            kind: make_template(
                folder / kind.name, kind, device_count=shape[0], leaves=shape[1], seed=shape[2]
            )
            for kind in Kind
        }
        self.counted["stores"] += 1
        for _ in range(_PASSES_PER_STORE):
            name = self._random.choice(list(_OPERATIONS))
            template = templates[_OPERATIONS[name].on]
            self._each_call(name, template, self._failing(template), count_max, deadline_s)

    def _leaves(self) -> tuple[LeafSpec, ...]:
        sizes = [
            self._random.choice((1, 511, 4096, 60_001, 1_300_000)) for _ in range(self._random.randint(0, 3))
        ]
        return (
            *LEAVES,
            *(whole_leaf(f"drawn.{number}", "uint8", (size,)) for number, size in enumerate(sizes)),
        )

    def _failing(self, template: Template) -> Failing:
        device = self._random.randrange(len(template.dirs)) if self._random.random() < 0.4 else None
        return Failing(
            number=self._random.choice(_NUMBERS),
            times=self._random.choice((1, 2, 3, 7, FOREVER)),
            mode=self._random.choice((Mode.NOT_DONE, Mode.NOT_DONE, Mode.DONE)),
            device=device,
        )

    def _each_call(
        self, name: str, template: Template, failing: Failing, count_max: int, deadline_s: float
    ) -> None:
        """Let each call of an operation fail, from the first one on, until there are no more."""
        for fail_at in range(1, CALLS_MAX):
            if self.count >= count_max or time.monotonic() >= deadline_s:
                return
            try:
                outcome = fail(template, _OPERATIONS[name], failing, fail_at)
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is the finding
                self.failures.append(f"{name}, call {fail_at}, {failing}: {type(exc).__name__}: {exc}")
                return
            if not outcome.reached:
                self.counted["operations at every call"] += 1
                return
            self.count += 1
            self.counted["of them survived"] += outcome.done


def fail_calls(*, seed: int, duration_s: float = math.inf, count: int = sys.maxsize) -> Summary:
    """Let calls fail, one pass over an operation after the other, and return what was not as it must be."""
    deadline_s = time.monotonic() + duration_s
    search = _Search(random.Random(seed))
    while search.count < count and time.monotonic() < deadline_s:
        with memory_folder() as folder:
            search.run(folder, count, deadline_s)
    return Summary(
        what="calls that failed",
        count=search.count,
        failures=tuple(search.failures),
        seed=seed,
        counted=search.counted,
    )

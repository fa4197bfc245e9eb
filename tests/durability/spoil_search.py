"""Several things spoilt at once, in stores of sizes that no test has: the long form of `test_corruptions.py`."""

import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import reduce
from pathlib import Path

from corruptions import CHANGES, NEEDS_ROOT, Places
from places import memory_folder
from spoilt_store import (
    FIRST,
    Checkpoints,
    Spot,
    Template,
    check_fsck,
    check_opened,
    make_template,
    spoil,
    spots,
)
from structures import SPOILS_BOTH, STRUCTURES
from summary import Summary

from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.testing import SMALL_LEAVES

_CASES_PER_STORE = 30
_SPOTS_MOST = 4
_CHANGES = [change for change in CHANGES if os.geteuid() == 0 or change not in NEEDS_ROOT]

Case = tuple[str, Callable[[Places], None], Checkpoints | None]
"""What it is, how it is done, and what must be there all the same."""


class _Search:
    def __init__(self, source: random.Random) -> None:
        self.failures: list[str] = []
        self.count = 0
        self.counted: Counter[str] = Counter()
        self._random = source

    def run(self, folder: Path, count_max: int, deadline_s: float) -> None:
        """Spoil copies of one store."""
        is_small = self._random.random() < 0.4
        sizes = [
            self._random.choice((0, 1, 4095, 50_003, 700_001)) for _ in range(self._random.randint(0, 3))
        ]
        drawn = [whole_leaf(f"drawn.{number}", "uint8", (size,)) for number, size in enumerate(sizes)]
        template = make_template(
            folder,
            device_count=2 if is_small else self._random.randint(2, 4),
            checkpoint_count=2 if is_small else self._random.randint(1, 5),
            leaves=(*SMALL_LEAVES, *drawn),
            seed=self._random.randrange(1 << 20),
        )
        self.counted["stores"] += 1
        for _ in range(_CASES_PER_STORE):
            if self.count >= count_max or time.monotonic() >= deadline_s:
                return
            has_structure = is_small and self._random.random() < 0.5
            case = self._structure() if has_structure else self._spoilt_files(template)
            self._try(template, case)
            self.count += 1
            self.counted["structures" if has_structure else "spoilt files"] += 1

    def _structure(self) -> Case:
        name = self._random.choice(list(STRUCTURES))
        return name, STRUCTURES[name], frozenset() if name in SPOILS_BOTH else frozenset((FIRST,))

    def _spoilt_files(self, template: Template) -> Case:
        """Return some of a store's files, each spoilt in a way of its own, the same on each copy of the store."""
        known = spots(template.original, [checkpoint.step for checkpoint in template.states])
        names = self._random.sample(list(known), self._random.randint(1, _SPOTS_MOST))
        changes = [self._random.choice(_CHANGES) for _ in names]
        hit, seed = [known[name] for name in names], self._random.randrange(1 << 32)
        said = ", ".join(f"{name} {change.__name__}" for name, change in zip(names, changes, strict=True))
        return (
            said,
            lambda places: spoil(hit, changes, places, random.Random(seed)),
            _stay(template, names, hit),
        )

    def _try(self, template: Template, case: Case) -> None:
        """Open one copy, inspect and repair another one."""
        name, change, stay = case
        for check in (check_opened, check_fsck):
            try:
                with template.copy() as places:
                    change(places)
                    check(template, places, stay, name)
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is the finding
                self.failures.append(f"{name}, {check.__name__}: {type(exc).__name__}: {exc}")


def _stay(template: Template, names: list[str], hit: list[Spot]) -> Checkpoints | None:
    """Return what must be there whatever these spots are; None where a store may be refused."""
    everything = frozenset(template.states)
    known = [spot.stay for spot in hit]
    if None in known:
        return None
    stay = reduce(frozenset.intersection, (each for each in known if each is not None), everything)
    spoilt = {name for name in names if name.startswith("manifest of")}
    for checkpoint in everything:
        copies = [f"manifest of {checkpoint.step} on {device}" for device in range(len(template.names))]
        if spoilt.issuperset(copies):
            stay -= {checkpoint}
    return stay


def spoil_stores(*, seed: int, duration_s: float = math.inf, count: int = sys.maxsize) -> Summary:
    """Spoil stores, one after the other, and return what was believed, lost or not found."""
    deadline_s = time.monotonic() + duration_s
    search = _Search(random.Random(seed))
    while search.count < count and time.monotonic() < deadline_s:
        with memory_folder() as folder:
            search.run(folder, count, deadline_s)
    return Summary(
        what="spoilt stores",
        count=search.count,
        failures=tuple(search.failures),
        seed=seed,
        counted=search.counted,
    )

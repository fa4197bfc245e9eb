"""Stores whose devices are away, in other places, doubled or retired at the start, over and over, with work in between.

The account of what must be offered is kept here, by what was acknowledged and where it lies: a checkpoint is offered
when everything of it is on members that are there, and a device that is there knows of it.
"""

import math
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from places import memory_folder
from summary import Summary

from everstep.checkpoint.collect import collect_garbage
from everstep.checkpoint.device_change import retire
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.store import Store
from everstep.checkpoint.testing import State, load, make_state, opened, save
from everstep.core.errors import EverstepError
from everstep.core.ids import CheckpointId

_UID = os.geteuid()
_RUN_NAME = "shuffled"
_ROUNDS_PER_STORE = 15
_KEEP = Keep(last=3)


@dataclass(slots=True)
class Saved:
    """An acknowledged checkpoint."""

    state: State
    parts: frozenset[str]
    """Devices with its segments, by id."""
    known: set[str]
    """Devices with its manifest, by id."""


class _Life:
    """One store of a few devices, from its birth on."""

    def __init__(self, folder: Path, source: random.Random, counted: Counter[str]) -> None:
        self._random, self._counted = source, counted
        self._folder = folder
        self._places = [folder / f"d{number}" for number in range(source.randint(2, 5))]
        self._at: dict[str, Path] = {}
        """Where each device is, by id; of one that is away: where it waits."""
        self._retired: set[str] = set()
        self._saved: dict[CheckpointId, Saved] = {}
        self._attempt = 0
        self._floor: CheckpointId | None = None
        for path in self._places:
            path.mkdir(parents=True)
        with opened(self._places) as (store, _):
            self._at = {device.device_id: device.path for device in store.devices}
            self._work(store, store.run(_UID, _RUN_NAME, create=True))

    @property
    def _members(self) -> set[str]:
        return self._at.keys() - self._retired

    def round(self) -> None:
        """Open a part of the store in some arrangement, work there, then open all of it."""
        self._refuse_doubles()
        away = self._move()
        self._open(away)
        self._bring_back()
        self._open(frozenset())

    # --- arrangements ---------------------------------------------------------------------------------------------

    def _move(self) -> frozenset[str]:
        """Hide some devices, but never all members, and deal the places anew to the others; return who is away."""
        stays = self._random.choice(sorted(self._members))
        away = frozenset(each for each in sorted(self._at) if each != stays and self._random.random() < 0.35)
        last_seen = [self._at[each] for each in sorted(away & self._members)]
        self._deal(away)
        for path in last_seen:
            if not path.exists() and self._random.random() < 0.5:
                path.mkdir()
                self._counted["empty directories in their place"] += 1
        self._counted["devices away"] += len(away)
        return away

    def _deal(self, away: frozenset[str]) -> None:
        """Move every device to a drawn place; those that are away to one that nobody names."""
        for device_id, path in self._at.items():
            self._at[device_id] = path.rename(self._folder / f"waits-{device_id}")
        free = self._random.sample(self._places, len(self._places))
        for device_id in sorted(self._at.keys() - away):
            self._at[device_id] = self._at[device_id].rename(free.pop())

    def _bring_back(self) -> None:
        """Let everybody be there again, each in some place; nothing was made where one was missing."""
        for path in self._places:
            if path.exists() and path not in self._at.values():
                assert list(path.iterdir()) == [], f"something was made in {path}, where a device is missing"
                path.rmdir()
        self._deal(frozenset())

    def _given(self) -> list[Path]:
        """Return the places that are named, in a drawn order."""
        there = [path for path in self._places if path.exists()]
        return self._random.sample(there, len(there))

    def _refuse_doubles(self) -> None:
        """A copy of a device, beside it or in place of another one, and a place named twice are refused, unchanged."""
        device_id = self._random.choice(sorted(self._members))
        copy = self._folder / "copy"
        shutil.copytree(self._at[device_id], copy)
        places = self._given()
        at = self._random.randrange(len(places))
        beside = [*places[:at], copy, *places[at:]]
        instead = [copy if path == places[at] and path != self._at[device_id] else path for path in places]
        before = _content([*self._at.values(), copy])
        for given in (beside, instead if copy in instead else beside, [*places, places[at]]):
            try:
                with opened(given):
                    pass
            except EverstepError:
                self._counted["doubles refused"] += 1
            else:
                raise AssertionError(f"opened with a double: {given}")
        assert _content([*self._at.values(), copy]) == before, "a double changed something"
        shutil.rmtree(copy)

    # --- what is there --------------------------------------------------------------------------------------------

    def _open(self, away: frozenset[str]) -> None:
        with opened(self._given()) as (store, report):
            run = store.run(_UID, _RUN_NAME)
            there = self._members - away
            assert {device.device_id for device in store.devices} == there
            assert {missing.device_id for missing in store.missing} == self._members & away
            assert report.quarantined_count == 0, report.problems
            self._learn(there)
            self._check(run, there)
            if self._members & away:
                assert report.orphan_count == 0
                assert collect_garbage(run, keep=_KEEP).reason, (
                    "something may be deleted on a part of the store"
                )
            else:
                assert (run.highest_attempt(), run.complete_floor()) == (self._attempt, self._floor)
            self._act(store, run, away)
            self._check(run, self._members - away)

    def _learn(self, there: set[str]) -> None:
        """Every device that is there has the manifest of what one of them knows: recovery copies it."""
        for saved in self._saved.values():
            if saved.known & there:
                saved.known |= there

    def _check(self, run: RunStore, there: set[str]) -> None:
        expected = {
            checkpoint
            for checkpoint, saved in self._saved.items()
            if saved.parts <= there and saved.known & there
        }
        assert set(run.offered()) == expected, f"offered {run.offered()}, expected {sorted(expected)}"
        for checkpoint in self._random.sample(sorted(expected), min(2, len(expected))):
            content = load(run, run.manifest(checkpoint, 0))
            assert content == self._saved[checkpoint].state.content, f"{checkpoint} has other bytes"
            self._counted["read back"] += 1

    # --- work -----------------------------------------------------------------------------------------------------

    def _act(self, store: Store, run: RunStore, away: frozenset[str]) -> None:
        chance = self._random.random()
        if chance < 0.6:
            self._work(store, run)
        elif chance < 0.8 and not self._members & away:
            self._collect(run)
        elif len(self._members) > 2 and len(self._members & away) <= 1:
            leaving = next(iter(self._members & away), self._random.choice(sorted(self._members)))
            self._leave(store, leaving)

    def _work(self, store: Store, run: RunStore) -> None:
        """Begin an attempt and save with the devices that are there; its number is no other one's anywhere."""
        self._attempt += 1
        run.begin_attempt(self._attempt, fresh=False)
        there = {device.device_id for device in store.devices}
        for step in range(1, self._random.randint(1, 3) + 1):
            checkpoint = CheckpointId(self._attempt, step)
            state = make_state(store, self._random.randrange(1 << 30))
            result = save(run, state, checkpoint)
            parts = frozenset(record.device_id for record in result.manifest.segments)
            assert parts <= there
            self._saved[checkpoint] = Saved(state, parts, set(there))
            run.set_complete_floor(checkpoint)
            self._floor = checkpoint
            self._counted["saved"] += 1

    def _collect(self, run: RunStore) -> None:
        newest = max(self._saved, default=None)
        removed = collect_garbage(run, keep=_KEEP).removed
        assert newest not in removed, "the newest was removed"
        for checkpoint in removed:
            self._saved.pop(checkpoint, None)
        self._counted["collected"] += len(removed)

    def _leave(self, store: Store, device_id: str) -> None:
        """Retire a device, there or away; who is away is told by nobody, and ignored when it is back."""
        retire(store, device_id, force=True, now_unix_s=1.0)
        self._retired.add(device_id)
        self._counted["retired"] += 1
        for checkpoint in [each for each, saved in self._saved.items() if device_id in saved.parts]:
            del self._saved[checkpoint]


def _content(directories: Iterable[Path]) -> dict[Path, bytes]:
    """Return every file that does not say who has opened the store."""
    return {
        path: path.read_bytes()
        for each in directories
        for path in each.rglob("*")
        if path.is_file() and path.name not in ("lock", "disk.id")
    }


def shuffle_devices(*, seed: int, duration_s: float = math.inf, count: int = sys.maxsize) -> Summary:
    """Open stores in arrangement after arrangement, and return what was not as it must be; one finding a store."""
    deadline_s = time.monotonic() + duration_s
    source, counted = random.Random(seed), Counter[str]()
    failures: list[str] = []
    done = 0
    while done < count and time.monotonic() < deadline_s:
        with memory_folder() as folder:
            counted["stores"] += 1
            try:
                life = _Life(folder, source, counted)
                for _ in range(_ROUNDS_PER_STORE):
                    if done >= count or time.monotonic() >= deadline_s:
                        break
                    life.round()
                    done += 1
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is the finding
                failures.append(f"store {counted['stores']}, arrangement {done}: {type(exc).__name__}: {exc}")
                done += 1
    return Summary(
        what="arrangements of devices", count=done, failures=tuple(failures), seed=seed, counted=counted
    )

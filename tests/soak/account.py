"""What trainers have said of their states, and what must hold of everything that comes back: pure, and of no product.

A trainer says what its state is before each boundary (`state`), what it was told is complete (`acknowledged`), and
what a restart gave it (`begun`). From these alone follows what may never happen.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Mark = tuple[int, int]
"""(attempt, step)."""


@dataclass(slots=True)
class _Run:
    """One run, as its trainers tell it."""

    world_size: int = 1
    sample_count: int = 0
    digests: defaultdict[Mark, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    batches: dict[Mark, dict[int, tuple[int, tuple[int, ...]]]] = field(default_factory=dict)
    parents: dict[int, Mark | None] = field(default_factory=dict)
    """What each attempt began from, as the first of its ranks said."""
    acknowledged: Mark | None = None
    listing: Mark | None = None
    """What was acknowledged when somebody began to list the run's checkpoints."""
    acknowledged_in_life: list[Mark] = field(default_factory=list[Mark])
    """Since the daemon was started last."""


class Account:
    """All runs. Every method that takes something said returns the sentences of what must not have happened."""

    def __init__(self) -> None:
        self.runs: defaultdict[str, _Run] = defaultdict(_Run)
        self.counts: Counter[str] = Counter()
        self.unsaid: set[tuple[str, Mark]] = set()
        """Runs and checkpoints that no event named, though they were acknowledged."""

    def take(self, said: Mapping[str, object]) -> list[str]:
        """Take one message; KeyError for what nobody knows."""
        self.counts[str(said["what"])] += 1
        return getattr(self, f"on_{said['what']}")(
            **{key: each for key, each in said.items() if key != "what"}
        )

    # -- trainers

    def on_begun(
        self,
        *,
        run: str,
        rank: int,
        world_size: int,
        attempt: int,
        restored: list[int] | None,
        digest: str,
        samples: int,
        source: str,
    ) -> list[str]:
        """A rank has restored, or begun from nothing."""
        known = self.runs[run]
        known.world_size, known.sample_count = world_size, samples
        mark: Mark | None = None if restored is None else (restored[0], restored[1])
        self.counts[f"restored from {source}" if mark else "begun from nothing"] += 1
        who = f"{run} rank {rank} attempt {attempt}"
        found: list[str] = []
        if attempt in known.parents and known.parents[attempt] != mark:
            found.append(f"{who}: a mixture, it restored {mark} and another rank {known.parents[attempt]}")
        if attempt not in known.parents and known.parents and attempt <= max(known.parents):
            found.append(f"{who}: not a new attempt, {max(known.parents)} was there before")
        known.parents.setdefault(attempt, mark)
        if known.acknowledged is not None and (mark is None or mark < known.acknowledged):
            found.append(f"{who}: {known.acknowledged} was acknowledged, and it restored {mark}")
        if mark is not None:
            found += self.on_found(run=run, rank=rank, attempt=mark[0], step=mark[1], digest=digest)
        return found + self._exactly_once(run, known)

    def on_state(
        self, *, run: str, rank: int, attempt: int, step: int, digest: str, epoch: int, ids: list[int] | None
    ) -> list[str]:
        """A rank is about to pass a boundary with this state, to which this batch was the last."""
        known, mark = self.runs[run], (attempt, step)
        if known.digests[mark].setdefault(rank, digest) != digest:
            return [f"{run} rank {rank}: two states at {mark}"]
        if ids is not None:
            known.batches.setdefault(mark, {})[rank] = (epoch, tuple(ids))
        return []

    def on_acknowledged(self, *, run: str, rank: int, attempt: int, step: int) -> list[str]:
        """A rank was told that this is complete."""
        known, mark = self.runs[run], (attempt, step)
        if known.acknowledged is None or mark > known.acknowledged:
            known.acknowledged = mark
            known.acknowledged_in_life.append(mark)
            self.counts["checkpoints acknowledged"] += 1
        missing = set(range(known.world_size)) - known.digests[mark].keys()
        if missing:
            return [
                f"{run} rank {rank}: {mark} is complete, but ranks {sorted(missing)} never had such a state"
            ]
        return []

    def on_wrong_sample(self, *, run: str, rank: int, sample: int) -> list[str]:
        """A sample came back with other bytes than its source has."""
        return [f"{run} rank {rank}: sample {sample} is not what its source has"]

    def on_cost(self, *, run: str, share: float, budget: float, steps: int) -> list[str]:
        """An undisturbed attempt with a budget has passed so many boundaries at this share of its time."""
        if share > budget:
            return [
                f"{run}: checkpoints took {100 * share:.2f} % of {steps} steps, {100 * budget:.2f} % were asked"
            ]
        return []

    # -- who looks from outside

    def on_found(self, *, run: str, rank: int, attempt: int, step: int, digest: str) -> list[str]:
        """These bytes came back as the state of (attempt, step)."""
        mark = (attempt, step)
        said = self.runs[run].digests.get(mark, {}).get(rank)
        if said is None:
            return [f"{run} rank {rank}: {mark} came back, a state that it never said it had"]
        self.counts["states compared"] += 1
        return [] if said == digest else [f"{run} rank {rank}: {mark} came back with other bytes"]

    def on_listing(self, *, run: str) -> list[str]:
        """The run's checkpoints are going to be listed."""
        self.runs[run].listing = self.runs[run].acknowledged
        return []

    def on_listed(self, *, run: str, complete: list[list[int]]) -> list[str]:
        """These are complete, as the service or the devices say."""
        known = self.runs[run]
        newest = max(((each[0], each[1]) for each in complete), default=None)
        if known.listing is not None and (newest is None or newest < known.listing):
            return [f"{run}: {known.listing} was acknowledged, and the newest of the list is {newest}"]
        return []

    def on_daemon_started(self) -> list[str]:
        """It counts from nothing now."""
        for known in self.runs.values():
            known.acknowledged_in_life.clear()
        return []

    def on_metrics(self, *, shards_persisted: float, shards_counted: int) -> list[str]:
        """What the metrics and the control API of the daemon count, read while nothing was being written."""
        found: list[str] = []
        if shards_persisted != shards_counted:
            found.append(f"the metrics count {shards_persisted:.0f} shards, the control API {shards_counted}")
        # A trainer may tell of a checkpoint when the daemon that wrote it is no more: one for each run.
        told = sum(max(0, len(run.acknowledged_in_life) - 1) * run.world_size for run in self.runs.values())
        if told > shards_persisted:
            found.append(f"{told} shards were acknowledged, and the metrics count {shards_persisted:.0f}")
        return found

    def expected_events(self) -> dict[str, list[Mark]]:
        """Return the checkpoints of each run that this daemon has completed: each rank may be late with one before."""
        return {name: run.acknowledged_in_life[run.world_size :] for name, run in self.runs.items()}

    def on_events(
        self, *, run: str, expected: list[list[int]], complete: list[list[int]], is_whole: bool
    ) -> list[str]:
        """The daemon's events say that these were completed; `is_whole`: none of them were dropped as too many."""
        said = Counter(_mark(each) for each in complete)
        self.counts["events of checkpoints"] += len(said)
        found = [
            f"{run}: {mark} has {count} events of being complete" for mark, count in said.items() if count > 1
        ]
        for mark in unsaid(expected, complete, is_whole=is_whole):
            if (run, mark) not in self.unsaid:  # else it was found before
                self.unsaid.add((run, mark))
                found.append(f"{run}: {mark} was acknowledged, and no event says that it is complete")
        return found

    def on_finding(self, *, text: str) -> list[str]:
        """Who drives the soak has seen what must not be."""
        return [text]

    def on_end(self) -> list[str]:
        """Everything is over: look at each run's whole lineage."""
        return [text for name, run in self.runs.items() for text in self._exactly_once(name, run)]

    # -- lineages

    def lineage(self, name: str) -> list[Mark]:
        """Return the boundaries of the states that survived, oldest first."""
        run = self.runs[name]
        if not run.parents:
            return []
        attempt = max(run.parents)
        mine = [
            step for at, step in run.batches if at == attempt and len(run.batches[at, step]) == run.world_size
        ]
        found, last = list[Mark](), max(mine, default=0)
        while True:
            parent = run.parents.get(attempt)
            found += [(attempt, step) for step in range(last, parent[1] if parent else 0, -1)]
            if parent is None:
                return found[::-1]
            attempt, last = parent

    def _exactly_once(self, name: str, run: _Run) -> list[str]:
        """Every sample of every epoch that ended came exactly once, and no boundary is missing."""
        epochs: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for mark in self.lineage(name):
            ranks = run.batches.get(mark, {})
            if len(ranks) < run.world_size and not _is_last_boundary(run, mark):
                return [
                    f"{name}: boundary {mark} of the lineage is not known of ranks {_without(run, ranks)}"
                ]
            for epoch, ids in ranks.values():
                epochs[epoch].update(ids)
        ended = sorted(epochs)[:-1]
        self.counts["epochs checked"] += len(ended)
        return [
            f"{name}: epoch {epoch} of the lineage has {_odd(epochs[epoch], run.sample_count)}"
            for epoch in ended
            if epochs[epoch] != Counter(range(run.sample_count))
        ]


def unsaid(
    expected: Iterable[Iterable[int]], complete: Iterable[Iterable[int]], *, is_whole: bool
) -> list[Mark]:
    """Return what of `expected` no event names; where the log has dropped its oldest, what came after its first."""
    said = {_mark(each) for each in complete}
    oldest = min(said, default=None)
    marks = [_mark(each) for each in expected]
    return [
        mark for mark in marks if mark not in said and (is_whole or (oldest is not None and mark > oldest))
    ]


def _mark(pair: Iterable[int]) -> Mark:
    attempt, step = pair
    return attempt, step


def _is_last_boundary(run: _Run, mark: Mark) -> bool:
    """Tell whether a run was closed with it: nothing is trained there, so it has a state and no batch."""
    return not run.batches.get(mark) and len(run.digests.get(mark, {})) == run.world_size


def _without(run: _Run, ranks: Iterable[int]) -> list[int]:
    return sorted(set(range(run.world_size)) - set(ranks))


def _odd(seen: Counter[int], count: int) -> str:
    missing = [each for each in range(count) if not seen[each]]
    double = [each for each, times in seen.items() if times > 1]
    return (
        f"{len(missing)} samples missing {missing[:5]} and {len(double)} more than once {sorted(double)[:5]}"
    )

"""What runs did in the last hour, for speed and stalls over time: sums that trainers tell, kept at intervals. Pure."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SAMPLE_S = 5.0
SAMPLES_MAX = 720
"""An hour."""
RUNS_MAX = 64
"""About 150 KiB each; the one that was heard of longest ago is forgotten."""
RECENT_S = 60.0
"""What "now" means: trainers tell their sums every few seconds."""
TRAIN_S_MIN, SHARE_S_MIN = 5.0, 0.5
"""Of less training nothing is said: the first boundary alone is all stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What one run's slowest rank has told since it attached; each only grows. Or what it has done since a moment."""

    steps: int
    train_s: float
    stall_s: float
    """Of it, cost of checkpoints."""
    data_s: float
    """Of it, waits for data."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of training time in an interval that ended at `at_unix_s`: stalled by checkpoints, and for data."""

    at_unix_s: float
    stall: float
    data: float


class RunHistory:
    """The samples of one run. A trainer that starts again begins at nothing, and so do they."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Sums]] = deque(maxlen=SAMPLES_MAX)

    def add(self, at_unix_s: float, sums: Sums) -> None:
        """Take a sample, unless nothing was told since the last one."""
        if not self._samples or sums != self._samples[-1][1]:
            self._samples.append((at_unix_s, sums))

    def recent(self, now_unix_s: float) -> tuple[float, float, float] | None:
        """Return (steps per second, stall share, data share) of about the last minute; None: nothing was told."""
        done = self.done(now_unix_s, RECENT_S)
        if done is None:
            return None
        return done.steps / done.train_s, done.stall_s / done.train_s, done.data_s / done.train_s

    def done(self, now_unix_s: float, over_s: float) -> Sums | None:
        """Return what was done in about the last `over_s`; None: nothing was told lately, or too little."""
        if not self._samples or now_unix_s - self._samples[-1][0] > RECENT_S:
            return None
        last = self._samples[-1][1]
        since = Sums(steps=0, train_s=0.0, stall_s=0.0, data_s=0.0)
        for at_unix_s, sums in reversed(self._samples):
            if sums.train_s > last.train_s:  # of the trainer before
                break
            if at_unix_s < now_unix_s - over_s or last.train_s - sums.train_s > over_s:
                since = sums
                break
            if sums is not last:
                since = sums
        train_s = last.train_s - since.train_s
        if train_s < TRAIN_S_MIN:
            return None
        return Sums(
            steps=last.steps - since.steps,
            train_s=train_s,
            stall_s=max(0.0, last.stall_s - since.stall_s),
            data_s=max(0.0, last.data_s - since.data_s),
        )

    def shares(self) -> Sequence[Share]:
        """Return what part of training stood still between each two samples, the oldest first."""
        found: list[Share] = []
        samples = list(self._samples)
        for (_, before), (at_unix_s, sums) in pairwise(samples):
            train_s = sums.train_s - before.train_s
            if train_s >= SHARE_S_MIN:
                stall = min(1.0, max(0.0, sums.stall_s - before.stall_s) / train_s)
                data = min(1.0, max(0.0, sums.data_s - before.data_s) / train_s)
                found.append(Share(at_unix_s, round(stall, 4), round(data, 4)))
        return found


class History:
    """The histories of runs, by owner and id."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[int, str], RunHistory] = OrderedDict()

    def of(self, key: tuple[int, str]) -> RunHistory:
        """Return the history of a run; an empty one where nothing was told."""
        return self._runs.get(key) or RunHistory()

    def add(self, key: tuple[int, str], at_unix_s: float, sums: Sums) -> None:
        """Take a sample of a run."""
        self._runs.setdefault(key, RunHistory()).add(at_unix_s, sums)
        self._runs.move_to_end(key)
        while len(self._runs) > RUNS_MAX:
            self._runs.popitem(last=False)

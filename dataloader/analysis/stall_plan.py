"""Where the time of a step went: fetch, preparation, copy to the device, compute. Arithmetic only.

Two views of the same step. The *split* is seen from one run: the loop's wait for a batch is shared between fetch and
preparation as the workers' own time was. The *stalls* come from three runs that differ in one thing each, as
DS-Analyzer does it (VLDB'21, section 4): synthetic (one batch again and again), warm (files in memory), cold (files on
storage). The preparation stall is warm less synthetic, the fetch stall cold less warm.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """Seconds that preparing took, summed over workers (or in the training process, where there are none)."""

    samples: int = 0
    busy_s: float = 0.0
    """Wall time inside the dataset and the collate function."""
    fetch_s: float = 0.0
    """Of it, waiting for stored bytes."""
    queued_s: float = 0.0
    """Of it, waiting for a core."""

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured."""
        assert self.samples >= 0
        assert min(self.busy_s, self.fetch_s, self.queued_s) >= 0.0

    @property
    def preparation_s(self) -> float:
        """Wall time that was neither fetch nor waiting for a core."""
        return max(0.0, self.busy_s - self.fetch_s - self.queued_s)

    @property
    def fetch_share(self) -> float:
        """How much of the time that a batch took was fetch, 0 to 1; waiting for a core counts as preparation."""
        return min(1.0, self.fetch_s / self.busy_s) if self.busy_s > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """One step, in seconds, mean over many. The four parts sum up to the step."""

    fetch_s: float
    preparation_s: float
    copy_s: float
    compute_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.fetch_s + self.preparation_s + self.copy_s + self.compute_s

    @property
    def stall_share(self) -> float:
        """Share of the step in which the loop waited for data, 0 to 1."""
        return (self.fetch_s + self.preparation_s) / self.step_s if self.step_s > 0.0 else 0.0


def split_step(*, step_s: float, wait_s: float, copy_s: float, work: WorkerTimes) -> StepSplit:
    """Return the parts of a mean step, of which `wait_s` was waiting for the batch.

    The wait is attributed in proportion to what the workers did: a batch that was three quarters fetch makes a wait
    that is three quarters fetch. Without numbers from the workers all of it is preparation.
    """
    assert step_s >= 0.0
    wait_s = min(max(wait_s, 0.0), step_s)
    copy_s = min(max(copy_s, 0.0), step_s - wait_s)
    fetch_s = wait_s * work.fetch_share
    return StepSplit(
        fetch_s=fetch_s,
        preparation_s=wait_s - fetch_s,
        copy_s=copy_s,
        compute_s=step_s - wait_s - copy_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """What three runs say of one sample, in seconds; noise that would make a stall negative is cut off at 0."""

    compute_s: float
    preparation_stall_s: float
    fetch_stall_s: float

    @property
    def preparation_share(self) -> float:
        """Preparation stall as a share of the time with everything in memory, 0 to 1."""
        whole_s = self.compute_s + self.preparation_stall_s
        return self.preparation_stall_s / whole_s if whole_s > 0.0 else 0.0

    @property
    def fetch_share(self) -> float:
        """Fetch stall as a share of the time with nothing in memory, 0 to 1."""
        whole_s = self.compute_s + self.preparation_stall_s + self.fetch_stall_s
        return self.fetch_stall_s / whole_s if whole_s > 0.0 else 0.0


def stalls_of(*, synthetic_s: float, warm_s: float, cold_s: float) -> Stalls:
    """Return the stalls, given seconds per sample in each run."""
    assert min(synthetic_s, warm_s, cold_s) >= 0.0
    warm_s = max(warm_s, synthetic_s)
    return Stalls(
        compute_s=synthetic_s,
        preparation_stall_s=warm_s - synthetic_s,
        fetch_stall_s=max(cold_s, warm_s) - warm_s,
    )

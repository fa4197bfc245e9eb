"""What a replay of a job knows of it, and what comes out, as values. Times in seconds."""

from dataclasses import dataclass, replace

from .frequency_types import BUDGET_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a step and a checkpoint cost at some time."""

    step_s: float
    stall_s: float
    """Of one checkpoint: eager copy and guard."""
    slower: float
    """What steps are slower by, of themselves, while a snapshot is copied or written."""
    copy_s: float
    persist_s: float

    def times(self, *, step: float = 1.0, stall: float = 1.0, persist: float = 1.0) -> "Costs":
        """Return these costs, some of them multiplied."""
        return replace(
            self,
            step_s=self.step_s * step,
            stall_s=self.stall_s * stall,
            persist_s=self.persist_s * persist,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """From `begin_s` on, by the clock on the wall, these costs hold."""

    begin_s: float
    costs: Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job."""

    phases: tuple[Phase, ...]
    """In order; the first begins at 0."""
    duration_s: float
    mtbf_s: float
    """What it may be told of: of its failures, in the mean."""
    epoch_steps: int
    fixed_steps: int
    """What somebody would have written into a script."""
    slot_count: int = 2
    budget: float = BUDGET_DEFAULT
    restart_s: float = 120.0
    """From the death of a node until the job trains again, reading included."""
    restart_memory_s: float = 30.0
    """The same after a crash of a trainer whose node still holds the snapshot."""
    evaluate_each: int = 0
    """After so many steps each the job evaluates, within the step that follows; 0: never."""
    evaluation_s: float = 0.0
    """No boundary comes meanwhile."""

    def __post_init__(self) -> None:
        begins = [phase.begin_s for phase in self.phases]
        assert begins == sorted(begins)
        assert begins[0] == 0.0

    def costs_at(self, now_s: float) -> Costs:
        """Return what holds at a time."""
        return next(phase.costs for phase in reversed(self.phases) if phase.begin_s <= now_s)

    def steps_until_evaluation(self, step: int) -> int | None:
        """Return how many steps come before one that evaluates; None: there is none."""
        return -(step + 1) % self.evaluate_each if self.evaluate_each else None

    def next_change_s(self, now_s: float) -> float:
        """Return when other costs begin to hold; the job's end if none do."""
        return min((phase.begin_s for phase in self.phases if phase.begin_s > now_s), default=self.duration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some steps without a checkpoint between them."""

    at_s: float
    """When they had ended."""
    steps: int
    busy_steps: int
    """Beside which something was copied or written."""
    step_s: float
    """Of a quiet step."""
    slower_s: float
    """What the busy ones took longer, altogether."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where the time of one job went; all parts add up to `wall_s`."""

    wall_s: float
    useful_s: float
    """What the surviving steps would have taken without checkpoints and failures."""
    stall_s: float
    waited_s: float
    """For a place to put a checkpoint, where the policy waits."""
    slower_s: float
    lost_s: float
    """Work that was done again."""
    restart_s: float
    checkpoints: int
    skipped: int
    """No slot was free, and the policy does not wait."""
    failures: int

    @property
    def goodput(self) -> float:
        """Share of the time that made progress."""
        return self.useful_s / self.wall_s

    @property
    def overhead(self) -> float:
        """What checkpoints cost, as a share of the time that training took without."""
        trained_s = self.useful_s + self.lost_s
        return (self.stall_s + self.waited_s + self.slower_s) / trained_s if trained_s else 0.0

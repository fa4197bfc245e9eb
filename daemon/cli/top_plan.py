"""What `everstep top` shows and how it answers to keys, without a terminal or a clock. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from ..control.views import StatusView
from ..web.history_machine import History
from ..web.verdict_plan import Finding, RunFacts, facts_of, findings_of, sums_of


class Key(Enum):
    """What a key means."""

    QUIT = "quit"
    UP = "up"
    DOWN = "down"


_KEYS: Mapping[bytes, Key] = {
    b"q": Key.QUIT,
    b"Q": Key.QUIT,
    b"\x03": Key.QUIT,
    b"\x04": Key.QUIT,
    b"\x1b[A": Key.UP,
    b"\x1bOA": Key.UP,
    b"k": Key.UP,
    b"\x1b[Z": Key.UP,
    b"\x1b[B": Key.DOWN,
    b"\x1bOB": Key.DOWN,
    b"j": Key.DOWN,
    b"\t": Key.DOWN,
}
_LONGEST = max(len(code) for code in _KEYS)


def keys(data: bytes) -> Iterator[Key]:
    """Yield what was pressed; what means nothing is passed over."""
    while data:
        size = next((size for size in range(min(_LONGEST, len(data)), 0, -1) if data[:size] in _KEYS), 0)
        if size:
            yield _KEYS[data[:size]]
        data = data[max(size, 1) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """All that is drawn."""

    status: StatusView | None
    """None: no daemon has answered yet."""
    runs: tuple[RunFacts, ...]
    findings: tuple[Finding, ...]
    selected: int
    """Index of the chosen run; -1 without any."""
    problem: str
    """Why nobody answers; empty: the daemon does."""
    silent_s: float
    """For how long."""


class Top:
    """What is known: the newest answer, the speed of runs, the choice."""

    def __init__(self) -> None:
        self._history = History()
        self._status: StatusView | None = None
        self._answered_s: float | None = None
        self._chosen: tuple[int, str] | None = None
        self._problem = ""
        self._pid = 0

    def answered(self, status: StatusView, now_unix_s: float) -> None:
        """The daemon said what it holds."""
        if status.daemon.pid != self._pid:  # another daemon's sums begin anew
            self._history, self._pid = History(), status.daemon.pid
        for run in status.runs:
            sums = sums_of(run)
            if sums is not None:
                self._history.add((run.owner_uid, run.run_id), now_unix_s, sums)
        self._status, self._answered_s, self._problem = status, now_unix_s, ""

    def failed(self, problem: str) -> None:
        """Nobody answered."""
        self._problem = problem

    def press(self, key: Key) -> bool:
        """Carry out a key; False: it ends the command."""
        runs = self._status.runs if self._status is not None else ()
        if key is Key.QUIT:
            return False
        if runs:
            step = 1 if key is Key.DOWN else -1
            chosen = runs[(self._index() + step) % len(runs)]
            self._chosen = chosen.owner_uid, chosen.run_id
        return True

    def screen(self, now_unix_s: float) -> Screen:
        """Return what is to be drawn."""
        status = self._status
        runs = (
            () if status is None else tuple(facts_of(run, self._history, now_unix_s) for run in status.runs)
        )
        findings = () if status is None else tuple(findings_of(status, runs))
        silent_s = 0.0 if self._answered_s is None else max(0.0, now_unix_s - self._answered_s)
        return Screen(
            status=status,
            runs=runs,
            findings=findings,
            selected=self._index() if runs else -1,
            problem=self._problem,
            silent_s=silent_s,
        )

    def _index(self) -> int:
        assert self._status is not None
        keys_of = [(run.owner_uid, run.run_id) for run in self._status.runs]
        return keys_of.index(self._chosen) if self._chosen in keys_of else 0


def document(screen: Screen) -> dict[str, object]:
    """Return it for programs."""
    assert screen.status is not None
    status = screen.status
    return {
        "daemon": status.daemon,
        "runs": [
            {
                "run": run.view,
                "newest_age_s": run.newest_age_s,
                "steps_per_s": run.steps_per_s,
                "stall_share": run.stall_share,
                "data_share": run.data_share,
                "interval_s": run.interval_s,
            }
            for run in screen.runs
        ],
        "devices": [device for store in status.stores for device in store.devices],
        "caches": status.caches,
        "groups": status.groups,
        "findings": screen.findings,
    }


def without_choice(screen: Screen) -> Screen:
    """Return it as it is printed once: nobody chooses there."""
    return replace(screen, selected=-1)

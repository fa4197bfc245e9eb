"""What all ranks say of their checkpoints over the Store, and what that makes of each: complete, or never to be."""

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..core.ids import CheckpointId
from .one_rank import TOLD_KEPT
from .rank_protocol import Listener

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed's own, whose stub does not export it


ENDS = ("committed", "failed")


class RankResults:
    """One rank's side. `receive` is called on the agreement's thread, the rest on any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = 0
        """The newest boundary that was decided about."""
        self._open: dict[CheckpointId, set[str]] = {}
        """What this rank has said something of, and what the listener was told of it."""
        self._said: dict[CheckpointId, str] = {}
        """Of these, which end of its own part it has said."""
        self._told: deque[CheckpointId] = deque(maxlen=TOLD_KEPT)
        self._awaited: set[int] = set()
        """Boundaries that were due and of whose checkpoints this rank has not heard the end."""
        self._due: set[int] = set()
        """Those that were decided to be due, until they are passed."""

    @property
    def are_open(self) -> bool:
        """Tell whether this rank is to hear something yet."""
        return bool(self._open)

    @property
    def heard_step(self) -> int:
        """This rank has heard the end of all checkpoints of boundaries before this one, and says no more of them."""
        with self._lock:
            return min(self._awaited | {self._step})

    def decided(self, step: int, *, due: bool) -> None:
        """Whether this boundary gets a checkpoint is decided."""
        with self._lock:
            self._step = step
            if due:
                self._awaited.add(step)
                self._due.add(step)

    def passed(self, steps: Iterable[int]) -> None:
        """These boundaries get a checkpoint and are passed: decided about, or left before that."""
        with self._lock:
            for step in steps:
                if step not in self._due:
                    self._step = max(self._step, step)
                    self._awaited.add(step)
                self._due.discard(step)

    def name(self, checkpoint: CheckpointId, what: str) -> str | None:
        """Return by which name this rank says something of a checkpoint, and listen for its end; None: it does not.

        What follows the last boundary of one rank is not a boundary of another, whose number it may have. Of
        "committed" and "failed" the first one holds, though a daemon dies as it says that all is durable: others must
        not hear both.
        """
        with self._lock:
            if checkpoint in self._told:
                return None  # nobody listens, and its keys may be gone
            if what in ENDS and self._said.setdefault(checkpoint, what) != what:
                return None
            self._open.setdefault(checkpoint, set())
            return self._name(checkpoint)

    def receive(self, store: "Store", listener: Listener) -> list[CheckpointId]:
        """Tell the listener what is new; return the checkpoints whose end it heard."""
        with self._lock:
            names = [(checkpoint, self._name(checkpoint)) for checkpoint in sorted(self._open)]
        return [
            checkpoint for checkpoint, name in names if self._has_ended(store, listener, checkpoint, name)
        ]

    def _has_ended(self, store: "Store", listener: Listener, checkpoint: CheckpointId, name: str) -> bool:
        told = self._open[checkpoint]
        # Ends are looked for first: what ended was sealed before, if ever, so that no seal is overlooked.
        committed, failed = store.check([f"all-committed/{name}"]), store.check([f"failed/{name}"])
        if "sealed" not in told and store.check([f"all-sealed/{name}"]):
            told.add("sealed")
            listener.sealed_everywhere(checkpoint)
        if committed:
            listener.complete(checkpoint)
        elif failed:
            reason = store.get(f"failed/{name}").decode()
            listener.incomplete(checkpoint, reason, in_memory="sealed" in told)
        else:
            return False
        with self._lock:
            del self._open[checkpoint]
            self._said.pop(checkpoint, None)
            self._told.append(checkpoint)
            self._awaited.discard(checkpoint.step)
        return True

    def _name(self, checkpoint: CheckpointId) -> str:
        return str(checkpoint) if checkpoint.step <= self._step else f"{checkpoint}/last"

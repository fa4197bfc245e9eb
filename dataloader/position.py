"""Where a loader's loop stands: the one mutable thing that loader, sampler and iterator share."""

import logging
import warnings
from dataclasses import replace
from typing import Protocol

from ..core.errors import LoaderStateError, UsageError
from .holes_format import NO_HOLES
from .ledger import Ledger
from .moves import Moves
from .order_format import OrderSpec
from .order_plan import Ids
from .split_plan import Part
from .state_format import LoaderState

_log = logging.getLogger(__name__)


class Steps(Protocol):
    """The steps of an epoch."""

    @property
    def sample_count(self) -> int:
        """Samples of the epoch, over all ranks."""
        ...

    def part(self, cursor: int) -> Part | None:
        """Return the step at a cursor; None at the end."""
        ...


class Position:
    """Epoch, cursor and order of a loader, its ledger, and which iterator may move them; not thread safe.

    Only the newest iterator moves it. An iterator is live from `begin` until it finishes, fails or is collected.
    """

    def __init__(self, order: OrderSpec) -> None:
        self.order = order
        self.epoch: int = 0
        self.cursor: int = 0
        self.holes = NO_HOLES
        self.span = (0, 0)
        """The positions, over all ranks, of the step last handed out."""
        self.weight = 1.0
        self.steps: Steps | None = None
        """The steps of the present epoch; None where nobody knows (before the first iterator, a stream)."""
        self.ledger = Ledger(order.seed)
        self._newest = 0
        self._is_live = False
        self._has_handed = False
        self._is_restored = False
        """A state was loaded, and nothing moved since."""
        self._passes_end = False
        """Where nothing is left of this epoch, the next iterator is of the next one."""
        self.moves = Moves()
        self.is_passed_over = False
        """The next iterator is over at once: its loop ended in the attempt before."""

    @property
    def in_loop(self) -> tuple[int, int] | None:
        """Which iterator has handed out batches and is live, and its cursor; None between loops."""
        return (self._newest, self.cursor) if self._is_live and self._has_handed else None

    @property
    def is_resumed_by_iter(self) -> bool:
        """Whether the next iterator goes on where one of this epoch was left, past the epoch's end if that is there."""
        return self._has_handed or self._passes_end

    def begin(self) -> int:
        """Return the token of a new iterator; the one before it can move nothing from now on."""
        if self.ledger.seed != self.order.seed:
            raise LoaderStateError(
                f"the ledger was kept under seed {self.ledger.seed}, the loader's order has seed {self.order.seed}",
                hint="load the state and the ledger of one checkpoint",
            )
        self._newest += 1
        self._is_live = True
        return self._newest

    def is_newest(self, token: int) -> bool:
        """Tell whether this iterator may move the position."""
        return token == self._newest

    def hand(
        self, part: Part, ids: Ids, left_out: tuple[int, ...] = (), *, is_stand_in: bool = False
    ) -> None:
        """Count a batch as handed to the loop: the only place where a cursor moves forward.

        Quarantined samples of the part are `left_out`: the others keep their weight. Where none is left `ids` is a
        stand-in, with weight 0 as padding has it.
        """
        assert part.cursor == self.cursor, (part, self.cursor)
        assert is_stand_in or ids.size + len(left_out) == part.stop - part.start, (part, ids.size, left_out)
        is_padding = part.is_padding or is_stand_in
        self.ledger.add(
            self.epoch,
            ids[:0] if is_padding else ids,
            padding_count=int(is_padding),
            quarantined=() if part.is_padding else left_out,
        )
        self._pass_to(part.next_cursor)
        self.span = (part.cursor, part.next_cursor)
        self.weight = 0.0 if is_stand_in else part.weight * ids.size / (part.stop - part.start)
        self._handed()

    def hand_uncounted(self, count: int) -> None:
        """Count a batch of a stream, whose samples have no numbers: nothing of it can be in the ledger."""
        self.span = (self.cursor, self.cursor + count)
        self.cursor += count
        self._handed()

    def _handed(self) -> None:
        self._has_handed = True
        self._is_restored = False
        self.moves.hand()

    def finish(self, sample_count: int) -> None:
        """Go to the next epoch; what the end of this one left out is recorded as dropped."""
        self._pass_to(self.holes.leap(self.cursor))
        if self.cursor < sample_count:
            self.ledger.finish(self.epoch, sample_count - self.cursor)
        self._restart(self.epoch + 1)
        self.moves.end()

    def finish_if_over(self) -> None:
        """Go to the next epoch if nothing is left of this one, though no iterator has said so.

        Some frameworks ask for `len(loader)` batches and never hear that there are no more, also before a checkpoint.
        """
        is_begun = self._has_handed or self._is_live or self._is_restored
        if is_begun and self.steps is not None and self.steps.part(self.cursor) is None:
            self._newest += 1
            self.finish(self.steps.sample_count)

    def pass_end(self) -> None:
        """Have the next iterator go on with the next epoch if nothing is left of this one."""
        self._passes_end = True

    def release(self, token: int) -> None:
        """Say that an iterator will not go on."""
        if token == self._newest:
            self._is_live = False

    def reset(self) -> None:
        """Go back to the begin of the epoch, with its holes; no existing iterator can go on.

        The ledger keeps what was handed out.
        """
        self._newest += 1
        holes = self.holes
        self._restart(self.epoch)
        self.holes = holes

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of another epoch; the present epoch is no move at all. UsageError while iterating."""
        if isinstance(epoch, bool) or epoch < 0:
            raise UsageError(f"an epoch is a whole number from 0, got {epoch!r}")
        if epoch == self.epoch:
            return
        self.finish_if_over()
        if epoch == self.epoch:
            return
        if self._is_live:
            raise UsageError(
                f"set_epoch({epoch}) while epoch {self.epoch} is being iterated at sample {self.cursor}",
                hint="end the loop first, or call reset()",
            )
        if self._is_restored and epoch < self.epoch:
            warnings.warn(
                f"set_epoch({epoch}) goes back behind epoch {self.epoch}, which was restored: what was trained comes "
                "again. Loop by `for epoch in run.epochs(n)`, which begins where the checkpoint was",
                stacklevel=3,
            )
        self._restart(epoch)

    def check_unmoved(self) -> None:
        """Return if a state may be loaded: LoaderStateError once iteration has begun."""
        if self._is_live or self._has_handed:
            raise LoaderStateError(
                f"iteration has begun: epoch {self.epoch} stands at sample {self.cursor}",
                hint="load the state before the first iter(), or call reset() first",
            )

    def load(self, state: LoaderState) -> None:
        """Take over the position of a state; LoaderStateError once iteration has begun, and then nothing is changed."""
        self.check_unmoved()
        if state.order.seed != self.ledger.seed:
            if self.ledger.record().tallies:
                raise LoaderStateError(
                    f"the state has seed {state.order.seed}, this loader counted batches under {self.ledger.seed}",
                    hint="construct a new loader and load the state into it",
                )
            self.ledger = Ledger(state.order.seed)
        blocks = self.order.blocks  # a state may know only their digest
        self.order = replace(state.order, blocks=blocks)
        self.epoch, self.cursor, self.holes = state.epoch, state.cursor, state.holes
        self._is_restored = True
        if ahead := self.holes.between(self.cursor, state.sample_count):
            _log.warning(
                "loader_skips epoch=%d positions=%s samples=%d",
                self.epoch,
                ",".join(f"[{start},{stop})" for start, stop in ahead),
                sum(stop - start for start, stop in ahead),
            )

    def _pass_to(self, cursor: int) -> None:
        if self.holes and (passed := self.holes.between(self.cursor, cursor)):
            self.ledger.skip(self.epoch, passed)
        self.cursor = cursor

    def _restart(self, epoch: int) -> None:
        self.epoch, self.cursor, self.holes = epoch, 0, NO_HOLES
        self._is_live = self._has_handed = self._is_restored = self._passes_end = False
        self.is_passed_over = False

"""A rank's beat in the Store, and what it hears of the others': who does not answer any more."""

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..core.errors import ConfigError
from .rank_format import Beat, dump_beat, load_beat
from .rank_store import present
from .silence_machine import BEAT_S, Silence

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed's own, whose stub does not export it

DEADLINE_VARIABLE = "EVERSTEP_RANK_DEADLINE_S"
DEADLINE_S = 60.0
"""As long as ranks may be apart at a plan's horizon."""
DEADLINE_LEAST_S = 5 * BEAT_S


class Beats:
    """Rank 0 hears all others and says in its own beat whom it does not hear; the others hear rank 0.

    And whom their daemon says to be gone. Used by the agreement's thread; `silent` may be read by any.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        """Nobody is silent yet.

        Raises:
            ConfigError: $EVERSTEP_RANK_DEADLINE_S makes no sense.
        """
        watched = range(1, world_size) if rank == 0 else [0]
        self._rank, self._silence = rank, Silence(watched, deadline_s=rank_deadline_s())
        self._number, self._next_s = 0, 0.0
        self._said: frozenset[int] = frozenset()
        """What rank 0 has said."""
        self._has_ended = self._has_closed = False
        self._closed: set[int] = set()
        self._uneven: dict[int, Beat] = {}
        """Ranks that go on where this one has ended, or have ended where it goes on, and what they say."""
        self.silent_ranks: frozenset[int] = frozenset()
        """Of these nothing is worth waiting for."""
        self.silent = ""
        """Which they are and why, for people; empty: none."""

    def ends(self) -> None:
        """This rank passes no boundary any more; from any thread."""
        self._has_ended, self._next_s = True, 0.0

    def exchange(self, store: "Store", gone: Iterable[int], step: int) -> None:
        """Beat and look at the others, every few seconds; at once take those that are known to be gone.

        `step` is the newest boundary that this rank has come to.
        """
        closed = frozenset(self._closed)  # of what they had said the last has been heard since
        for rank in gone:
            self._silence.gone(rank)
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + BEAT_S
            own = self._beat(store, step)
            self._look(store, own)
        dead = (self._said | set(self._silence.silent)) - {self._rank} - self._uneven.keys() - closed
        self.silent_ranks = dead | self._uneven.keys() | closed
        uneven = [f"rank {rank} {_course(beat)}" for rank, beat in sorted(self._uneven.items())]
        own = f"this one {_course(Beat(number=0, step=step, is_last=self._has_ended))}"
        ended = [f"rank {rank} has closed the run" for rank in sorted(closed - self._uneven.keys())]
        self.silent = ", ".join(filter(None, [*uneven, own if uneven else "", *ended, _sentence(dead)]))

    def close(self, store: "Store", step: int) -> None:
        """Beat a last time: this rank says and hears no more, though rank 0 may stay."""
        self._has_closed = True
        self._beat(store, step)

    def _beat(self, store: "Store", step: int) -> Beat:
        self._number += 1
        silent = tuple({*self._silence.silent, *self._uneven, *self._closed}) if self._rank == 0 else ()
        beat = Beat(
            number=self._number,
            silent=silent,
            step=step,
            is_last=self._has_ended,
            has_closed=self._has_closed,
        )
        store.set(_key(self._rank), dump_beat(beat))
        return beat

    def _look(self, store: "Store", own: Beat) -> None:
        keys = present(store, [_key(rank) for rank in self._silence.watched])
        texts = store.multi_get(keys) if keys else []
        beats = {_rank_of(key): load_beat(text) for key, text in zip(keys, texts, strict=True)}
        self._silence.looked({rank: beat.number for rank, beat in beats.items()}, time.monotonic())
        self._uneven = {
            rank: beat for rank, beat in beats.items() if _is_past(beat, own) or _is_past(own, beat)
        }
        self._closed = {rank for rank, beat in beats.items() if beat.has_closed}
        if self._rank != 0 and 0 in beats:
            self._said = frozenset(beats[0].silent)


def rank_deadline_s() -> float:
    """Return after how many seconds a rank that is not heard counts as silent: $EVERSTEP_RANK_DEADLINE_S, or 60.

    Raises:
        ConfigError: it is no number of seconds, or too few.
    """
    text = os.environ.get(DEADLINE_VARIABLE, "")
    try:
        value = float(text or DEADLINE_S)
    except ValueError:
        value = 0.0
    if not value >= DEADLINE_LEAST_S:
        raise ConfigError(
            f"{DEADLINE_VARIABLE}={text!r}", hint=f"a number of seconds, {DEADLINE_LEAST_S:.0f} or more"
        )
    return value


def _is_past(beat: Beat, ended: Beat) -> bool:
    """Tell whether one rank has passed a boundary that the other never comes to."""
    return ended.is_last and beat.step > ended.step


def _course(beat: Beat) -> str:
    return f"ended after boundary {beat.step}" if beat.is_last else f"is at boundary {beat.step}"


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _rank_of(key: str) -> int:
    return int(key.partition("/")[2])


def _sentence(ranks: Iterable[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    if not names:
        return ""
    subject = f"ranks {names} do" if "," in names else f"rank {names} does"
    return f"{subject} not answer (dead, standing still, or no more in this run)"

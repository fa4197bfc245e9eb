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
        self.silent = ""
        """Which ranks do not answer, for people; empty: none."""

    def exchange(self, store: "Store", gone: Iterable[int]) -> None:
        """Beat and look at the others, every few seconds; at once take those that are known to be gone."""
        for rank in gone:
            self._silence.gone(rank)
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + BEAT_S
            self._beat(store)
            self._look(store)
        self.silent = _sentence((self._said | set(self._silence.silent)) - {self._rank})

    def _beat(self, store: "Store") -> None:
        self._number += 1
        silent = tuple(self._silence.silent) if self._rank == 0 else ()
        store.set(_key(self._rank), dump_beat(Beat(number=self._number, silent=silent)))

    def _look(self, store: "Store") -> None:
        keys = present(store, [_key(rank) for rank in self._silence.watched])
        texts = store.multi_get(keys) if keys else []
        beats = {_rank_of(key): load_beat(text) for key, text in zip(keys, texts, strict=True)}
        self._silence.looked({rank: beat.number for rank, beat in beats.items()}, time.monotonic())
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

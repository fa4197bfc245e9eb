"""A nonce that the ranks of one worker group share with each other and with no group before or after them.

torchrun's Store outlives the workers: a restarted group finds there what the last one has said. Nothing in the
environment tells the groups apart: agents count restarts each for itself, and a change of world size is not counted.
"""

import secrets
import time
from typing import TYPE_CHECKING

from ..core.errors import DeadlineError
from .rank_store import SAID_AFTER_S, say_awaited, wait_for

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed's own, whose stub does not export it

_POLL_S = 0.01


def agree_nonce(store: "Store", rank: int, world_size: int, deadline_s: float) -> str:
    """Return the nonce that rank 0 drew for this group; blocks until all ranks have it.

    Each rank asks under a token that it has just drawn and is answered under that token, so that nothing old can be
    the answer: rank 0 answers the tokens of dead ranks, too, but nobody reads those.

    Raises:
        DeadlineError: a rank did not come.
        RuntimeError: the Store's own, when it cannot be reached.
    """
    if rank == 0:
        return _answer_all(store, world_size, deadline_s)
    token = secrets.token_hex(16)
    store.set(f"asks/{rank}", token)
    wait_for(store, [f"answer/{token}"], deadline_s, lambda: "rank 0, to attach")
    nonce = store.get(f"answer/{token}").decode()
    store.set(f"has/{nonce}/{rank}", "1")
    return nonce


def _answer_all(store: "Store", world_size: int, deadline_s: float) -> str:
    nonce, began_s = secrets.token_hex(16), time.monotonic()
    until_s, said_s = began_s + deadline_s, began_s + SAID_AFTER_S
    answered: dict[int, str] = {}
    while True:
        waiting = [rank for rank in range(1, world_size) if not store.check([f"has/{nonce}/{rank}"])]
        if not waiting:
            return nonce
        for rank in waiting:
            if store.check([f"asks/{rank}"]):
                token = store.get(f"asks/{rank}").decode()
                if answered.get(rank) != token:
                    answered[rank] = token
                    store.set(f"answer/{token}", nonce)
        if time.monotonic() > said_s:
            said_s = until_s
            say_awaited(f"ranks {waiting}, to attach", deadline_s)
        if time.monotonic() > until_s:
            raise DeadlineError(
                f"ranks {waiting} did not attach within {deadline_s:g} s",
                hint="every rank must attach the run, by the same name",
            )
        time.sleep(_POLL_S)

"""Puts descriptors into the service manager's FD store (sd_notify's FDSTORE=1) and takes them out again.

The store keeps a duplicate when this process dies, and hands it to the next one. Everything here is advice: a service
manager without a store (or one that is full) ignores it, and a crash of the daemon costs what was not yet written.
"""

import logging
import os
from dataclasses import dataclass

from ...core.errors import EverstepError
from ...core.ids import random_id
from ..blocking import in_thread
from ..service_manager import notify
from .arena_state import ArenaState
from .inherited_plan import arena_name, state_name
from .state_format import ArenaHead

logger = logging.getLogger(__name__)

ENTRIES_PER_ARENA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArena:
    """An arena's place in the store, and what a daemon after this one is told of it."""

    token: str
    state: ArenaState


class FdStore:
    """Owned by the event loop; of a private daemon, or without a service manager, it stores nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled and bool(os.environ.get("NOTIFY_SOCKET"))
        # systemd has said since 254 how many it keeps; one more it would close without a word to us.
        text = os.environ.get("FDSTORE", "")
        self._most = int(text) if text.isdecimal() else None
        self.entry_count = 0
        """Descriptors in the store."""

    async def put(self, arena_fd: int, head: ArenaHead, *, mapper_pid: int) -> StoredArena | None:
        """Store an arena that is about to be given to a trainer; None where there is no store."""
        if not self.enabled:
            return None
        if self._most is not None and self.entry_count + ENTRIES_PER_ARENA > self._most:
            logger.warning(
                "fd_not_stored rank=%d reason=the store has %d of %d descriptors: raise FileDescriptorStoreMax=",
                head.rank,
                self.entry_count,
                self._most,
            )
            return None
        self.entry_count += ENTRIES_PER_ARENA
        try:
            state = await in_thread(ArenaState.make, head)
        except (OSError, EverstepError) as error:
            self.entry_count -= ENTRIES_PER_ARENA
            logger.warning("fd_not_stored rank=%d reason=%s", head.rank, error)
            return None
        state.add_mapper(mapper_pid)
        stored = StoredArena(token=random_id(), state=state)
        # The state first: an arena without one is of no use to anybody, a state alone takes no memory.
        await in_thread(_store, state_name(stored.token), state.fd)
        await in_thread(_store, arena_name(stored.token), arena_fd)
        return stored

    async def remove(self, stored: StoredArena) -> None:
        """Nothing of the arena is needed any more, whoever comes next."""
        await in_thread(forget_stored, stored.token)
        self.entry_count -= ENTRIES_PER_ARENA
        await in_thread(stored.state.close)


def forget_stored(token: str) -> None:
    """Take an arena and its state out of the store."""
    for name in (arena_name(token), state_name(token)):
        forget_name(name)


def forget_name(name: str) -> None:
    """Take the descriptors of this name out of the store."""
    notify(f"FDSTOREREMOVE=1\nFDNAME={name}", patient=True)


def _store(name: str, fd: int) -> None:
    # FDPOLL=0: the store would drop what reports an error or hang-up; a memfd never does.
    notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fds=[fd], patient=True)

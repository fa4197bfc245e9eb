"""One process's use of a cache: attached when it is first needed, without it while the daemon is gone.

Nothing here keeps a reader from its sample: where the cache is of no use, for whatever reason, samples come from the
source. Why is logged once for each reason, and the daemon is asked again, ever more rarely.
"""

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from pathlib import Path

from ...core.errors import EverstepError, UsageError
from ...core.sizes import size_text
from ...proto import frames, peer_frames
from ...proto.starting import start_and_connect
from .arena_format import record_bytes
from .arena_view import ArenaView
from .inbox import INBOX_BYTES
from .link import CacheLink, Wanted
from .placement import ThisNode, placement

logger = logging.getLogger(__name__)

ATTACH_DEADLINE_S = 5.0
REATTACH_DEADLINE_S = 0.5
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0
"""Between two attempts to reach a daemon that is gone: doubled each time, so that an hour without one costs nothing."""
REPORT_S = 5.0
"""How often a reader says what it has read."""
PEER_SLACK_S = 1.0
"""The daemon answers within the peers' deadline; a daemon that takes so much longer is taken for hung."""
EXIT_DEADLINE_S = 1.0
"""How long the end of a process waits for what it staged last, in all its datasets together."""

_readers: "weakref.WeakSet[Reader]" = weakref.WeakSet()
_watched_pid = 0
"""The process whose end is watched."""


@dataclass(slots=True)
class Use:
    """What this process has read so far. Several threads may each lose a count to another."""

    hit_count: int = 0
    hit_bytes: int = 0
    miss_count: int = 0
    miss_bytes: int = 0
    peer_count: int = 0
    """Read from other nodes' memory."""
    peer_bytes: int = 0
    oversized_count: int = 0
    """Of the misses, samples larger than the whole budget."""
    deferred_count: int = 0
    """Of the misses, samples that found no room in the staging: they are offered again when they are read again."""
    published_count: int = 0
    """Samples of this process that the daemon has put into the cache."""


class Reader:
    """Owned by one `CachedDataset` in one process. Any thread may call."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self.view: ArenaView | None = None
        """What was mapped last. It is read further when the daemon is gone, until another one answers."""
        self.is_behind = False
        """Samples wait to be sent: call `catch_up` soon."""
        self.has_peers = False
        """Other nodes own some of the samples: ask `from_peers` before the source."""
        self.use = Use()
        self._placement = placement(wanted.fingerprint, (), "")
        self._path, self._wanted = path, wanted
        self._link: CacheLink | None = None
        self._lock = threading.Lock()
        self._has_attached = False
        self._next_attempt_s = 0.0
        self._pause_s = PAUSE_S
        self._told: set[str] = set()
        self._reported = Use()
        self._next_report_s = time.monotonic() + REPORT_S
        _readers.add(self)

    @property
    def is_attached(self) -> bool:
        """Tell whether a daemon is connected, as far as known."""
        return self._link is not None

    def attach(self) -> None:
        """Connect if there is no connection and an attempt is due; a private daemon is started where none answers.

        Raises:
            UsageError: the cache of this fingerprint has another number of samples.
        """
        if self._link is not None or time.monotonic() < self._next_attempt_s:
            return
        with self._lock:
            if self._link is None and time.monotonic() >= self._next_attempt_s:
                self._attach()

    def attached_view(self) -> ArenaView | None:
        """Attach if that is due and return what is mapped then, if anything; see `attach`."""
        self.attach()
        return self.view

    def _attach(self) -> None:
        try:
            self._link = self._connect()
        except UsageError:
            raise
        except EverstepError as error:
            self._without(error)
            return
        _watch_exit()
        self.view = self._link.view
        self._has_attached, self._pause_s = True, PAUSE_S
        if self._link.opened.reason:
            self._tell(
                "less", f"cache of {size_text(self._link.opened.budget_bytes)}: {self._link.opened.reason}"
            )

    def _connect(self) -> CacheLink:
        is_first = not self._has_attached and not self._told
        deadline_s = ATTACH_DEADLINE_S if is_first else REATTACH_DEADLINE_S

        def connect() -> CacheLink:
            return CacheLink(
                self._path, self._wanted, self._on_filled, self._on_members, deadline_s=deadline_s
            )

        return (
            start_and_connect(self._path, connect) if is_first and nobody_listens(self._path) else connect()
        )

    def _without(self, error: EverstepError) -> None:
        """Go on without a daemon for a while."""
        if self._link is not None:
            self._link.close()
            self._link = None
        self.is_behind = False
        self._next_attempt_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        self._tell("without", f"samples that are not in memory are read from the source: {error}")

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning("cache_%s fingerprint=%s: %s", what, self._wanted.fingerprint, text)

    # -- what was read

    def offer(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """A sample was missing and has been read: stage it if the cache might take it."""
        self.attach()
        is_elsewhere = self.has_peers and self._placement.owner(index) is not None
        if (len(data) <= INBOX_BYTES) if is_elsewhere else self.may_take(len(data)):
            with self._lock:
                try:
                    if self._link is not None:
                        self.use.deferred_count += not self._link.fill(index, data)
                        self.is_behind = self._link.is_behind
                except EverstepError as error:
                    self._without(error)
        self.use.miss_count += 1
        self.use.miss_bytes += len(data)
        self.tick()

    # -- other nodes

    def _on_members(self, frame: peer_frames.CacheMembers) -> None:
        self._placement = placement(self._wanted.fingerprint, frame.members, frame.me)
        self.has_peers = not isinstance(self._placement, ThisNode)

    def announce(self, indices: Sequence[int]) -> None:
        """These samples are about to be read: have the daemon fetch what is missing and other nodes own."""
        view = self.view
        if not self.has_peers or view is None:
            return
        wanted = self._placement.elsewhere([each for each in indices if not view.places[each]])
        if wanted:
            with self._lock:
                try:
                    if self._link is not None and not self._link.inbox.is_waiting:
                        self._link.ask_peers(wanted[: peer_frames.ASK_SAMPLES_MAX])
                except EverstepError as error:
                    self._without(error)

    def from_peers(self, index: int) -> bytes | None:
        """Return a sample that another node owns and has; None: read it from the source.

        Waits for one deadline of the peers at most, for all that was announced together.
        """
        if self._placement.owner(index) is None:
            return None
        with self._lock:
            try:
                data = self._from_peers(self._link, index) if self._link is not None else None
            except EverstepError as error:
                self._without(error)
                return None
        if data is not None:
            self.use.peer_count += 1
            self.use.peer_bytes += len(data)
            self.tick()
        return data

    def _from_peers(self, link: CacheLink, index: int) -> bytes | None:
        inbox, deadline_s = link.inbox, link.opened.peer_deadline_s + PEER_SLACK_S
        if inbox.is_waiting:
            link.wait_peers(deadline_s)
        if index in inbox.absent:
            inbox.absent.discard(index)  # asked again when it is read again
            return None
        if not inbox.expects(index):
            others = [each for each in inbox.unread() if each != index]
            link.ask_peers([index, *others][: peer_frames.ASK_SAMPLES_MAX])
            link.wait_peers(deadline_s)
            inbox.absent.discard(index)
        return inbox.take(index)

    # -- what the cache takes

    def may_take(self, length: int) -> bool:
        """Tell whether the cache might take a sample of so many bytes now."""
        view = self.view
        if view is None or self._link is None:
            return False
        needed_bytes = record_bytes(length)
        if not view.could_ever_take(needed_bytes):
            self.use.oversized_count += 1
            return False
        return view.takes(needed_bytes)

    def catch_up(self) -> None:
        """Send what waits, if it can be sent now."""
        with self._lock:
            try:
                if self._link is not None:
                    self._link.poll()
                    self.is_behind = self._link.is_behind
            except EverstepError as error:
                self._without(error)

    def tick(self) -> None:
        """Report what was read, if it is time for that, and look whether the daemon still is there."""
        now_s = time.monotonic()
        if now_s < self._next_report_s:
            return
        self._next_report_s = now_s + REPORT_S
        self.attach()
        with self._lock:
            try:
                if self._link is not None:
                    self._report(self._link)
                    self._link.poll()
            except EverstepError as error:
                self._without(error)

    def _report(self, link: CacheLink) -> None:
        use, before = self.use, self._reported
        now = replace(use)
        link.send(
            frames.CacheUse(
                hit_count=now.hit_count - before.hit_count,
                hit_bytes=now.hit_bytes - before.hit_bytes,
                miss_count=now.miss_count - before.miss_count,
                miss_bytes=now.miss_bytes - before.miss_bytes,
                oversized_count=now.oversized_count - before.oversized_count,
                peer_count=now.peer_count - before.peer_count,
                peer_bytes=now.peer_bytes - before.peer_bytes,
            )
        )
        self._reported = now

    def _on_filled(self, filled: frames.CacheFilled) -> None:
        self.use.published_count += filled.published_count
        if filled.differing:
            self._tell(
                "differs",
                f"sample {filled.differing[0]} is in the cache with other bytes: the fingerprint does not follow the "
                "content (or a prepared sample is random), and readers get whichever came first",
            )
        if filled.corrupt:
            self._tell("corrupt", f"sample {filled.corrupt[0]} changed on its way into the cache")
        if "memory" in filled.reason:
            self._tell("less", "there is no memory for the whole budget: `everstep cache list` says why")

    # -- end

    def flush(self, deadline_s: float) -> bool:
        """Wait until the daemon has taken in what was staged, and report; False: it did not, in time."""
        with self._lock:
            if self._link is None:
                return False
            try:
                until_s = time.monotonic() + deadline_s
                self._report(self._link)
                if not self._link.flush(deadline_s):
                    return False
                return not self.has_peers or self._link.flush_peers(until_s - time.monotonic())
            except EverstepError as error:
                self._without(error)
                return False

    def close(self) -> None:
        """Report what was read, and let go of connection and memory; the next use attaches again."""
        with self._lock:
            if self._link is not None:
                with contextlib.suppress(EverstepError):  # the daemon is gone: nobody counts
                    self._report(self._link)
                self._link.close()
            self._link = self.view = None
            self.is_behind = False

    def forget_after_fork(self) -> None:
        """In a child: let go of what belongs to the parent; the child attaches itself when it needs to."""
        self._lock = threading.Lock()
        if self._link is not None:
            self._link.abandon()
        self._link = self.view = None
        self.is_behind = False
        self.use, self._reported = Use(), Use()
        self._has_attached, self._next_attempt_s, self._pause_s = False, 0.0, PAUSE_S


def _watch_exit() -> None:
    """Flush all readers when this process ends normally; a loader's worker does not run what atexit knows."""
    global _watched_pid
    if _watched_pid != os.getpid():
        _watched_pid = os.getpid()
        Finalize(None, _flush_all, exitpriority=10)


def _flush_all() -> None:
    until_s = time.monotonic() + EXIT_DEADLINE_S
    for reader in list(_readers):
        reader.flush(until_s - time.monotonic())
        reader.close()


def _forget_all() -> None:
    for reader in list(_readers):
        reader.forget_after_fork()


os.register_at_fork(after_in_child=_forget_all)


def nobody_listens(path: Path) -> bool:
    """Tell whether a connection is refused at once: then a daemon may be started; one that hangs must not be."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except BlockingIOError:
            return False
    return False

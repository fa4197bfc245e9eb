"""The hook's link to its daemon: attach, and attach again when the daemon went away, beside training."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..checkpoint.keep import Keep
from ..core.errors import DaemonUnavailableError, EverstepError, FencedError
from ..core.version import VERSION
from ..proto import frames
from ..proto.frames import Reply
from .client import DaemonClient
from .starter import connect_or_start

logger = logging.getLogger(__name__)

OPEN_DEADLINE_S = 300.0
"""Opening a store recovers it: metadata only, but of every checkpoint on it."""

CLOSE_DEADLINE_S = 5.0
"""How long closing waits for an attempt to reach a daemon, which is told to end: it may be starting one."""

RETRY_FIRST_S = 0.5
RETRY_MOST_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAddress:
    """What this rank asks of the daemon."""

    name: str
    rank: int
    world_size: int
    storage: tuple[str, ...]
    takeover: bool
    keep: Keep | None = None
    """None: what the daemon's configuration says."""

    @property
    def node_only(self) -> str:
        """Say why only a node's daemon knows this storage; empty when any does."""
        names = [place for place in self.storage if "/" not in place]
        return f"{names[0]!r} is a device's name (or no directory)" if names else ""


class Link:
    """Owns the connection. `on_event` hears the daemon's events, on the reader thread.

    After a reconnection it hears, on that thread, what another daemon has of the devices.
    """

    def __init__(self, address: RunAddress, on_event: Callable[[Reply], None]) -> None:
        self._address, self._on_event = address, on_event
        self._attempt, self.fresh = 0, False
        self._retry_s, self._retry_at_s = RETRY_FIRST_S, 0.0
        self._reconnecting: threading.Thread | None = None
        self._closed = False
        self._opening: DaemonClient | None = None
        """The next client, while it opens the run."""
        self.client, self.opened = self._join(was_left=False)

    @property
    def devices(self) -> Sequence[frames.DeviceInfo]:
        """Return the devices of the run's store."""
        return self.opened.devices

    @property
    def broken(self) -> bool:
        """Tell whether the daemon is gone and not yet replaced."""
        return self.client.broken is not None

    def begin_attempt(self, attempt: int, *, fresh: bool) -> None:
        """Make the attempt durable; from now on this rank may take snapshots."""
        self._begin(self.client, attempt, fresh=fresh)
        self._attempt, self.fresh = attempt, fresh

    def tell(self, frame: frames.Request) -> bool:
        """Send what needs no answer; False when there is no daemon to tell."""
        return self.client.tell(frame)

    def keep_up(self, on_restored: Callable[[], None]) -> None:
        """Called at boundaries: when the daemon is gone, look for another one, beside training and with pauses."""
        looking = (
            self._reconnecting is not None and self._reconnecting.is_alive()
        )  # not if its start was interrupted
        if not self.broken or self._closed or looking or time.monotonic() < self._retry_at_s:
            return
        self._reconnecting = threading.Thread(
            target=self._reconnect, args=(on_restored,), name="everstep-reconnect", daemon=True
        )
        self._reconnecting.start()

    def close(self) -> None:
        """End the connection within some seconds: what was sealed outlives the trainer, whoever writes it."""
        self._closed = True
        reconnecting = self._reconnecting  # which ends, and says so, at any moment
        if reconnecting is not None:
            if (opening := self._opening) is not None:
                opening.close()
            reconnecting.join(CLOSE_DEADLINE_S)
            if reconnecting.is_alive() or self.client.broken is not None:
                logger.warning(
                    "link_left run=%s: closed without a daemon: what was committed stands, and one that still lives "
                    "writes what was sealed by itself",
                    self._address.name,
                )
        self.client.close()

    def _reconnect(self, on_restored: Callable[[], None]) -> None:
        try:
            was_private = self.client.welcome.private
            node_only = "" if was_private else "the one that this trainer used is the node's"
            client = self._opening = connect_or_start(VERSION, self._on_event, node_only=node_only)
            try:
                if self._closed:
                    raise DaemonUnavailableError("the run was closed meanwhile")
                opened = self._open(client, takeover=False)
                self._begin(client, self._attempt, fresh=False, again=True)
            except BaseException:
                client.close()
                raise
            before, self.opened = (
                self.opened,
                opened,
            )  # first: what goes to this client is laid out for its devices
            lost, self.client = self.client, client
            lost.close()
            if self._closed:
                client.close()
                return
            self._retry_s = RETRY_FIRST_S
            self._tell_storage(before)
            logger.warning("daemon_reconnected pid=%d", client.welcome.pid)
            on_restored()
        except FencedError as error:
            self._closed = True
            self._on_event(frames.Fenced(message=str(error)))
        except EverstepError as error:
            self._retry_at_s = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_MOST_S)
            logger.warning("daemon_unavailable reason=%s", error)
        finally:
            self._opening = self._reconnecting = None

    def _tell_storage(self, before: frames.RunOpened) -> None:
        """Say what the devices of this daemon are, of which some may not be those of the one before, as it would."""
        self._on_event(frames.DevicesChanged(devices=self.opened.devices))
        for note in self.opened.notes:
            if note not in before.notes:
                self._on_event(frames.Notice(code="", message=note))

    def _join(self, *, was_left: bool) -> tuple[DaemonClient, frames.RunOpened]:
        """Find or start a daemon, and open the run. A private one may end just then: once, the next is asked."""
        client = connect_or_start(VERSION, self._on_event, node_only=self._address.node_only)
        try:
            return client, self._open(client, takeover=self._address.takeover)
        except BaseException as error:
            client.close()
            has_left = isinstance(error, DaemonUnavailableError) and client.welcome.private
            if was_left or not has_left:
                raise
        logger.warning(
            "daemon_ended pid=%d: while it opened the run; the next one is asked", client.welcome.pid
        )
        return self._join(was_left=True)

    def _open(self, client: DaemonClient, *, takeover: bool) -> frames.RunOpened:
        address = self._address
        reply, _ = client.request(
            lambda number: frames.OpenRun(
                request_id=number,
                name=address.name,
                rank=address.rank,
                world_size=address.world_size,
                storage=list(address.storage),
                takeover=takeover,
                keep=_rules(address.keep),
            ),
            OPEN_DEADLINE_S,
        )
        if not isinstance(reply, frames.RunOpened):
            raise DaemonUnavailableError(f"the daemon answered OpenRun with {type(reply).__name__}")
        return reply

    @staticmethod
    def _begin(client: DaemonClient, attempt: int, *, fresh: bool, again: bool = False) -> None:
        client.request(
            lambda number: frames.BeginAttempt(request_id=number, attempt=attempt, fresh=fresh, again=again)
        )


def _rules(keep: Keep | None) -> frames.KeepRules | None:
    if keep is None:
        return None
    return frames.KeepRules(last=keep.last, every_steps=keep.every_steps, every=keep.every)

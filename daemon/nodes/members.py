"""Who the members are now: a list from the configuration, or what a name of the DNS stands for, looked up again and
again. Looking up may hang, so it has a thread, one at a time, and the last answer holds until there is another.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ...dataloader.cache.owner_plan import members_of
from ...proto.peer_frames import MEMBERS_MAX
from .address_format import address_text, parse_address
from .section import CacheSection

logger = logging.getLogger(__name__)

ANY_HOSTS = frozenset({"0.0.0.0", "::", "*"})
_SOMEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation: asking for the way there sends nothing."""

Resolve = Callable[[str, int], list[str]]


@dataclass(frozen=True, slots=True)
class _Found:
    members: tuple[str, ...]
    """Empty: nothing was found."""
    me: str
    problem: str


class Membership:
    """Owned by the event loop; `changed` is called there."""

    def __init__(
        self, section: CacheSection, changed: Callable[[], None], resolve: "Resolve | None" = None
    ) -> None:
        self.members = members_of(section.members)
        self.me = section.address
        """The member that this node is; empty: it is none, or nobody knows yet."""
        self.port = 0
        self._section, self._changed = section, changed
        self._resolve = resolve or resolved
        self._thread: threading.Thread | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._problem = ""

    def begin(self, port: int) -> None:
        """Look, now and from time to time; `port` is where this node listens."""
        self.port = port
        if self._section.dns or (self.members and not self.me):
            self._look_again()

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def own_address(self) -> str:
        """Return where other nodes reach this one, as far as it can tell."""
        if self.me:
            return self.me
        host, _ = parse_address(self._section.listen)
        return address_text(_way_out() if host in ANY_HOSTS else host, self.port)

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._look, args=(loop,), name="everstep-members", daemon=True
            )
            self._thread.start()
        else:
            self._note_problem("the name server takes long to answer")
        self._timer = loop.call_later(self._section.resolve_s, self._look_again)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        found = self._find()
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self._take, found)

    def _find(self) -> _Found:
        """Return what is known now; in a thread."""
        problem, members = "", self.members
        if self._section.dns:
            host, port = parse_address(self._section.dns)
            try:
                members = members_of([address_text(each, port) for each in self._resolve(host, port)])
            except OSError as error:
                members, problem = (), f"{host}: {error.strerror or error}"
            if len(members) > MEMBERS_MAX:
                members, problem = (), f"{host} stands for {len(members)} addresses"
        return _Found(members, self._section.address or self._find_me(members), problem)

    def _find_me(self, members: tuple[str, ...]) -> str:
        """Return the member whose address is this machine's, and whose port is the one listened on."""
        for each in members:
            host, port = parse_address(each)
            if port == self.port:
                with suppress(OSError):  # a name that nobody knows is not this node's
                    if any(_is_local(address) for address in self._resolve(host, port)):
                        return each
        return ""

    def _take(self, found: _Found) -> None:
        self._note_problem(found.problem)
        if not found.members:  # a name server that fails moves no sample
            return
        if (found.members, found.me) != (self.members, self.me):
            self.members, self.me = found.members, found.me
            logger.info("cache_members count=%d me=%s", len(self.members), self.me or "none")
            self._changed()

    def _note_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            logger.warning("cache_members_unknown reason=%s: the last ones hold", problem)
        self._problem = problem


def resolved(host: str, port: int) -> list[str]:
    """Return the addresses that a name stands for."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for _, _, _, _, address in found]


def _is_local(address: str) -> bool:
    """Tell whether an address is one of this machine's: only such can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _way_out() -> str:
    """Return the address that this machine has toward others."""
    for family, somewhere in _SOMEWHERE.items():
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"

"""The daemon's process: sockets, signals, start and end. Everything else is behind Node."""

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import aiofiles
import aiofiles.os
import msgspec

from ..core.dead_process import is_dead_but_held
from ..core.errors import ConfigError, EverstepError, QuotaError
from ..core.paths import control_socket_path, ensure_private_directory
from ..core.version import VERSION
from ..proto import frames
from ..proto.wire import pack
from .access.privileges import drop_privileges
from .access.served_users import SHARED_SOCKET_MODE, ServedUsers
from .access.tls_floor import is_tls_1_3_only
from .access.usage import descriptors_of
from .blocking import in_thread
from .config import DaemonConfig, resolve_config
from .configuration.keys_plan import KeyPath
from .configuration.sources import ConfigSources
from .control.service import ControlServer, serve_control
from .devices.hand_over import ask_holder
from .devices.stores import collect_garbage_rarely, use_all_descriptors, use_short_switch_interval
from .events.event_types import EventKind
from .fd_store.adoption import adopt_stored
from .fd_store.inherited_plan import Inherited
from .health_check.server import serve_health_check
from .heap import give_freed_memory_back
from .inherited import listening_socket, take_inherited
from .log import LogSection, begin_logging, with_environment
from .node import Node
from .nodes.service import serve_peers
from .peer import Peer, identify
from .processor_class import wait_for_turn
from .service_manager import notify
from .session import Session
from .stacks import stacks_on_signal
from .watchdog import begin_feeding

logger = logging.getLogger(__name__)

ACCEPT_BACKLOG = 128
ACCEPT_PAUSE_S = 1.0
HAND_OVER_DEADLINE_S = 10.0
HAND_OVER_POLL_S = 0.05


class Address(msgspec.Struct, kw_only=True):
    """What stands in daemon.json beside the socket: for people, and for a daemon that finds the socket taken."""

    pid: int
    version: str
    metrics_port: int
    private: bool


_ADDRESS = msgspec.json.Decoder(Address)


def run_daemon(
    *, config_path: Path | None, socket_path: Path | None, private: bool, flags: Sequence[str] = ()
) -> None:
    """Run a daemon until it is told or has reason to end. `flags`: `KEY=VALUE` each, before all else.

    Raises:
        EverstepError: it cannot start.
    """
    begin_logging(with_environment(LogSection()), private=private)
    # What a service manager has handed over: the data socket, and arenas of a daemon before this one.
    inherited = take_inherited()
    given = listening_socket(inherited)
    if given is not None:
        flags = (*flags, f"daemon.socket={given.getsockname()}")
    if socket_path is not None:
        flags = (*flags, f"daemon.socket={socket_path}")
    sources = ConfigSources(path=config_path and config_path.absolute(), environment=os.environ, flags=flags)
    resolved = resolve_config(sources)
    config = resolved.taken()
    begin_logging(with_environment(config.log), private=private)
    if not private:
        drop_privileges(config.daemon.user)
    os.umask(0o077)
    give_freed_memory_back()
    wait_for_turn()
    with (
        _listen(config, private=private, given=given) as listener,
        stacks_on_signal(config.socket_path()),
    ):
        asyncio.run(
            _serve(
                config,
                listener,
                private=private,
                sources=sources,
                origins=resolved.origins,
                inherited=inherited,
            )
        )


@contextlib.contextmanager
def _listen(
    config: DaemonConfig, *, private: bool, given: socket.socket | None = None
) -> Generator[socket.socket]:
    """Hold the socket's lock file and listen; what a dead daemon left there is removed.

    `given`: a service manager listens there already, for this daemon and those after it.

    The lock is taken before anything is bound: a stale socket file proves nothing, a held lock does. An idle private
    daemon makes way for a node's.
    """
    path = config.socket_path()
    is_shared = not private and ServedUsers.of(config.daemon.users).are_several
    ensure_private_directory(path.parent, is_shared=is_shared)
    lock = os.open(
        path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        # Who starts a private one found nobody who answers: if the lock is held, then by a daemon that is ending.
        is_free_soon = private or _lock(lock) or ask_holder(str(path))
        if not is_free_soon or not _lock(lock, HAND_OVER_DEADLINE_S):
            raise ConfigError(
                f"another daemon{_told(path)} listens on {path}",
                hint="use it, or stop it first: everstep stop",
            )
        for stale in (control_socket_path(path), _address_path(path)):
            stale.unlink(missing_ok=True)
        if given is not None:
            given.setblocking(False)
            with given:
                yield given
            return
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(str(path))
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {path}: {error.strerror or error}", hint="a shorter path?"
                ) from error
            if is_shared:
                path.chmod(SHARED_SOCKET_MODE)
            listener.listen(ACCEPT_BACKLOG)
            listener.setblocking(False)
            yield listener
            path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _lock(fd: int, deadline_s: float = 0.0) -> bool:
    """Return whether the lock was free, or became so in time."""
    until_s = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(HAND_OVER_POLL_S)
        else:
            return True


def _told(path: Path) -> str:
    """Return what the daemon that listens there says of itself, in brackets; nothing when it has not said it yet."""
    try:
        facts = _ADDRESS.decode(_address_path(path).read_bytes())
    except (OSError, msgspec.MsgspecError):
        return ""
    dead = "; it was ended, and a call of it on a drive hangs" if is_dead_but_held(facts.pid) else ""
    return f" ({'private' if facts.private else 'node'}, pid {facts.pid}{dead})"


def _address_path(path: Path) -> Path:
    """Where a daemon tells what it is."""
    return path.with_name("daemon.json")


async def _serve(
    config: DaemonConfig,
    listener: socket.socket,
    *,
    private: bool,
    sources: ConfigSources,
    origins: Mapping[KeyPath, str],
    inherited: Inherited,
) -> None:
    """Start, serve and end. What can fail for a reason that a user can mend comes before the first task."""
    _set_up_process()
    assert is_tls_1_3_only() or not config.control.listen, "the command that starts a daemon says it first"
    path = config.socket_path()
    control_path = control_socket_path(path)
    node = Node(config, private=private, version=VERSION, control_socket=control_path)
    _heed_signals(node, sources, origins)
    async with contextlib.AsyncExitStack() as held:
        if config.metrics.enabled:
            node.open_site()
        held.callback(node.close_site)
        held.push_async_callback(in_thread, node.traces.close)
        held.push_async_callback(node.stores.close)
        if not private:
            await node.stores.open(list(config.devices))
        control = await serve_control(node, control_path)
        held.push_async_callback(control.stop)
        checks = await serve_health_check(node)  # answers until the end: while it drains, that it does
        if checks is not None:
            held.push_async_callback(checks.stop)
        served = await serve_peers(node.peers, node.caches)
        if served is not None:
            held.push_async_callback(served.stop)
        async with asyncio.TaskGroup() as tasks:
            node.use_tasks(tasks)
            if served is not None:
                node.peers.begin(served.port)
            await adopt_stored(node, inherited)
            fed = begin_feeding(node)
            await _until_told(node, listener, control)
            if served is not None:
                await served.stop()
            await node.peers.stop()
            await _drain(node, node.config.daemon.drain_s)
            await node.arena_desk.forget_stored()
            if fed is not None:
                fed.cancel()
            await control.stop()
    _address_path(path).unlink(missing_ok=True)
    logger.info("daemon_ended")


def _set_up_process() -> None:
    use_short_switch_interval()
    collect_garbage_rarely()
    use_all_descriptors()


def _heed_signals(node: Node, sources: ConfigSources, origins: Mapping[KeyPath, str]) -> None:
    node.reloader.use(sources, origins)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(node.on_loop_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.lifetime.end, signal.Signals(number).name)
    loop.add_signal_handler(signal.SIGHUP, node.reloader.on_signal)


async def _until_told(node: Node, listener: socket.socket, control: ControlServer) -> None:
    """Answer until there is reason to end."""
    loop, path = asyncio.get_running_loop(), node.config.socket_path()
    for opened in node.stores.stores:
        node.watch(opened)
    _listen_on(node, listener)
    await _write_address(_address_path(path), node)
    await control.health.set(serving=True)
    node.lifetime.changed()
    logger.info(
        "daemon_ready version=%s pid=%d socket=%s private=%s", VERSION, os.getpid(), path, node.private
    )
    if not node.private:  # one that a service starts for itself does not speak for the service
        await in_thread(notify, "READY=1", patient=True)  # who misses it waits, and kills the daemon then
    reason = await node.lifetime.wait()
    logger.info("daemon_draining reason=%s", reason)
    node.reporter.add(EventKind.DRAINING, f"the daemon ends: {reason}")
    if not node.private:
        notify("STOPPING=1")
    await control.health.set(serving=False)
    loop.remove_reader(listener.fileno())


async def _drain(node: Node, deadline_s: float) -> None:
    """Let what is sealed reach the devices, then end the sessions; the memory goes with the process."""
    node.verifier.stop()
    node.scrubber.stop()
    node.pins.stop()
    node.idle_stores.stop()
    node.devices.stop()
    try:
        async with asyncio.timeout(deadline_s):
            await node.persister.settled_by_now()
            # Who saves without a pause has always something under way: it goes on without a daemon from here on.
            for session in [each for each in node.sessions if each.lease is not None]:
                session.end()
            await node.persister.idle()
    except TimeoutError:
        logger.error("drain_incomplete deadline_s=%.0f", deadline_s)
    unsettled_count = sum(rank.writing for rank in node.registry.ranks())
    text = (
        "everything that was sealed is settled"
        if not unsettled_count
        else "not all that was sealed is settled"
    )
    node.reporter.add(EventKind.DRAINED, text, count=unsettled_count)
    node.events.close()
    for session in list(node.sessions):
        session.end()


def _listen_on(node: Node, listener: socket.socket) -> None:
    if not node.lifetime.is_ending:
        asyncio.get_running_loop().add_reader(listener.fileno(), _accept, node, listener)


def _accept(node: Node, listener: socket.socket) -> None:
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return
    except OSError as error:  # no descriptor left, or no memory: whoever waits is asked again in a while
        logger.error("cannot_accept reason=%s", error)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener.fileno())
        loop.call_later(ACCEPT_PAUSE_S, _listen_on, node, listener)
        return
    if _has_left(sock):  # who comes and goes costs others no more than this
        sock.close()
        return
    try:
        peer = identify(sock)
    except EverstepError as error:
        logger.warning("peer_unknown reason=%s", error)
        sock.close()
        return
    try:
        now_s = asyncio.get_running_loop().time()
        wait_s = node.quotas.connect(peer.uid, now_s, descriptors=descriptors_of(node, peer.uid))
    except QuotaError as error:
        _refuse(node, sock, peer, error)
        return
    node.sessions.add(Session(node, sock, peer, wait_s))


def _has_left(sock: socket.socket) -> bool:
    """Tell whether the other end is closed already, and has said nothing."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _refuse(node: Node, sock: socket.socket, peer: Peer, error: QuotaError) -> None:
    """Say why, as far as that can be said at once, and close."""
    node.metrics.sockets.refused_total.labels(error.code).inc()
    node.refusals.add("connection_refused", f"uid:{peer.uid}", error.code, error.message)
    sock.setblocking(False)
    with sock, contextlib.suppress(OSError):  # whoever has left hears nothing
        sock.send(pack(frames.Failure(re=0, code=error.code, message=error.message, hint=error.hint)))
    os.close(peer.pidfd)


async def _write_address(path: Path, node: Node) -> None:
    address = Address(pid=os.getpid(), version=VERSION, metrics_port=node.metrics_port, private=node.private)
    beside = path.with_name(f".{path.name}")
    async with aiofiles.open(beside, "wb") as file:
        await file.write(msgspec.json.encode(address) + b"\n")
    await aiofiles.os.replace(beside, path)  # nobody reads half of it


def private_main() -> int:
    """Entry of `python -m everstep.daemon`: what the hook starts. Lets go of everything inherited first."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    parser = argparse.ArgumentParser(prog="everstep.daemon")
    parser.add_argument("--private", action="store_true", required=True)
    parser.add_argument("--socket", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        run_daemon(config_path=None, socket_path=arguments.socket, private=True)
    except EverstepError as error:
        logger.error("daemon_failed %s", error)
        return 1
    return 0

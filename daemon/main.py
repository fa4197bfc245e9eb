"""The daemon's process: sockets, signals, start and end. Everything else is behind Node."""

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Generator
from pathlib import Path

import aiofiles
import msgspec

from ..core.errors import ConfigError, EverstepError
from ..core.paths import control_socket_path, ensure_private_directory
from ..core.version import VERSION
from .config import DaemonConfig, load_config, private_config
from .control import ControlServer, serve_control
from .hand_over import ask_holder
from .heap import give_freed_memory_back
from .node import Node
from .peer import identify
from .service_manager import notify
from .session import Session
from .stores import collect_garbage_rarely, use_all_descriptors, use_short_switch_interval

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


def run_daemon(*, config_path: Path | None, socket_path: Path | None, private: bool) -> None:
    """Run a daemon until it is told or has reason to end.

    Raises:
        EverstepError: it cannot start.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    config = load_config(config_path) if config_path is not None else private_config()
    if socket_path is not None:
        config = msgspec.structs.replace(
            config, daemon=msgspec.structs.replace(config.daemon, socket=str(socket_path))
        )
    os.umask(0o077)
    give_freed_memory_back()
    with _listen(config.socket_path(), private=private) as listener:
        asyncio.run(_serve(config, listener, private=private))


@contextlib.contextmanager
def _listen(path: Path, *, private: bool) -> Generator[socket.socket]:
    """Hold the socket's lock file and listen; what a dead daemon left there is removed.

    The lock is taken before anything is bound: a stale socket file proves nothing, a held lock does. An idle private
    daemon makes way for a node's.
    """
    ensure_private_directory(path.parent)
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
        for stale in (path, control_socket_path(path), _address_path(path)):
            stale.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(str(path))
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {path}: {error.strerror or error}", hint="a shorter path?"
                ) from error
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
        facts = msgspec.json.decode(_address_path(path).read_bytes(), type=Address)
    except (OSError, msgspec.MsgspecError):
        return ""
    return f" ({'private' if facts.private else 'node'}, pid {facts.pid})"


def _address_path(path: Path) -> Path:
    """Where a daemon tells what it is."""
    return path.with_name("daemon.json")


async def _serve(config: DaemonConfig, listener: socket.socket, *, private: bool) -> None:
    """Start, serve and end. What can fail for a reason that a user can mend comes before the first task."""
    use_short_switch_interval()
    collect_garbage_rarely()
    use_all_descriptors()
    path = config.socket_path()
    control_path = control_socket_path(path)
    node = Node(config, private=private, version=VERSION, control_socket=control_path)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(node.on_loop_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.lifetime.end, signal.Signals(number).name)
    async with contextlib.AsyncExitStack() as held:
        if config.metrics.enabled:
            node.metrics_port, server = node.metrics.serve(config.metrics.port)
            held.callback(server.close)
        held.push_async_callback(node.stores.close)
        if not private:
            await node.stores.open(list(config.devices))
        control = await serve_control(node, control_path)
        held.push_async_callback(control.stop)
        async with asyncio.TaskGroup() as tasks:
            node.use_tasks(tasks)
            await _until_told(node, listener, control)
            await _drain(node, config.daemon.drain_s)
            await control.stop()
    _address_path(path).unlink(missing_ok=True)
    logger.info("daemon_ended")


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
        notify("READY=1")
    reason = await node.lifetime.wait()
    logger.info("daemon_draining reason=%s", reason)
    if not node.private:
        notify("STOPPING=1")
    await control.health.set(serving=False)
    loop.remove_reader(listener.fileno())


async def _drain(node: Node, deadline_s: float) -> None:
    """Let what is sealed reach the devices, then end the sessions; the memory goes with the process."""
    node.verifier.stop()
    node.scrubber.stop()
    node.devices.stop()
    try:
        async with asyncio.timeout(deadline_s):
            await node.persister.idle()
    except TimeoutError:
        logger.error("drain_incomplete deadline_s=%.0f", deadline_s)
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
    try:
        peer = identify(sock)
    except EverstepError as error:
        logger.warning("peer_unknown reason=%s", error)
        sock.close()
        return
    node.sessions.add(Session(node, sock, peer))


async def _write_address(path: Path, node: Node) -> None:
    address = Address(pid=os.getpid(), version=VERSION, metrics_port=node.metrics_port, private=node.private)
    async with aiofiles.open(path, "wb") as file:
        await file.write(msgspec.json.encode(address) + b"\n")


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

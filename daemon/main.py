"""The daemon's process: sockets, signals, start and end. Everything else is behind Node."""

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Generator
from pathlib import Path

import aiofiles
import msgspec

from ..core.errors import ConfigError, EverstepError
from ..core.paths import control_socket_path, ensure_private_directory
from ..core.version import VERSION
from .config import DaemonConfig, load_config, private_config
from .control import serve_control
from .node import Node
from .peer import identify
from .session import Session
from .stores import use_short_switch_interval

logger = logging.getLogger(__name__)

ACCEPT_BACKLOG = 128
CONTROL_GRACE_S = 1.0


def run_daemon(*, config_path: Path | None, socket_path: Path | None, private: bool) -> int:
    """Run a daemon until it is told or has reason to end; return the exit status."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    try:
        config = load_config(config_path) if config_path is not None else private_config()
        if socket_path is not None:
            config = msgspec.structs.replace(
                config, daemon=msgspec.structs.replace(config.daemon, socket=str(socket_path))
            )
        os.umask(0o077)
        with _listen(config.socket_path()) as listener:
            asyncio.run(_serve(config, listener, private=private))
    except EverstepError as error:
        logger.error("daemon_failed %s", error)
        return 1
    return 0


@contextlib.contextmanager
def _listen(path: Path) -> Generator[socket.socket]:
    """Hold the socket's lock file and listen; what a dead daemon left there is removed.

    The lock is taken before anything is bound: a stale socket file proves nothing, a held lock does.
    """
    ensure_private_directory(path.parent)
    lock = os.open(
        path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another daemon listens on {path}", hint="use it, or stop it first") from None
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


def _address_path(path: Path) -> Path:
    """Where a daemon tells people (not programs) what it is."""
    return path.with_name("daemon.json")


async def _serve(config: DaemonConfig, listener: socket.socket, *, private: bool) -> None:
    use_short_switch_interval()
    path = config.socket_path()
    control_path = control_socket_path(path)
    node = Node(config, private=private, version=VERSION, control_socket=control_path)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.lifetime.end, signal.Signals(number).name)
    metrics = node.metrics.serve(config.metrics.port) if config.metrics.enabled else None
    node.metrics_port = metrics[0] if metrics else 0
    async with asyncio.TaskGroup() as tasks:
        node.use_tasks(tasks)
        if not private:
            await node.stores.open(list(config.devices))
        control = await serve_control(node, control_path)
        loop.add_reader(listener.fileno(), _accept, node, listener)
        await _write_address(_address_path(path), node)
        node.lifetime.changed()
        logger.info(
            "daemon_ready version=%s pid=%d socket=%s private=%s", VERSION, os.getpid(), path, private
        )
        reason = await node.lifetime.wait()
        logger.info("daemon_draining reason=%s", reason)
        loop.remove_reader(listener.fileno())
        await _drain(node, config.daemon.drain_s)
        await control.stop(CONTROL_GRACE_S)
    await node.stores.close()
    if metrics is not None:
        metrics[1].close()
    _address_path(path).unlink(missing_ok=True)
    logger.info("daemon_ended")


async def _drain(node: Node, deadline_s: float) -> None:
    """Let what is sealed reach the devices, then end the sessions and give the memory back."""
    try:
        async with asyncio.timeout(deadline_s):
            await node.persister.idle()
    except TimeoutError:
        logger.error("drain_incomplete deadline_s=%.0f", deadline_s)
    for session in list(node.sessions):
        session.end()
    for rank in node.registry.ranks():
        if not rank.persisting:
            node.drop_memory(rank)


def _accept(node: Node, listener: socket.socket) -> None:
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return
    try:
        peer = identify(sock)
    except EverstepError as error:
        logger.warning("peer_unknown reason=%s", error)
        sock.close()
        return
    node.sessions.add(Session(node, sock, peer))


async def _write_address(path: Path, node: Node) -> None:
    facts = {
        "pid": os.getpid(),
        "version": VERSION,
        "metrics_port": node.metrics_port,
        "private": node.private,
    }
    async with aiofiles.open(path, "w", encoding="utf-8") as file:
        await file.write(json.dumps(facts) + "\n")


def private_main() -> int:
    """Entry of `python -m everstep.daemon`: what the hook starts. Lets go of everything inherited first."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    parser = argparse.ArgumentParser(prog="everstep.daemon")
    parser.add_argument("--private", action="store_true", required=True)
    parser.add_argument("--socket", type=Path, required=True)
    arguments = parser.parse_args()
    return run_daemon(config_path=None, socket_path=arguments.socket, private=True)

"""`everstep top`: the node live in a terminal, or once in a pipe."""

import argparse
import os
import queue
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.live import Live

from ...core.errors import EverstepError
from ...core.paths import data_socket_path
from ..control.client import connected
from ..control.views import StatusView
from .output import EXIT_DONE, Output
from .render import make_console
from .top_plan import Top, document, keys, without_choice
from .top_render import draw

RETRY_S = 1.0
REDRAW_S = 1.0
JOIN_S = 1.0
READ_BYTES = 64


def top(arguments: argparse.Namespace) -> int:
    """Print once, or watch until `q`."""
    output = Output(as_json=arguments.json)
    if arguments.json or arguments.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        return _once(output)
    return _watch(make_console(), arguments.every)


def _once(output: Output) -> int:
    seen = Top()
    with connected(data_socket_path()) as daemon:
        seen.answered(daemon.status(), time.time())
    screen = without_choice(seen.screen(time.time()))
    output.show(document(screen), lambda console: console.print(draw(screen, help_line=False)))
    return EXIT_DONE


class _Asker:
    """Asks the daemon again and again in a thread of its own, so that keys are heard while it does not answer."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.answers: queue.SimpleQueue[StatusView | EverstepError] = queue.SimpleQueue()
        self.wake_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-top", daemon=True)

    def __enter__(self) -> "_Asker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():  # else it waits for a daemon that hangs, and ends with the process
            os.close(self.wake_fd)
            os.close(self._write_fd)

    def wake(self) -> None:
        """Let who waits on `wake_fd` look up."""
        try:
            os.write(self._write_fd, b"\0")
        except BlockingIOError:
            return  # it is full of the same

    def _tell(self, answer: StatusView | EverstepError) -> None:
        self.answers.put(answer)
        self.wake()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                with connected(data_socket_path()) as daemon:
                    while not self._ended.is_set():
                        self._tell(daemon.status())
                        self._ended.wait(self._every_s)
            except EverstepError as error:  # shown, and asked again: a daemon may be starting
                self._tell(error)
                self._ended.wait(RETRY_S)


class _EndedError(Exception):
    """A signal said so."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _watch(console: Console, every_s: float) -> int:
    seen = Top()
    try:
        with _Asker(every_s) as asker, _signals(asker) as stopped, _terminal(sys.stdin.fileno()) as terminal:
            _loop(console, seen, asker, stopped, terminal)
    except _EndedError as error:
        return 128 + error.number
    return EXIT_DONE


def _loop(
    console: Console, seen: Top, asker: _Asker, stopped: threading.Event, terminal: "_Terminal"
) -> None:
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            live.update(draw(seen.screen(time.time()), help_line=True), refresh=True)
            ready, _, _ = select.select([sys.stdin, asker.wake_fd], [], [], REDRAW_S)
            if asker.wake_fd in ready:
                os.read(asker.wake_fd, 4096)
            while not asker.answers.empty():
                answer = asker.answers.get()
                if isinstance(answer, EverstepError):
                    seen.failed(answer.message)
                else:
                    seen.answered(answer, time.time())
            if sys.stdin in ready:
                data = os.read(sys.stdin.fileno(), READ_BYTES)
                if not data or not all(seen.press(key) for key in keys(data)):
                    return
            if stopped.is_set():
                stopped.clear()
                live.stop()
                terminal.pause()
                live.start()


class _Terminal:
    """The keyboard's mode: each key at once, and none of them shown."""

    def __init__(self, fd: int) -> None:
        self._fd, self._before = fd, termios.tcgetattr(fd)
        tty.setcbreak(fd)

    def restore(self) -> None:
        """Let it be as it was."""
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pause(self) -> None:
        """Stop this process (Ctrl-Z) with the terminal as it was, until somebody continues it."""
        self.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        tty.setcbreak(self._fd)


@contextmanager
def _terminal(fd: int) -> Generator[_Terminal]:
    terminal = _Terminal(fd)
    try:
        yield terminal
    finally:
        terminal.restore()


@contextmanager
def _signals(asker: _Asker) -> Generator[threading.Event]:
    """Turn signals that end into an exception, Ctrl-Z into the event, and a new size into a new picture."""
    stopped = threading.Event()

    def end(number: int, _: FrameType | None) -> None:
        raise _EndedError(number)

    def stop(*_: object) -> None:
        stopped.set()
        asker.wake()

    def resized(*_: object) -> None:
        asker.wake()

    handlers = {signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGTSTP: stop, signal.SIGWINCH: resized}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""How a run hears that it is about to be ended: SIGTERM, a file, a command. It hears it on a thread of its own."""

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn, cast

from ..core.errors import UsageError
from .end_machine import GRACE_S, SIGTERM, Notice
from .notice_command import NoticeCommand
from .notice_file import NoticeFile

logger = logging.getLogger(__name__)

CONFIRM_S = 2.0
"""How long a rank that SIGTERM tells to end waits for the others to be told the same."""
SECOND_S = 1.0
"""What comes sooner is no second SIGTERM: `timeout` of coreutils signals its child and then the group it is in."""
POLL_S = 2.0
ENDED_STATUS = 128 + signal.SIGTERM
_CLOSE, _HANDLED, _PASSED_ON = b"\0", b"\xff", b"\xfe"
"""No numbers of signals, which the interpreter writes to the same socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """What announces the end of a run, how long before, and whether the run then ends by itself.

        everstep.attach("my-run", ..., preemption=everstep.Preemption(notice_file="/run/spot", grace_s=120.0))

    Raises:
        UsageError: a value that makes no sense; the message names it.
    """

    sigterm: bool = True
    """SIGTERM does, where nobody else has a handler for it. A second one, after a second, ends the process at once."""
    notice_file: str | os.PathLike[str] | None = None
    """This file's appearing does."""
    notice_command: Sequence[str] | None = None
    """This command's success (exit status 0) does; run every few seconds, without a shell."""
    grace_s: float = GRACE_S
    """Seconds from the announcement to the end."""
    ends: bool = True
    """After its checkpoint the run raises SystemExit; False: it goes on until somebody ends it."""

    def __post_init__(self) -> None:
        if not 0 < self.grace_s < 86400:
            raise UsageError(f"grace_s is {self.grace_s}", hint="seconds from the announcement to the end")
        if self.notice_command is not None and (
            isinstance(self.notice_command, str)
            or not self.notice_command
            or not all(map(_is_text, self.notice_command))
        ):
            raise UsageError(
                f"notice_command is {self.notice_command!r}", hint="a program and its arguments: ['curl', …]"
            )
        if self.notice_file is not None and not _is_text(self.notice_file):
            raise UsageError(f"notice_file is {self.notice_file!r}", hint="the path of a file")


def _is_text(value: object) -> bool:
    """Tell whether the system takes it as a path or an argument."""
    try:
        return b"\0" not in os.fsencode(cast("str", value))
    except (TypeError, ValueError):  # UnicodeEncodeError is one
        return False


class NoticeWatch:
    """Waits for announcements and tells each once, and SIGTERM; made on the main thread where that is heard.

    Where the run then ends by itself only the first notice is told; else one that was taken back and is given again is
    a new one.

    `on_unconfirmed` is called a while after SIGTERM: by then all ranks of a run that is ended as a whole have heard it.

    The main thread may be inside a collective whose peer has died, where no Python handler of a signal ever runs. So
    the signal comes through the wake-up descriptor, which the interpreter's own handler writes to in whatever thread.
    But there is one such descriptor, and an event loop of asyncio with handlers of signals takes it and leaves none. So
    the signal's Python handler speaks, too, and the descriptor is taken back by it and at boundaries.
    """

    def __init__(
        self, preemption: Preemption, on_notice: Callable[[Notice], None], on_unconfirmed: Callable[[], None]
    ) -> None:
        self._preemption, self._on_notice, self._on_unconfirmed = preemption, on_notice, on_unconfirmed
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        file = preemption.notice_file
        self._file = NoticeFile(file, every_s=POLL_S) if file is not None else None
        self._command = NoticeCommand(preemption.notice_command) if preemption.notice_command else None
        self._standing: set[str] = set()
        """Notices that were told and are not taken back."""
        self._looks_at_s, self.is_closed = 0.0, False
        self._first_s: float | None = None
        """When SIGTERM was heard first, of the monotonic clock."""
        self._unmatched = 0
        """Signals that the descriptor has told, and whose Python handler has not run yet."""
        self._hears_signal = False
        self._thread = threading.Thread(target=self._work, name="everstep-notice", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._ear.close()
            self._mouth.close()
            raise
        self._hears_signal = preemption.sigterm and self._take_signal()  # nobody would hear it before

    @property
    def descriptor(self) -> int:
        """What the interpreter writes signals to while this watch is the first one."""
        return self._mouth.fileno()

    def at_boundary(self) -> None:
        """Take the wake-up descriptor back if nobody has it; on any thread, every few seconds."""
        if self._hears_signal and time.monotonic() >= self._looks_at_s:
            self._looks_at_s = time.monotonic() + POLL_S
            _take_descriptor()

    def handled(self) -> None:
        """The signal's Python handler runs."""
        self._say(_HANDLED)

    def passed_on(self) -> None:
        """Another watch has heard SIGTERM; on that one's thread."""
        self._say(_PASSED_ON)

    def close(self) -> None:
        """Give the signal back, if this is the main thread, and end the thread. Else its handler gives it back."""
        self.is_closed = True
        if self._hears_signal and threading.current_thread() is threading.main_thread():
            _forget_closed()
        self._mouth.send(_CLOSE)
        self._thread.join()
        self._ear.close()
        if not self._hears_signal or threading.current_thread() is threading.main_thread():
            self._mouth.close()  # else the interpreter still writes to it

    def _say(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # full: then there is enough to hear
            self._mouth.send(what)

    def _take_signal(self) -> bool:
        """Return whether SIGTERM is heard from now on."""
        handler = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            why = "attach() was not called on the main thread"
        elif handler not in (signal.SIG_DFL, _on_signal):
            why = "somebody else has a handler for it"
        else:
            _hearing.append(self)  # first: each signal's Python handler must speak
            if _take_descriptor() or handler is _on_signal:
                signal.signal(signal.SIGTERM, _on_signal)
                return True
            _hearing.remove(self)
            why = "somebody else, asyncio maybe, has the interpreter's wake-up descriptor"
        logger.info("sigterm_not_heard reason=%s", why)
        return False

    # -- the thread

    def _work(self) -> None:
        if not self._wait():
            return
        self._tell(SIGTERM)
        grace_s = self._process_grace_s
        heard = self._heard(min(CONFIRM_S, grace_s))
        if heard is None:
            self._on_unconfirmed()
            heard = self._heard(max(0.0, grace_s - CONFIRM_S))
        if heard != "":
            why = "a second SIGTERM" if heard else f"it had not ended {grace_s:.0f} s after SIGTERM"
            logger.error("run_ended reason=%s", why)
            end_now()

    @property
    def _process_grace_s(self) -> float:
        """How long the process has after SIGTERM: another run that hears it may wait longer for its last checkpoint."""
        watches = [self, *(each for each in tuple(_hearing) if not each.is_closed)]
        return max(each._preemption.grace_s for each in watches)

    def _tell(self, reason: str, *, late_s: float = 0.0) -> None:
        until_s = time.monotonic() + self._preemption.grace_s - late_s
        ends = self._preemption.ends or reason == SIGTERM
        self._on_notice(Notice(reason=reason, until_s=until_s, ends=ends))

    def _wait(self) -> str:
        """Tell notices until SIGTERM is heard, and return that; empty when the watch is closed."""
        while True:
            heard = self._heard(POLL_S if self._polls else None)
            if heard is None:
                heard = self._poll()
            if heard is not None:
                return heard

    @property
    def _polls(self) -> bool:
        """Tell whether a notice may come: behind one that ends the run there is none."""
        has_any = self._file is not None or self._command is not None
        return has_any and not (self._preemption.ends and self._standing)

    def _heard(self, timeout_s: float | None, *, or_ready: int | None = None) -> str | None:
        """Return SIGTERM, or an empty text when the watch is closed; None when nothing came in time.

        None, too, when the descriptor `or_ready` is readable.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()  # select() takes no descriptor above 1023
        for descriptor in (self._ear.fileno(), *([] if or_ready is None else [or_ready])):
            poll.register(descriptor, select.POLLIN)
        while True:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            ready = {each for each, _ in poll.poll(None if left_s is None else 1000 * left_s)}
            if self._ear.fileno() not in ready:
                return None
            said = self._ear.recv(1)
            if said == _CLOSE:
                return ""
            if self._is_signal(said) and self._counts():
                if said != _PASSED_ON:
                    self._pass_on()
                return SIGTERM

    def _counts(self) -> bool:
        """Tell whether SIGTERM is the first one, or comes long enough after it."""
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            return True
        return now_s > self._first_s + SECOND_S

    def _is_signal(self, said: bytes) -> bool:
        """Tell whether a byte is a signal, and not the Python handler of one that was heard before.

        One handler runs for all signals that came since the last; without the descriptor it is all that is heard.
        """
        if said == _HANDLED:
            told, self._unmatched = self._unmatched, 0
            return not told
        if said == bytes([signal.SIGTERM]):
            if signal.getsignal(signal.SIGTERM) is not _on_signal:
                return False  # somebody has taken it since: it counts where that handler calls ours
            self._unmatched += 1
            return True
        return said == _PASSED_ON

    def _pass_on(self) -> None:
        for other in tuple(_hearing):
            if other is not self:
                other.passed_on()

    def _poll(self) -> str | None:
        """Tell what the file and the command announce; return what was heard meanwhile, None: nothing."""
        file = self._file
        if file is not None and (answer := file.ask()) is not None:
            self._found(file.reason, answer.is_there, late_s=answer.late_s)
        return self._ask(self._command) if self._command is not None and self._polls else None

    def _ask(self, command: NoticeCommand) -> str | None:
        """The same of the command. What is heard ends it."""
        heard, succeeds = None, False
        if command.begin():
            while heard is None and command.is_running:
                heard = self._heard(command.wait_s, or_ready=command.descriptor)
            succeeds = command.end()
        if heard is None:
            self._found(f"{command.name} says so", succeeds)
        return heard

    def _found(self, reason: str, is_given: bool, *, late_s: float = 0.0) -> None:
        """Tell a notice that is given, and was not when it was looked for last."""
        if not is_given:
            self._standing.discard(reason)
        elif reason not in self._standing:
            self._standing.add(reason)
            self._tell(reason, late_s=late_s)


def end_now() -> NoReturn:
    """End this process at once, from any thread, with the status of one that SIGTERM ended; nothing is flushed."""
    os._exit(ENDED_STATUS)


_hearing: list[NoticeWatch] = []
"""Who hears SIGTERM: the first one from the interpreter, the others from that one."""


def _take_descriptor() -> bool:
    """Tell whether the wake-up descriptor is that of the first watch that is open; who else has one keeps it.

    Closed ones are forgotten. A signal's handler does this between any two instructions of others: nothing here locks.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    known = tuple(_hearing)  # open at least until the interpreter has another descriptor
    _hearing[:] = [watch for watch in known if not watch.is_closed]
    first = _hearing[0].descriptor if _hearing else -1
    other = signal.set_wakeup_fd(first, warn_on_full_buffer=False)
    if other in (-1, *(watch.descriptor for watch in known)):
        return True
    try:
        signal.set_wakeup_fd(other)
    except (OSError, ValueError):  # its owner has closed it
        return True
    return False


def _forget_closed() -> None:
    """Closed watches hear nothing any more; with the last one SIGTERM ends the process, unless others handle it."""
    _take_descriptor()
    if not _hearing and signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Mask(threading.local):
    """What a thread that forks had blocked before."""

    before: Iterable[int] | None = None


_mask = _Mask()


def _before_fork() -> None:
    """A child's SIGTERM waits until the child's signals are its own, or the parent would hear it."""
    if _hearing:
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    if _mask.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)
        _mask.before = None


def _in_child() -> None:
    """A forked child's signals are none of its parent's."""
    if _hearing:
        for watch in _hearing:
            watch.is_closed = True
        _forget_closed()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _on_signal(number: int, frame: FrameType | None) -> None:
    del number, frame
    _forget_closed()
    if _hearing:
        _hearing[0].handled()
    elif signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.raise_signal(signal.SIGTERM)

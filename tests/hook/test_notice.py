"""Who is told that a run is to end: by real signals, a file, a command."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest
from pausing import wait_until

from everstep.core.errors import UsageError
from everstep.hook import notice as notice_module
from everstep.hook import notice_command, notice_file
from everstep.hook.end_machine import SIGTERM, Notice
from everstep.hook.notice import CONFIRM_S, POLL_S, SECOND_S, NoticeWatch, Preemption
from everstep.hook.notice_command import COMMAND_DEADLINE_S

DEADLINE_S = 20.0
Watch = Callable[[Preemption], SimpleQueue[Notice]]


@pytest.fixture
def unconfirmed() -> threading.Event:
    """Set when a watch has waited for the confirmation of its SIGTERM."""
    return threading.Event()


@pytest.fixture
def watch(unconfirmed: threading.Event) -> Iterator[Watch]:
    """Start a watch, and close it after the test."""
    made: list[NoticeWatch] = []

    def start(preemption: Preemption) -> SimpleQueue[Notice]:
        told: SimpleQueue[Notice] = SimpleQueue()
        made.append(NoticeWatch(preemption, told.put, unconfirmed.set))
        return told

    yield start
    for each in made:
        each.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_sigterm_is_told_once_with_the_time_that_is_left(watch: Watch) -> None:
    told = watch(Preemption(grace_s=100.0, ends=False))
    os.kill(os.getpid(), signal.SIGTERM)
    notice = told.get(timeout=DEADLINE_S)
    assert (notice.reason, notice.ends) == (SIGTERM, True)
    assert 0 < notice.until_s - time.monotonic() <= 100.0


def test_a_while_after_sigterm_and_only_then_it_is_asked_whether_all_were_told(
    watch: Watch, unconfirmed: threading.Event, tmp_path: Path
) -> None:
    told = watch(Preemption(notice_file=tmp_path / "notice", grace_s=100.0))
    (tmp_path / "notice").touch()
    told.get(timeout=DEADLINE_S)
    assert not unconfirmed.wait(CONFIRM_S + 0.5), "who waits for its end has time"
    began_s = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    told.get(timeout=DEADLINE_S)
    assert unconfirmed.wait(DEADLINE_S)
    assert time.monotonic() - began_s >= CONFIRM_S


def test_of_several_runs_the_one_with_the_most_time_says_when_the_process_is_ended(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(notice_module, "end_now", ended.set)
    told = [watch(Preemption(grace_s=grace_s)) for grace_s in (0.1, 10.0)]
    os.kill(os.getpid(), signal.SIGTERM)
    for each in told:
        each.get(timeout=DEADLINE_S)
    assert not ended.wait(1.0), "the other one saves its last boundary"
    assert ended.wait(DEADLINE_S)


def test_who_closes_meanwhile_is_not_asked(
    unconfirmed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice_module, "CONFIRM_S", 60.0)
    told: SimpleQueue[Notice] = SimpleQueue()
    leaving = NoticeWatch(Preemption(), told.put, unconfirmed.set)
    os.kill(os.getpid(), signal.SIGTERM)
    told.get(timeout=DEADLINE_S)
    leaving.close()  # returns when its thread has ended
    assert not unconfirmed.is_set()


def test_a_file_that_appears_is_told(watch: Watch, tmp_path: Path) -> None:
    told = watch(Preemption(notice_file=tmp_path / "notice", ends=False))
    assert told.empty()
    (tmp_path / "notice").touch()
    notice = told.get(timeout=DEADLINE_S)
    assert (notice.reason, notice.ends) == (f"{tmp_path}/notice is there", False)


def test_a_file_that_cannot_be_asked_for_leaves_sigterm_to_be_heard(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On NFS, say. The thread that hears both ended, and SIGTERM was swallowed from then on."""
    monkeypatch.setattr(notice_module, "POLL_S", 0.01)
    told = watch(Preemption(notice_file=tmp_path / ("n" * 300)))  # ENAMETOOLONG
    wait_until(lambda: any(text.startswith("notice_file_failed") for text in caplog.messages))
    os.kill(os.getpid(), signal.SIGTERM)
    assert told.get(timeout=DEADLINE_S).reason == SIGTERM


class HangingMount:
    """Lets `os.stat` of one path stand until it is opened."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path, self._stat = path, os.stat
        self.asked, self.opens = threading.Event(), threading.Event()
        monkeypatch.setattr(notice_file.os, "stat", self._hanging)

    def _hanging(self, path: Any, **options: Any) -> os.stat_result:
        if path == self._path:
            self.asked.set()
            self.opens.wait(DEADLINE_S)
        return self._stat(path, **options)


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingMount]:
    made = HangingMount(tmp_path / "notice", monkeypatch)
    monkeypatch.setattr(notice_module, "POLL_S", 0.01)
    yield made
    made.opens.set()
    wait_until(lambda: all(each.name != "everstep-notice-file" for each in threading.enumerate()))


def test_sigterm_is_heard_beside_a_file_whose_mount_hangs_and_closing_ends(
    unconfirmed: threading.Event, tmp_path: Path, mount: HangingMount, caplog: pytest.LogCaptureFixture
) -> None:
    told: SimpleQueue[Notice] = SimpleQueue()
    hears = NoticeWatch(Preemption(notice_file=tmp_path / "notice"), told.put, unconfirmed.set)
    assert mount.asked.wait(DEADLINE_S)
    os.kill(os.getpid(), signal.SIGTERM)
    assert told.get(timeout=DEADLINE_S).reason == SIGTERM
    began_s = time.monotonic()
    hears.close()
    assert time.monotonic() - began_s < DEADLINE_S / 2
    assert "does not answer" in caplog.text


def test_a_file_whose_mount_hung_is_told_when_it_answers_once_with_the_time_since_then(
    watch: Watch, tmp_path: Path, mount: HangingMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = watch(Preemption(notice_file=tmp_path / "notice", grace_s=100.0, ends=False))
    assert mount.asked.wait(DEADLINE_S)
    assert sum(each.name == "everstep-notice-file" for each in threading.enumerate()) == 1
    (tmp_path / "notice").touch()
    mount.opens.set()
    assert told.get(timeout=DEADLINE_S).reason == f"{tmp_path}/notice is there"


def test_where_no_thread_is_to_be_had_nothing_hears_sigterm_any_more(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made halfway swallowed it, and stood before all that were made later."""
    with monkeypatch.context() as patched:

        def none(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", none)
        with pytest.raises(RuntimeError, match="new thread"):
            watch(Preemption())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    told = watch(Preemption())
    os.kill(os.getpid(), signal.SIGTERM)
    assert told.get(timeout=DEADLINE_S).reason == SIGTERM


@pytest.mark.parametrize("status", [0, 3])
def test_a_command_of_which_nobody_knows_how_it_ended_announces_nothing(
    watch: Watch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    """Where SIGCHLD is ignored the kernel forgets its status, and Python says 0."""
    monkeypatch.setattr(notice_module, "POLL_S", 0.01)
    asked = tmp_path / "asked"
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        told = watch(Preemption(notice_command=["sh", "-c", f"echo >> {asked}; exit {status}"]))
        wait_until(lambda: asked.exists() and asked.stat().st_size >= 3)
        wait_until(lambda: "how it ended is not known" in caplog.text)
        assert told.empty()
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(
    "options", [{"notice_command": ["true", 5]}, {"notice_command": ["a\0b"]}, {"notice_file": "a\0b"}]
)
def test_what_the_system_takes_for_no_path_or_argument_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Preemption(**options)


@pytest.mark.parametrize(("age_s", "late_s"), [(0.5, 0.5), (3600.0, POLL_S), (-3600.0, 0.0)])
def test_the_time_that_is_left_is_counted_from_when_the_file_was_made(
    watch: Watch, tmp_path: Path, age_s: float, late_s: float
) -> None:
    """But from no earlier than when it was looked for and was not there."""
    file = tmp_path / "made before"
    file.touch()
    made_s = time.time() - age_s
    os.utime(file, (made_s, made_s))
    told = watch(Preemption(notice_file=tmp_path / "notice", grace_s=100.0))
    file.rename(tmp_path / "notice")
    notice = told.get(timeout=DEADLINE_S)
    left_s, heard_within_s = notice.until_s - time.monotonic(), POLL_S + 1.0
    assert 100.0 - late_s - heard_within_s <= left_s <= 100.0 - late_s


def test_sigterm_is_heard_after_another_announcement(watch: Watch, tmp_path: Path) -> None:
    told = watch(Preemption(notice_file=tmp_path / "notice", grace_s=100.0, ends=False))
    (tmp_path / "notice").touch()
    assert told.get(timeout=DEADLINE_S).reason.endswith("is there")
    os.kill(os.getpid(), signal.SIGTERM)
    notice = told.get(timeout=DEADLINE_S)
    assert (notice.reason, notice.ends) == (SIGTERM, True)
    assert told.empty()


@pytest.mark.parametrize("by", ["file", "command"])
def test_a_notice_is_told_again_when_it_was_taken_back_and_only_then(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(notice_module, "POLL_S", 0.01)
    found, looks = NoticeWatch._found, list[bool]()

    def look(self: NoticeWatch, reason: str, is_given: bool, *, late_s: float = 0.0) -> None:
        found(self, reason, is_given, late_s=late_s)
        looks.append(is_given)

    def looked(*, is_given: bool) -> None:
        """Wait for looks that began after this call."""
        begun = len(looks)
        wait_until(lambda: looks[begun:].count(is_given) >= 3)

    monkeypatch.setattr(NoticeWatch, "_found", look)
    file = tmp_path / "notice"
    if by == "file":
        told, reason = watch(Preemption(notice_file=file, ends=False)), f"{file} is there"
    else:
        command = ["test", "-e", str(file)]
        told, reason = watch(Preemption(notice_command=command, ends=False)), "test says so"
    for _ in range(3):
        file.touch()
        notice = told.get(timeout=DEADLINE_S)
        assert (notice.reason, notice.ends) == (reason, False)
        looked(is_given=True)
        assert told.empty(), "it stays"
        file.unlink()
        looked(is_given=False)
    file.touch()
    assert told.get(timeout=DEADLINE_S).reason == reason
    os.kill(os.getpid(), signal.SIGTERM)
    assert told.get(timeout=DEADLINE_S).reason == SIGTERM
    file.unlink()
    time.sleep(0.2)
    file.touch()
    time.sleep(0.2)
    assert told.empty(), "nothing comes behind SIGTERM"


def test_a_file_and_a_command_announce_each_for_itself(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice_module, "POLL_S", 0.01)
    command = ["test", "-e", str(tmp_path / "other")]
    told = watch(Preemption(notice_file=tmp_path / "notice", notice_command=command, ends=False))
    (tmp_path / "notice").touch()
    assert told.get(timeout=DEADLINE_S).reason == f"{tmp_path}/notice is there"
    (tmp_path / "other").touch()
    assert told.get(timeout=DEADLINE_S).reason == "test says so"
    time.sleep(0.2)
    assert told.empty()


def test_behind_a_notice_that_ends_the_run_no_other_is_told(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice_module, "POLL_S", 0.01)
    told = watch(Preemption(notice_file=tmp_path / "notice", notice_command=["true"], grace_s=100.0))
    assert told.get(timeout=DEADLINE_S).reason == "true says so"
    (tmp_path / "notice").touch()
    time.sleep(0.2)
    assert told.empty()
    os.kill(os.getpid(), signal.SIGTERM)
    assert told.get(timeout=DEADLINE_S).reason == SIGTERM


def test_a_command_is_asked_until_it_succeeds(watch: Watch, tmp_path: Path) -> None:
    told = watch(Preemption(notice_command=["test", "-e", str(tmp_path / "notice")]))
    (tmp_path / "notice").touch()
    assert told.get(timeout=DEADLINE_S).reason == "test says so"


def test_a_command_that_is_not_there_is_named(
    watch: Watch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = watch(Preemption(notice_command=["no-such-command"], notice_file=tmp_path / "notice"))
    until_s = time.monotonic() + DEADLINE_S
    while "notice_command_failed command=no-such-command" not in caplog.text:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    (tmp_path / "notice").touch()
    assert told.get(timeout=DEADLINE_S).reason.endswith("is there")


def test_a_command_that_is_never_there_is_named_the_first_the_10th_and_the_100th_time(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notice_module, "POLL_S", 0.001)
    watch(Preemption(notice_command=["no-such-command"]))
    wait_until(lambda: "(as 99 times before)" in caplog.text)
    said = [each.getMessage() for each in caplog.records if "notice_command_failed" in each.getMessage()]
    assert said == [said[0], f"{said[0]} (as 9 times before)", f"{said[0]} (as 99 times before)"]


HANGS = f"1000.{os.getpid()}"
"""How long this test's commands sleep, as nobody else's do."""


def hanging() -> set[str]:
    """Return the processes of a command that hangs."""
    found = subprocess.run(["pgrep", "-f", f"^sleep {HANGS}$"], capture_output=True, text=True, check=False)
    return set(found.stdout.split())


def children() -> set[str]:
    """Return this process's children, zombies included."""
    tasks = Path("/proc/self/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def no_pidfd(pid: int) -> int:
    raise OSError(errno.ENOSYS, "as before Linux 5.3", pid)


@pytest.mark.parametrize("has_pidfd", [True, False])
class TestACommandThatHangs:
    @pytest.fixture(autouse=True)
    def kernel(self, monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
        """One with pidfd_open, or an old one."""
        if not has_pidfd:
            monkeypatch.setattr(os, "pidfd_open", no_pidfd)

    @pytest.fixture
    def told(self, kernel: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleQueue[Notice]]:
        """A watch whose command hangs, and has started another one; nothing of it is left when it is closed."""
        monkeypatch.setattr(notice_module, "POLL_S", 0.01)
        descriptors, others = open_descriptors(), children()
        told: SimpleQueue[Notice] = SimpleQueue()
        command = ["sh", "-c", f"sleep {HANGS} & sleep {HANGS}; true"]
        leaving = NoticeWatch(Preemption(notice_command=command), told.put, lambda: None)
        try:
            wait_until(lambda: len(hanging()) == 2)
            yield told
        finally:
            began_s = time.monotonic()
            leaving.close()
        assert time.monotonic() - began_s < COMMAND_DEADLINE_S / 2
        wait_until(lambda: not hanging())
        assert children() == others
        assert open_descriptors() == descriptors

    def test_keeps_nobody_from_hearing_sigterm(self, told: SimpleQueue[Notice]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.get(timeout=COMMAND_DEADLINE_S / 2).reason == SIGTERM
        assert not hanging()

    def test_keeps_nobody_from_closing(self, told: SimpleQueue[Notice]) -> None:
        assert told.empty()

    def test_is_ended_when_its_time_is_over(
        self, watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(notice_module, "POLL_S", 0.01)
        monkeypatch.setattr(notice_command, "COMMAND_DEADLINE_S", 0.2)
        others = children()
        told = watch(Preemption(notice_command=["sleep", HANGS]))
        wait_until(lambda: "reason=it took more than 0 s (as 9 times before)" in caplog.text)
        assert caplog.text.count("notice_command_failed command=sleep") == 2
        assert len(children() - others) <= 1, "one at a time"
        assert told.empty()

    @pytest.mark.parametrize("status", [0, 3])
    def test_does_not_outlive_the_one_that_started_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
    ) -> None:
        """Which has ended by itself."""
        monkeypatch.setattr(notice_module, "POLL_S", 0.01)
        others, asked = children(), tmp_path / "asked"
        command = ["sh", "-c", f"sleep {HANGS} & echo >> {asked}; exit {status}"]
        told: SimpleQueue[Notice] = SimpleQueue()
        leaving = NoticeWatch(Preemption(notice_command=command), told.put, lambda: None)
        try:
            if status == 0:
                assert told.get(timeout=DEADLINE_S).reason == "sh says so"
            else:
                wait_until(lambda: asked.exists() and len(asked.read_text()) >= 3)
        finally:
            leaving.close()
        try:
            assert told.empty()
            wait_until(lambda: not hanging())
            assert children() == others
        finally:
            for pid in hanging():
                os.kill(int(pid), signal.SIGKILL)


def test_a_command_that_writes_much_is_not_stopped_by_it(watch: Watch) -> None:
    told = watch(Preemption(notice_command=["head", "-c", "10000000", "/dev/zero"]))
    assert told.get(timeout=DEADLINE_S).reason == "head says so"


def test_a_handler_of_somebody_else_is_left_alone(watch: Watch) -> None:
    heard: SimpleQueue[int] = SimpleQueue()
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.put(number))
    try:
        told = watch(Preemption())
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.get(timeout=DEADLINE_S) == signal.SIGTERM
        assert told.empty()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("calls_ours", [False, True])
def test_a_handler_that_comes_later_decides_whether_it_is_heard(watch: Watch, *, calls_ours: bool) -> None:
    """A framework's, that it installs when training begins."""
    told, heard = watch(Preemption()), SimpleQueue[int]()
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)

    def theirs(number: int, frame: FrameType | None) -> None:
        heard.put(number)
        if calls_ours:
            ours(number, frame)

    signal.signal(signal.SIGTERM, theirs)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.get(timeout=DEADLINE_S) == signal.SIGTERM
        if calls_ours:
            assert told.get(timeout=DEADLINE_S).reason == SIGTERM
        time.sleep(2 * POLL_S / 10)
        assert told.empty()
    finally:
        signal.signal(signal.SIGTERM, ours)


def test_a_handler_and_a_descriptor_of_somebody_who_comes_later_are_left_to_them() -> None:
    leaving = NoticeWatch(Preemption(), lambda notice: None, lambda: None)
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    ours = signal.signal(signal.SIGTERM, ignore)
    signal.set_wakeup_fd(mouth.fileno())
    try:
        leaving.close()
        assert signal.getsignal(signal.SIGTERM) is ignore
        assert signal.set_wakeup_fd(-1) == mouth.fileno()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ear.close()
        mouth.close()
    assert ours is not signal.SIG_DFL


def ignore(number: int, frame: FrameType | None) -> None:
    del number, frame


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_keeps_the_handler_of_somebody_else(watch: Watch) -> None:
    watch(Preemption())
    ours = signal.signal(signal.SIGTERM, ignore)
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.getsignal(signal.SIGTERM) is ignore else 1)
    signal.signal(signal.SIGTERM, ours)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_whoever_does_not_want_sigterm_keeps_its_default(watch: Watch) -> None:
    watch(Preemption(sigterm=False))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_dies_of_its_own_sigterm_and_its_parent_hears_nothing(watch: Watch) -> None:
    told = watch(Preemption())
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    told.get(timeout=DEADLINE_S)
    assert told.empty()


HEARS = """
import asyncio, signal, sys, threading
from everstep.hook.notice import NoticeWatch, Preemption
def print_reason(notice):
    print(f"{notice.reason}\\n", end="", flush=True)  # in one piece, on whatever thread
watch = NoticeWatch(Preemption(grace_s=1000.0), print_reason, lambda: None)
"""

OTHER = HEARS.replace("watch =", "other =")

CLOSES = """
closer = threading.Thread(target=watch.close)
closer.start()
closer.join()
"""

LOOP = """
async def hears_another_signal():
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, heard.set)
    if sys.argv[1] == "running":
        print("ready", flush=True)
        await heard.wait()
        print("SIGUSR2", flush=True)
        await asyncio.Event().wait()
asyncio.run(hears_another_signal())
"""
"""A script that has an event loop with a handler of another signal, once or for good."""

WAITS = """
print("ready", flush=True)
while True:
    signal.pause()
"""

BLOCKS = """
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=1000), wait_for_workers=False)
watch.at_boundary()
print("ready", flush=True)
store.wait(["never"], timedelta(seconds=1000))
"""
"""Stands in C++ without the GIL, as in a collective: no Python handler of a signal runs."""


@contextlib.contextmanager
def program(*arguments: str) -> Generator[tuple[subprocess.Popen[str], Callable[[], str]]]:
    """Run Python with these arguments until it is ready; give it and what reads its next line."""
    with subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE, text=True) as process:
        lines: SimpleQueue[str] = SimpleQueue()
        assert process.stdout is not None
        reader = threading.Thread(target=lambda out: [lines.put(line) for line in out], args=[process.stdout])
        reader.start()
        try:
            assert lines.get(timeout=60) == "ready\n"
            yield process, lambda: lines.get(timeout=DEADLINE_S)
        finally:
            process.kill()
            reader.join()


class TestTwoWatches:
    """Of two runs in one process."""

    @pytest.mark.parametrize("closes", ["first", "second", "nobody"])
    def test_all_that_are_open_hear_sigterm_and_the_last_one_gives_it_back(self, closes: str) -> None:
        told: dict[str, SimpleQueue[Notice]] = {"first": SimpleQueue(), "second": SimpleQueue()}
        watches = {name: NoticeWatch(Preemption(), each.put, lambda: None) for name, each in told.items()}
        if closes != "nobody":
            watches.pop(closes).close()
        os.kill(os.getpid(), signal.SIGTERM)
        for name in watches:
            assert told[name].get(timeout=DEADLINE_S).reason == SIGTERM
        while watches:
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            watches.popitem()[1].close()
        assert all(each.empty() for each in told.values()), "once"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1

    @pytest.mark.parametrize("stands", [WAITS, BLOCKS], ids=["waits", "blocks"])
    def test_both_hear_it_while_the_main_thread_stands_in_a_call(self, stands: str) -> None:
        with program(HEARS + OTHER + stands) as (process, line):
            process.send_signal(signal.SIGTERM)
            assert [line(), line()] == ["SIGTERM\n"] * 2
            time.sleep(SECOND_S)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM

    def test_one_that_another_thread_has_closed_is_followed_by_the_other(self) -> None:
        with program(HEARS + OTHER + CLOSES + WAITS) as (process, line):
            process.send_signal(signal.SIGTERM)
            assert line() == "SIGTERM\n"
            time.sleep(SECOND_S)
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


class TestWhereSomebodyElseHasTakenTheWakeUpDescriptor:
    @pytest.mark.parametrize("ends", [WAITS, BLOCKS], ids=["waits", "blocks"])
    def test_sigterm_is_told_once_and_a_second_one_ends_the_process(self, ends: str) -> None:
        """It is gone with the loop that took it; a boundary takes it back before the thread stands in C++."""
        with program(HEARS + LOOP + ends, "ended") as (process, line):
            process.send_signal(signal.SIGTERM)
            assert line() == "SIGTERM\n"
            time.sleep(SECOND_S)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM

    def test_a_loop_that_runs_keeps_it_and_sigterm_is_told_all_the_same(self) -> None:
        with program(HEARS + LOOP, "running") as (process, line):
            process.send_signal(signal.SIGTERM)
            assert line() == "SIGTERM\n"
            process.send_signal(signal.SIGUSR2)
            assert line() == "SIGUSR2\n"
            time.sleep(SECOND_S)
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the interpreter's own
    def test_one_that_is_closed_is_nobody_s(self, watch: Watch) -> None:
        told = watch(Preemption(grace_s=100.0))
        ear, mouth = socket.socketpair()
        mouth.setblocking(False)
        ours = signal.set_wakeup_fd(mouth.fileno())
        ear.close()
        mouth.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.get(timeout=DEADLINE_S).reason == SIGTERM
        assert signal.set_wakeup_fd(ours) == ours


def test_sigterm_comes_through_while_the_main_thread_stands_in_a_call_that_no_handler_interrupts() -> None:
    with program(HEARS + BLOCKS) as (process, line):
        process.send_signal(signal.SIGTERM)
        assert line() == "SIGTERM\n"
        time.sleep(SECOND_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize("stands", [WAITS, BLOCKS, LOOP], ids=["waits", "blocks", "loop"])
def test_two_signals_at_nearly_the_same_moment_are_one(stands: str) -> None:
    """As `timeout` of coreutils sends them: to its child, and to the group that the child is in."""
    with program(HEARS + stands, "running") as (process, line):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        assert line() == "SIGTERM\n"
        time.sleep(SECOND_S)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_a_watch_that_another_thread_has_closed_keeps_no_sigterm_from_the_process() -> None:
    with program(HEARS + CLOSES + WAITS) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == -signal.SIGTERM


@pytest.mark.parametrize("second", ["signal", "grace"])
def test_who_reaches_no_boundary_ends_at_the_second_signal_or_when_the_time_is_over(second: str) -> None:
    program = (
        "import os, signal, sys, threading\n"
        "from everstep.hook.notice import NoticeWatch, Preemption\n"
        "told = threading.Event()\n"
        "heard = lambda notice: print(notice.reason, flush=True)\n"
        "NoticeWatch(Preemption(grace_s=float(sys.argv[1])), heard, lambda: None)\n"
        "print('ready', flush=True)\n"
        "threading.Event().wait()\n"
    )
    grace_s = "1000" if second == "signal" else "0.2"
    with subprocess.Popen(
        [sys.executable, "-c", program, grace_s], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM\n"
        if second == "signal":
            time.sleep(SECOND_S)
            process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"grace_s": 0.0}, "grace_s is 0.0"), ({"notice_command": "curl x"}, "notice_command is 'curl x'")],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Preemption(**wrong)  # type: ignore[arg-type]

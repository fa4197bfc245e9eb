"""Fixtures for every test: nothing may be left behind, and no test touches the user's own daemon."""

import contextlib
import gc
import logging
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
SESSION_VARIABLE = "EVERSTEP_TEST_SESSION"
SESSION = uuid.uuid4().hex
"""Inherited by every process that a test starts, whoever its parent is later: so a detached daemon is found too."""

TOLD = "told"

GRACE_S = float(os.environ.get("EVERSTEP_TEST_GRACE_S", "20"))
"""How long what a test has just closed may take to disappear: joined threads, reaped children, gRPC's poller."""

BACKGROUND_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
BACKGROUND_FILES = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/nvidia")
BACKGROUND_THREADS = ("pytest_timeout",)

BACKGROUND_TEMPORARY = ("pymp-", "torch")
"""What Python's multiprocessing and torch (torchelastic_, torchinductor_) leave behind when they are killed."""

PROC_BYTES = 65536
"""What one read of a file of /proc asks for; a shorter answer is its end."""

_others: set[tuple[str, bytes]] = set()
"""Processes, by number and start, that no test has started; none ever becomes one."""

LONGEST_FIRST = (
    "soak/test_node_soak.py",
    "durability/test_power_cut.py",
    "durability/test_crash_explorer.py",
    "durability/test_mutants.py",
    "checkpoint/test_frequency_machine.py",
    "system/test_demo.py",
    "system/test_two_ranks.py",
    "system/test_bad_input.py",
    "system/test_pace_changes.py",
    "system/test_deadlines.py",
    "system/test_phases.py",
    "system/test_survives.py",
)
"""Files that take minutes each. Who begins one of them last is waited for by all others."""

settings.register_profile("everstep", deadline=None, print_blob=True, max_examples=60)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=2000)
settings.load_profile(os.environ.get("EVERSTEP_HYPOTHESIS", "everstep"))


def pytest_configure(config: pytest.Config) -> None:
    if any(Path(entry or ".").resolve() == ROOT for entry in sys.path):
        raise pytest.UsageError(
            "the repository root is on sys.path: run `pytest`, not `python -m pytest`, without PYTHONPATH"
        )
    if config.getoption("numprocesses", None):
        return  # the tests run in processes below this one, each of which comes here itself
    # A shell's background job ignores SIGINT, and so would every program that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[SESSION_VARIABLE] = SESSION
    os.environ.setdefault("EVERSTEP_LOG", "text")  # most tests read the daemon's log as a person does
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays where it is kept
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="es-")
    # multiprocessing has one for the whole process, made at first use: not in the folder of whichever test is first.
    multiprocessing.util.get_temp_dir()
    multiprocessing.util.Finalize(
        None, shutil.rmtree, args=(tempfile.tempdir,), exitpriority=-1000
    )  # after its own


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests, put the longest files first."""
    if not hasattr(config, "workerinput"):
        return
    ranks = {ROOT / "tests" / name: rank for rank, name in enumerate(LONGEST_FIRST)}
    assert all(path.exists() for path in ranks), ranks
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests have told."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.getreports(kind)]
    told = [str(text) for report in reports for name, text in report.user_properties if name == TOLD]
    if told:
        terminalreporter.write_sep("=", "what the searches have tried")
        for text in told:
            terminalreporter.write_line(text)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root: run as root, e.g. in a container")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; none is visible")
        torch.zeros(
            1, device="cuda"
        )  # the context's descriptors stay to the end of the process: no test leaves them
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds: descriptors, Python threads, processes of this session, mappings of memfds."""

    descriptors: frozenset[str]
    threads: frozenset[threading.Thread]
    processes: frozenset[str]
    memfd_mappings: tuple[str, ...]

    def beyond(self, before: "Held") -> list[str]:
        """Return what is held now and was not held before, one line each."""
        new_threads = self.threads - before.threads
        lines = [f"descriptor {entry}" for entry in sorted(self.descriptors - before.descriptors)]
        lines += [
            f"thread {thread.name!r}"
            for thread in new_threads
            if not thread.name.startswith(BACKGROUND_THREADS)
        ]
        lines += [f"process {entry}" for entry in sorted(self.processes - before.processes)]
        mappings = list(self.memfd_mappings)
        for name in before.memfd_mappings:
            if name in mappings:
                mappings.remove(name)
        return lines + [f"mapping of {name}" for name in mappings]


def held() -> Held:
    return Held(
        descriptors=frozenset(_descriptors()),
        threads=frozenset(threading.enumerate()),
        processes=frozenset(f"{pid} {command}" for pid, command in _processes()),
        memfd_mappings=tuple(sorted(_memfd_mappings())),
    )


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a Path would hold the directory open while reading
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if not target.startswith(BACKGROUND_FILES):
            yield f"{name} -> {target}"


def _memfd_mappings() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            yield line[line.index("/memfd:") :]


def _processes() -> Iterator[tuple[int, str]]:
    """Yield (pid, command line) of this process's children and of all processes that a test of it started."""
    marker = f"{SESSION_VARIABLE}={SESSION}".encode()
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            state, parent, *facts = _read(f"/proc/{entry}/stat").rpartition(b")")[2].split()
            process = (entry, facts[17])  # when it started: numbers are used again
            if process in _others:
                continue
            command = _read(f"/proc/{entry}/cmdline").replace(b"\0", b" ").decode(errors="replace")
            environment = _read(f"/proc/{entry}/environ")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it ended meanwhile, or is another user's
        if int(parent) != os.getpid() and marker not in environment:
            _others.add(process)
        elif not any(name in command for name in BACKGROUND_PROCESSES):
            yield int(entry), command.strip() or f"({'zombie' if state == b'Z' else 'no command line'})"


def _read(path: str) -> bytes:
    """Return a file of /proc. A Path takes three times as long, twice a test for each process there is."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.read(fd, PROC_BYTES)
        while len(content) % PROC_BYTES == 0 and (more := os.read(fd, PROC_BYTES)):
            content += more
        return content
    finally:
        os.close(fd)


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Give each test a socket path and a TMPDIR of its own, and fail one that leaves a temporary file behind.

    The path is short, because a unix socket's path ends at 107 bytes.
    """
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    temporary = folder / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("EVERSTEP_SOCKET", str(folder / "data.sock"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    names = sorted(path.name for path in temporary.iterdir())
    shutil.rmtree(folder)
    left = [name for name in names if not name.startswith(BACKGROUND_TEMPORARY)]
    if left:
        pytest.fail("left behind in TMPDIR:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def _leftovers(_own_folder: None) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Fail a test that leaves a descriptor, thread, process or mapping behind, and end what it left running."""
    before = held()
    yield
    left = _left_beyond(before)
    if not left:
        return
    known = {int(entry.split()[0]) for entry in before.processes}
    for pid, _ in _processes():
        if pid not in known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    _left_beyond(before)  # until they are gone: they must not write into the folder while it is removed
    pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


def _left_beyond(before: Held) -> list[str]:
    """Return what is held beyond `before`, after giving it some time to go."""
    deadline = time.monotonic() + GRACE_S
    while left := held().beyond(before):
        gc.collect()
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Take back what a daemon's command made of logging, if it began in this process."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in [each for each in root.handlers if type(each).__module__ == "everstep.daemon.log"]:
        root.removeHandler(handler)


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes a line about what a search has tried, which is shown at the end of the run."""
    return lambda line: request.node.user_properties.append((TOLD, line))


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """For searches in which drives fail thousands of times: what they find is in their assertion, not in warnings."""
    caplog.set_level(logging.CRITICAL, logger="everstep")

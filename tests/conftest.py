"""Fixtures for every test: nothing may be left behind, and no test touches the user's own daemon."""

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
SESSION_VARIABLE = "EVERSTEP_TEST_SESSION"
SESSION = uuid.uuid4().hex
"""Inherited by every process that a test starts, whoever its parent is later: so a detached daemon is found too."""

GRACE_S = 3.0
"""How long what a test has just closed may take to disappear: joined threads, reaped children, gRPC's poller."""

BACKGROUND_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
BACKGROUND_FILES = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/nvidia")
BACKGROUND_THREADS = ("pytest_timeout",)

settings.register_profile("everstep", deadline=None, print_blob=True, max_examples=60)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=2000)
settings.load_profile(os.environ.get("EVERSTEP_HYPOTHESIS", "everstep"))


def pytest_configure(config: pytest.Config) -> None:
    if any(Path(entry or ".").resolve() == ROOT for entry in sys.path):
        raise pytest.UsageError(
            "the repository root is on sys.path: run `pytest`, not `python -m pytest`, without PYTHONPATH"
        )
    os.environ[SESSION_VARIABLE] = SESSION


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root: run as root, e.g. in a container")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; none is visible")


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
            stat = Path(f"/proc/{entry}/stat").read_text()
            command = (
                Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it ended meanwhile, or is another user's
        state, parent = stat.rpartition(")")[2].split()[:2]
        ours = int(parent) == os.getpid() or marker in environment
        if ours and not any(name in command for name in BACKGROUND_PROCESSES):
            yield int(entry), command.strip() or f"({'zombie' if state == 'Z' else 'no command line'})"


@pytest.fixture(autouse=True)
def _leftovers() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Fail a test that leaves a descriptor, thread, process or mapping behind, and end what it left running."""
    before = held()
    yield
    deadline = time.monotonic() + GRACE_S
    while left := held().beyond(before):
        gc.collect()
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if not left:
        return
    known = {int(entry.split()[0]) for entry in before.processes}
    for pid, _ in _processes():
        if pid not in known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def _own_socket(_leftovers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Give each test a socket path of its own: short, because a unix socket's path ends at 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    monkeypatch.setenv("EVERSTEP_SOCKET", str(folder / "data.sock"))
    yield
    shutil.rmtree(folder, ignore_errors=True)

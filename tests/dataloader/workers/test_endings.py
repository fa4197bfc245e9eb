"""However a loop ends, no process, descriptor or mapping of its workers is left (each test's fixture looks, too)."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fragile import Fragile, ids, loader_of

from everstep.core.errors import UsageError, WorkerTimeoutError

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")

TIMEOUT_S = 4
"""Longer than a busy machine takes for a batch that nothing holds up, the start of its worker included."""


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that its new parent will reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_ended(pids: list[int]) -> None:
    """Return when all are gone; the test's own time limit is the deadline."""
    while not all(has_ended(pid) for pid in pids):
        time.sleep(0.005)


def pool_pids(iterator: Any) -> list[int]:
    return iterator._made.pool.pids


@pytest.mark.parametrize("persistent", [False, True])
def test_after_the_last_batch(tmp_path: Path, persistent: bool) -> None:
    loader = loader_of(Fragile(tmp_path), persistent_workers=persistent)
    iterator = iter(loader)
    pids = pool_pids(iterator)
    assert len(list(iterator)) == 6
    assert [has_ended(pid) for pid in pids] == [not persistent] * 2
    del loader, iterator
    assert all(has_ended(pid) for pid in pids)


def test_after_a_break_and_del(tmp_path: Path) -> None:
    iterator = iter(loader_of(Fragile(tmp_path)))
    next(iterator)
    pids = pool_pids(iterator)
    assert not any(has_ended(pid) for pid in pids)
    del iterator
    assert all(has_ended(pid) for pid in pids)


def test_after_an_exception_of_the_loop(tmp_path: Path) -> None:
    pids: list[int] = []

    def train() -> None:
        iterator = iter(loader_of(Fragile(tmp_path)))
        pids.extend(pool_pids(iterator))
        for _ in iterator:
            raise ValueError("the loop's own")

    with pytest.raises(ValueError, match="own"):
        train()
    wait_until_ended(pids)


def fail(batch: list[int]) -> list[int]:
    raise LookupError(batch)


def test_after_an_exception_of_the_dataset(tmp_path: Path) -> None:
    iterator = iter(loader_of(Fragile(tmp_path), collate_fn=fail))
    pids = pool_pids(iterator)
    with pytest.raises(LookupError):
        next(iterator)
    assert all(has_ended(pid) for pid in pids)


class Stuck(Fragile):
    """A worker that tries to read `stuck_at` says who it is, and sleeps."""

    stuck_at = -1

    def __getitem__(self, index: int) -> int:
        if index == self.stuck_at:
            (self.folder / f"stuck-{os.getpid()}").touch()
            signal.sigwait({signal.SIGCONT})
        return index


def test_a_hanging_sample_is_named_at_the_timeout_and_its_worker_killed(tmp_path: Path) -> None:
    dataset = Stuck(tmp_path)
    dataset.stuck_at = 13
    iterator = iter(loader_of(dataset, timeout=TIMEOUT_S))
    pids = pool_pids(iterator)
    with pytest.raises(
        WorkerTimeoutError, match=r"timed out after 4 seconds: worker \d \(pid (\d+)\).*sample 13"
    ) as info:
        list(iterator)
    assert isinstance(info.value, RuntimeError), "as torch's error is"
    assert any(str(pid) in str(info.value) for pid in pids)
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.filterwarnings("ignore:iter.. goes on with epoch 0:UserWarning")
def test_after_a_timeout_the_loader_goes_on_with_new_workers(tmp_path: Path) -> None:
    dataset = Stuck(tmp_path)
    dataset.stuck_at = 13
    loader = loader_of(dataset, timeout=TIMEOUT_S, persistent_workers=True)
    seen: list[int] = []
    with pytest.raises(WorkerTimeoutError):
        seen.extend(each for batch in loader for each in ids(batch))
    dataset.stuck_at = -1
    assert seen
    assert 13 not in seen
    assert sorted(seen + [each for batch in loader for each in ids(batch)]) == list(range(24))


def interrupting(function: str, pids: list[int], when: Callable[[], bool] = lambda: True) -> threading.Thread:
    """Send SIGINT to the whole group once the main thread is in that function to stay, and all workers have started."""

    def is_there() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        while frame.f_back is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        return frame.f_code.co_name == function

    def interrupt() -> None:
        while not (when() and is_there()):
            time.sleep(0.005)
        for pid in (*pids, os.getpid()):
            os.kill(pid, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_an_interrupt_of_a_waiting_trainer(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group: workers ignore it, the trainer ends them."""
    dataset = Stuck(tmp_path)
    dataset.stuck_at = 0
    iterator: Any = iter(loader_of(dataset, shuffle=False))
    pids = pool_pids(iterator)
    thread = interrupting("_wait", pids, when=lambda: all(iterator._made.pool._machine._is_ready))
    with pytest.raises(KeyboardInterrupt):
        list(iterator)
    thread.join()
    assert all(has_ended(pid) for pid in pids)


def test_an_interrupt_while_workers_are_waited_for_at_the_end(tmp_path: Path) -> None:
    """They may take five seconds to end their sample; whoever does not want to wait leaves nobody behind."""
    dataset = Stuck(tmp_path)
    dataset.stuck_at = 0
    iterator: Any = iter(loader_of(dataset, shuffle=False, num_workers=1))
    pids = pool_pids(iterator)
    while not list(tmp_path.glob("stuck-*")):
        time.sleep(0.005)
    thread = interrupting("_wait_for", pids)
    with pytest.raises(KeyboardInterrupt):
        iterator._made.close()
    thread.join()
    assert all(has_ended(pid) for pid in pids)


def test_a_newer_iterator_ends_what_the_older_prepared(tmp_path: Path) -> None:
    loader = loader_of(Fragile(tmp_path), persistent_workers=True)
    older = iter(loader)
    first = ids(next(older))
    loader.reset()
    newer = iter(loader)
    assert ids(next(newer)) == first
    with pytest.raises(UsageError, match="newer iter"):
        next(older)
    del older
    assert sorted(first + [each for batch in newer for each in ids(batch)]) == list(range(24))


class Gated(Fragile):
    """A worker says that it reads sample 0, and reads it once the gate lets it."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, count=count)
        self.gate, self.opener = os.pipe()

    def __getitem__(self, index: int) -> int:
        if index == 0:
            (self.folder / "waits").touch()
            assert os.read(self.gate, 1)
        return index

    def close(self) -> None:
        os.close(self.gate)
        os.close(self.opener)


def test_more_tickets_than_a_socket_takes_are_sent_after_void_ones(tmp_path: Path) -> None:
    """A worker says nothing of tickets that are void when it comes to them: that there is room must be seen itself."""
    dataset = Gated(tmp_path, count=600)
    loader = loader_of(
        dataset,
        shuffle=False,
        num_workers=1,
        batch_size=1,
        prefetch_factor=400,
        persistent_workers=True,
        timeout=20,
    )
    older = iter(loader)
    while not (tmp_path / "waits").exists():
        time.sleep(0.005)
    newer = iter(loader)
    os.write(dataset.opener, b"xx")
    assert [each for batch in newer for each in ids(batch)] == list(range(600))
    del older
    dataset.close()


SCRIPT = """
import os, signal, sys, threading
from pathlib import Path
from fragile import Fragile, loader_of

class Slow(Fragile):
    def __getitem__(self, index):
        if mode == "stuck":
            (folder / f"stuck-{os.getpid()}").touch()
            signal.sigwait({signal.SIGCONT})
        return index

mode, method, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
if __name__ == "__main__":
    kept = []

    def begin():
        iterator = iter(loader_of(Slow(folder) if mode == "stuck" else Fragile(folder), multiprocessing_context=method))
        kept.append(iterator)
        if mode != "stuck":
            next(iterator)

    if mode == "thread":
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
    else:
        begin()
    print(*kept[0]._made.pool.pids, flush=True)
    if mode == "exit":
        sys.exit(3)
    signal.pause()
"""


def run_trainer(tmp_path: Path, mode: str, method: str = "fork") -> tuple[subprocess.Popen[str], list[int]]:
    (tmp_path / "script.py").write_text(SCRIPT)
    support = str(Path(__file__).resolve().parents[2] / "support")
    trainer = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", mode, method, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": support},
    )
    assert trainer.stdout is not None
    return trainer, [int(each) for each in trainer.stdout.readline().split()]


def test_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    trainer, pids = run_trainer(tmp_path, "exit")
    assert trainer.communicate(timeout=60)[0] == ""
    assert trainer.returncode == 3
    assert len(pids) == 2
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.parametrize(("mode", "method"), [("thread", "fork"), ("idle", "spawn"), ("stuck", "fork")])
def test_after_a_kill_of_the_trainer(tmp_path: Path, mode: str, method: str) -> None:
    """ "stuck": both workers are inside of a sample that never ends; "thread": they were forked by one that ended."""
    trainer, pids = run_trainer(tmp_path, mode, method)
    assert len(pids) == 2
    while mode == "stuck" and len(list(tmp_path.glob("stuck-*"))) < 2:
        time.sleep(0.005)
    trainer.kill()
    assert trainer.wait(60) == -signal.SIGKILL
    assert trainer.stdout is not None
    trainer.stdout.close()
    wait_until_ended(pids)

"""After a store was opened its newest checkpoints are read: damage is found before a restart needs them."""

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pausing import wait_until

from everstep.checkpoint.engine import Transfer, TransferDone, TransferKind
from everstep.checkpoint.plain_engine import PlainEngine
from everstep.checkpoint.testing import make_state, opened, save
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.control.views import CheckpointStatus, StoreView
from everstep.daemon.devices.scrub_plan import GIVE_WAY_S_MAX
from everstep.daemon.devices.verifier import Background, Restrained, StoppedError
from everstep.daemon.testing import FakeTrainer, node_daemon

RUN = "demo"


@pytest.fixture
def stored(devices: list[Path]) -> list[Path]:
    """A run with three complete checkpoints."""
    with opened(devices) as (store, _):
        run = store.run(os.geteuid(), RUN, create=True)
        run.begin_attempt(1, fresh=False)
        for step in (1, 2, 3):
            save(run, make_state(store, step), CheckpointId(1, step))
        run.set_complete_floor(CheckpointId(1, 3))
    return devices


@contextmanager
def checking(config: Path, socket_path: Path) -> Generator[ControlClient]:
    """A daemon that begins to verify at once."""
    with config.open("a") as file:
        file.write('[verify]\nafter_s = 0.0\n[scrub]\nevery = "never"\n')
    with node_daemon(config, socket_path), connected(socket_path) as client:
        yield client


def store_of(client: ControlClient) -> StoreView:
    (store,) = client.status().stores
    return store


def spoil(devices: list[Path], step: int) -> Path:
    """Change one byte of a checkpoint's data; return the file."""
    with opened(devices, read_only=True) as (store, _):
        (run,) = store.runs()
        path = run.segment_path(run.manifest(CheckpointId(1, step), 0).segments[0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path


@pytest.mark.usefixtures("stored")
def test_the_newest_one_is_verified_and_status_says_so(node_config: Path, socket_path: Path) -> None:
    with checking(node_config, socket_path) as client:
        wait_until(lambda: any("was verified" in note for note in store_of(client).notes))
        store = store_of(client)
        assert [note for note in store.notes if "verified" in note] == [
            f"{RUN}@1.3 was verified: every byte is what was committed"
        ]
        assert store.problems == ()
    assert "newest_verified" in socket_path.with_name("daemon.log").read_text()


def test_a_damaged_one_is_said_and_not_offered_first(
    node_config: Path, socket_path: Path, stored: list[Path]
) -> None:
    path = spoil(stored, 3)
    with checking(node_config, socket_path) as client, FakeTrainer(socket_path) as trainer:
        wait_until(lambda: any(f"{RUN}@1.2 was verified" in note for note in store_of(client).notes))
        (problem,) = store_of(client).problems
        assert problem.startswith(f"{RUN}@1.3 is damaged")
        assert str(path) in problem
        assert "block 0" in problem
        assert [view.state for view in client.checkpoints(RUN)] == [
            CheckpointStatus.DAMAGED,
            CheckpointStatus.COMPLETE,
            CheckpointStatus.COMPLETE,
        ]
        trainer.open_run([Path("nvme0"), Path("nvme1")], name=RUN)
        newest, *others = trainer.offers()
        assert (newest.step, "block 0" in newest.problem) == (3, True)
        assert [(offer.step, offer.problem) for offer in others] == [(2, ""), (1, "")]


class SlowEngine(PlainEngine):
    """A drive that takes 20 ms for anything."""

    def run(self, transfer: Transfer) -> TransferDone:
        time.sleep(0.02)
        return TransferDone(bytes_moved=transfer.length_bytes, busy_s=0.02)


NOTHING = Transfer(
    kind=TransferKind.READ,
    arena_fd=-1,
    arena_offset_bytes=0,
    file_fd=-1,
    file_offset_bytes=0,
    length_bytes=0,
)


def background(
    *,
    share: float = 1.0,
    is_needed: Callable[[], bool] = lambda: False,
    moved: list[int] | None = None,
    patience_s: float = GIVE_WAY_S_MAX,
) -> Background:
    def note(device_id: str, size_bytes: int, took_s: float) -> None:
        assert (device_id, took_s >= 0.02) == ("drive", True)
        if moved is not None:
            moved.append(size_bytes)

    return Background(share=share, is_needed=is_needed, moved=note, patience_s=lambda *_: patience_s)


def test_a_device_rests_much_longer_than_it_is_read() -> None:
    began_s = time.monotonic()
    Restrained("drive", SlowEngine(), threading.Event(), background(share=0.1)).run(NOTHING)
    assert time.monotonic() - began_s >= 0.2


def test_a_stop_ends_the_rest_and_lets_nothing_more_through() -> None:
    stop = threading.Event()
    engine = Restrained("drive", SlowEngine(), stop, background(share=1e-6))
    resting = threading.Thread(target=engine.run, args=[NOTHING])
    resting.start()
    stop.set()
    resting.join(10)
    assert not resting.is_alive()
    with pytest.raises(StoppedError):
        engine.run(NOTHING)


def test_a_transfer_in_the_background_waits_for_what_is_needed() -> None:
    asked: list[bool] = []
    moved: list[int] = []

    def is_needed() -> bool:
        assert moved == []
        asked.append(len(asked) < 3)
        return asked[-1]

    engine = Restrained(
        "drive", SlowEngine(), threading.Event(), background(is_needed=is_needed, moved=moved)
    )
    engine.run(NOTHING)
    assert (asked, moved) == ([True, True, True, False], [0])


def test_a_transfer_that_would_be_late_waits_no_longer() -> None:
    engine = Restrained(
        "drive", SlowEngine(), threading.Event(), background(is_needed=lambda: True, patience_s=0.1)
    )
    began_s = time.monotonic()
    engine.run(NOTHING)
    assert 0.1 <= time.monotonic() - began_s < GIVE_WAY_S_MAX


def test_a_stop_ends_the_waiting_too() -> None:
    stop = threading.Event()
    asked = threading.Event()

    def is_needed() -> bool:
        asked.set()
        return True

    failed: list[bool] = []

    def read() -> None:
        with pytest.raises(StoppedError):
            Restrained("drive", SlowEngine(), stop, background(is_needed=is_needed)).run(NOTHING)
        failed.append(True)

    thread = threading.Thread(target=read)
    thread.start()
    assert asked.wait(10)
    stop.set()
    thread.join(10)
    assert failed == [True]

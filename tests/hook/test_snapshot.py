"""Snapshots of a run in this process, written by a real daemon: what is eager, what waits, what is dropped."""

import contextlib
import gc
import logging
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pausing import wait_until
from torch import nn

import everstep
from everstep.core.errors import DaemonUnavailableError, MemoryRefusedError, StateTypeError, UsageError
from everstep.daemon.testing import daemon_process
from everstep.hook import capture as capture_module
from everstep.hook import copier as copier_module
from everstep.hook import run_checkpoints
from everstep.hook import slot_sealing as slot_sealing_module
from everstep.hook.client import Answer, DaemonClient
from everstep.hook.copier import Copier
from everstep.hook.copy_plan import Moves
from everstep.hook.gather import copy
from everstep.hook.rank_protocol import DAEMON_LOST
from everstep.hook.report import Skipped
from everstep.hook.run import Run
from everstep.hook.skip_reasons import NO_ARENA, NO_ROOM_YET, STILL_COPYING
from everstep.hook.slot_places import Places
from everstep.hook.tensor_bytes import dense_or_copy
from everstep.proto import frames
from everstep.proto.frames import SkipReason


@pytest.fixture(autouse=True)
def daemon() -> Iterator[subprocess.Popen[bytes]]:
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])) as process:
        yield process


@pytest.fixture
def device(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    return tmp_path / "d"


class Gate:
    """Holds the copy thread back while it is shut; small leaves, too, are left to that."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def copy(self, moves: Moves) -> None:
        assert self.open.wait(60)  # in the time of which a daemon may have to start
        copy(moves)

    def open_during_guard(self, monkeypatch: pytest.MonkeyPatch, after_s: float) -> None:
        """Open it so long after somebody has begun to wait for the copy."""
        guard = Copier.guard

        def opening(copier: Copier) -> float:
            threading.Timer(after_s, self.open.set).start()
            return guard(copier)

        monkeypatch.setattr(Copier, "guard", opening)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(copier_module, "copy", made.copy)
    monkeypatch.setattr(capture_module, "AT_ONCE_BYTES_MAX", 0)
    yield made
    made.open.set()


class Net(nn.Module):
    """A trained and a frozen layer, and a buffer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.trained = nn.Linear(8, width)
        self.frozen = nn.Linear(width, 8).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1))


def made(width: int = 8, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net(width)
    return {"model": model, "optimizer": torch.optim.SGD(model.trained.parameters(), lr=1.0, momentum=0.9)}


@contextmanager
def attached(device: Path | list[Path], objects: dict[str, Any], *, final: bool = True) -> Generator[Run]:
    """A run; without `final` it is left by an exception, so that it takes no last boundary."""
    with (
        contextlib.suppress(_Left),
        everstep.attach("snap", **objects, storage=device, every=10**6) as run,
    ):
        yield run
        if not final:
            raise _Left


class _Left(Exception):  # noqa: N818
    """What a run without a last boundary is left by."""


def iterate(run: Run, objects: dict[str, Any], *, checkpoint: bool = False) -> None:
    objects["optimizer"].zero_grad()
    for parameter in objects["model"].trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    objects["optimizer"].step()
    if checkpoint:
        run.checkpoint()
    run.step()


def until_taken(run: Run, objects: dict[str, Any]) -> str:
    """Iterate twice: the first asks for the arena, and once it is there the second's checkpoint is taken."""
    iterate(run, objects)
    assert run.wait(20)
    iterate(run, objects, checkpoint=True)
    assert run.wait(20)
    assert run.report().checkpoints_complete == 1
    return run.report().last_complete


def state_of(objects: dict[str, Any]) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in objects["model"].state_dict().items()}
    for number, parameter in enumerate(objects["model"].trained.parameters()):
        state[f"momentum{number}"] = objects["optimizer"].state[parameter]["momentum_buffer"].clone()
    return state


def assert_restores(device: Path, expected: dict[str, torch.Tensor], width: int = 8) -> None:
    fresh = made(width, seed=99)
    with attached(device, fresh) as run:
        assert run.restore() is not None
        found = state_of(fresh)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class TestWhatASnapshotHolds:
    def test_the_state_of_its_boundary_though_training_goes_on_at_once(
        self, device: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        objects = made()
        with attached(device, objects, final=False) as run:
            until_taken(run, objects)
            gate.open.clear()
            iterate(run, objects, checkpoint=True)
            expected = state_of(objects)
            objects["model"].seen.add_(7)  # a buffer: nobody guards it
            gate.open_during_guard(monkeypatch, 0.3)
            iterate(run, objects)  # its optimizer waits for the copy
            assert run.wait(20)
            assert run.report().guard_s > 0.2
        assert_restores(device, expected)

    def test_mutating_waits_for_the_copy(self, device: Path, gate: Gate) -> None:
        objects = made()
        with attached(device, objects, final=False) as run:
            until_taken(run, objects)
            gate.open.clear()
            iterate(run, objects, checkpoint=True)
            expected = state_of(objects)
            threading.Timer(0.1, gate.open.set).start()
            with run.mutating(), torch.no_grad():
                assert gate.open.is_set()
                objects["model"].frozen.weight.fill_(3)
                objects["model"].trained.weight.fill_(3)
            assert run.wait(20)
            assert run.report().failures == ()
        assert_restores(device, expected)

    def test_a_frozen_leaf_that_changes_drops_the_snapshot_by_name_and_the_next_one_is_taken(
        self, device: Path, gate: Gate
    ) -> None:
        objects = made()
        with attached(device, objects, final=False) as run:
            first = until_taken(run, objects)
            gate.open.clear()
            iterate(run, objects, checkpoint=True)
            with torch.no_grad():
                objects["model"].frozen.weight.add_(1)
            gate.open.set()
            assert run.wait(20)
            report = run.report()
            (failure,) = report.failures
            assert "model.frozen.weight changed while its snapshot was being copied" in failure
            assert "run.mutating()" in failure
            assert report.last_complete == first
            while run.report().checkpoints_complete == report.checkpoints_complete:
                iterate(run, objects, checkpoint=True)  # until the daemon has given the slot back
                assert run.wait(20)
            assert len(run.report().failures) == 1
            expected = state_of(objects)
        assert_restores(device, expected)

    def test_a_small_leaf_as_it_was_though_it_is_written_at_once_and_nobody_is_asked(
        self, device: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        objects = made()
        monkeypatch.setattr(capture_module, "AT_ONCE_BYTES_MAX", objects["model"].trained.weight.nbytes)
        with attached(device, objects, final=False) as run:
            until_taken(run, objects)
            gate.open.clear()
            iterate(run, objects, checkpoint=True)
            expected = state_of(objects)
            with torch.no_grad():
                objects["model"].frozen.weight.add_(1)
                objects["model"].trained.weight.data = torch.zeros(8, 8)
            gate.open.set()
            assert run.wait(20)
            assert run.report().failures == ()
        assert_restores(device, expected)


class TestSkipping:
    def test_while_the_last_one_is_being_copied(self, device: Path, gate: Gate) -> None:
        objects = made()
        with attached(device, objects, final=False) as run:
            until_taken(run, objects)
            before = dict(run.report().skipped)
            gate.open.clear()
            iterate(run, objects, checkpoint=True)
            run.checkpoint()
            run.step()
            assert run.report().skipped == before | {
                SkipReason.COPYING: Skipped(count=1, example="the previous snapshot is still being copied")
            }
            gate.open.set()
            assert run.wait(20)

    def test_of_many_alike_the_first_and_the_tenth_are_logged(
        self, device: Path, gate: Gate, caplog: pytest.LogCaptureFixture
    ) -> None:
        objects = made()
        with attached(device, objects, final=False) as run:
            until_taken(run, objects)
            gate.open.clear()
            iterate(run, objects, checkpoint=True)
            caplog.clear()
            first = run.steps + 1
            for _ in range(12):
                run.checkpoint()
                run.step()
            said = [text for text in caplog.messages if "checkpoint_skipped" in text]
            assert said == [
                f"checkpoint_skipped run=snap step={first} reason={STILL_COPYING}",
                f"checkpoint_skipped run=snap step={first + 9} reason={STILL_COPYING} (with 9 more skipped so)",
            ]
            assert run.report().skipped[SkipReason.COPYING].count == 12
            gate.open.set()
            assert run.wait(20)

    def test_no_checkpoint_waits_for_the_arena(
        self, device: Path, daemon: "subprocess.Popen[bytes]", caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        objects = made()
        with attached(device, objects, final=False) as run:
            daemon.send_signal(signal.SIGSTOP)
            try:
                iterate(run, objects, checkpoint=True)
            finally:
                daemon.send_signal(signal.SIGCONT)
            assert run.report().skipped == {
                SkipReason.ARENA: Skipped(count=1, example="the arena is being allocated")
            }
        said = {each.levelname for each in caplog.records if "checkpoint_skipped" in each.getMessage()}
        assert said == {"INFO"}, "every run begins so"


class Borrowed:
    """An object whose state is made anew for each look, and which keeps none of it."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []

    def state_dict(self) -> dict[str, torch.Tensor]:
        tensor = torch.full((1000,), float(len(self.made)))
        self.made.append(weakref.ref(tensor))
        return {"average": tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        raise AssertionError(state)


class TestMemory:
    def test_what_was_made_for_one_snapshot_does_not_live_until_the_next_one(
        self, device: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An average of all weights, say: a second copy on the GPU for an hour."""
        copies: list[weakref.ref[torch.Tensor]] = []

        def noted(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
            found, is_copy = dense_or_copy(tensor)
            if is_copy:
                copies.append(weakref.ref(found))
            return found, is_copy

        monkeypatch.setattr(capture_module, "dense_or_copy", noted)
        average = Borrowed()
        objects: dict[str, Any] = made() | {"average": average}
        objects["model"].register_buffer("holes", torch.arange(20.0).reshape(4, 5)[:, ::2])
        with attached(device, objects, final=False) as run:
            until_taken(run, objects)
            for number in range(2, 5):
                iterate(run, objects, checkpoint=True)
                assert run.wait(60)
                assert run.report().checkpoints_complete == number
                gc.collect()
                assert [each for each in (*average.made, *copies) if each() is not None] == []
        assert len(copies) >= 3

    def test_no_memory_for_a_copy_of_what_has_holes_is_no_end_of_training(
        self, device: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(_: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        objects = made()
        objects["model"].register_buffer("holes", torch.arange(20.0).reshape(4, 5)[:, ::2])
        with attached(device, objects, final=False) as run:
            with monkeypatch.context() as patched:
                patched.setattr(torch.Tensor, "contiguous", refused)
                for _ in range(3):
                    iterate(run, objects, checkpoint=True)
            (skipped,) = run.report().skipped.values()
            assert "a tensor with holes" in skipped.example
            for _ in range(2):  # the first one asks for the arena
                iterate(run, objects, checkpoint=True)
                assert run.wait(60)
            assert run.report().checkpoints_complete == 1


def test_what_cannot_be_saved_is_said_at_the_first_boundary_though_none_is_due(device: Path) -> None:
    """And not at the first checkpoint, which may come hours later."""
    objects = made()
    objects["optimizer"].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with attached(device, objects, final=False) as run, pytest.raises(UsageError, match="attach the module"):
        iterate(run, objects)


class TestStructure:
    def test_a_new_structure_gets_a_new_arena(self, device: Path) -> None:
        objects = made()
        with attached(device, objects) as run:
            until_taken(run, objects)
            complete = run.report().checkpoints_complete
            objects["model"].register_buffer("more", torch.arange(5.0))
            while run.report().checkpoints_complete == complete:
                iterate(run, objects, checkpoint=True)
                assert run.wait(20)
            assert run.report().failures == ()
        again = made()
        again["model"].register_buffer("more", torch.zeros(5))
        with attached(device, again) as run:
            assert run.restore() is not None
        assert torch.equal(again["model"].more, torch.arange(5.0))

    def test_values_that_outgrow_their_room_get_a_new_arena_too(self, device: Path) -> None:
        objects, holder = made(), Holder({"text": ""})
        with attached(device, objects | {"holder": holder}) as run:
            until_taken(run, objects)
            complete = run.report().checkpoints_complete
            holder.state = {"text": "x" * (9 * 1024**2)}
            while run.report().checkpoints_complete == complete:
                iterate(run, objects, checkpoint=True)
                assert run.wait(20)
            assert run.report().failures == ()
        again = Holder({})
        with attached(device, made() | {"holder": again}) as run:
            assert run.restore() is not None
        assert again.state == holder.state

    @pytest.mark.parametrize("enabled", [True, False])
    def test_while_it_is_restored_no_garbage_is_collected(self, device: Path, enabled: bool) -> None:
        with attached(device, made() | {"holder": Holder({"x": 1})}) as run:
            run.step()
        seen: list[bool] = []

        class Noting(Holder):
            def load_state_dict(self, state: Mapping[str, object]) -> None:
                seen.append(gc.isenabled())
                super().load_state_dict(state)

        with attached(device, made() | {"holder": Noting({})}) as run:
            (gc.enable if enabled else gc.disable)()
            try:
                assert run.restore() is not None
                assert (seen, gc.isenabled()) == ([False], enabled)
            finally:
                gc.enable()

    def test_what_becomes_unsaveable_is_raised_by_the_step_and_the_older_one_stays(
        self, device: Path
    ) -> None:
        objects, holder = made(), Holder({})
        with attached(device, objects | {"holder": holder}, final=False) as run:
            first = until_taken(run, objects)
            holder.state = {"late": print}
            run.checkpoint()
            with pytest.raises(StateTypeError, match=r"holder\.late"):
                run.step()
        with attached(device, made() | {"holder": Holder({})}) as run:
            restored = run.restore()
            assert restored is not None
            assert str(restored.checkpoint) == first


class Holder:
    """An object with any state."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self.state = state

    def state_dict(self) -> Mapping[str, object]:
        return self.state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.state = state


def test_waiting_tells_that_memory_is_still_asked_for(device: Path, daemon: subprocess.Popen[bytes]) -> None:
    objects = made()
    with attached(device, objects, final=False) as run:
        daemon.send_signal(signal.SIGSTOP)
        try:
            iterate(run, objects)
            assert not run.wait(0.1)
        finally:
            daemon.send_signal(signal.SIGCONT)
        assert run.wait(20)


def test_a_slot_is_given_back_whatever_happens_at_the_boundary(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More often than there are slots."""
    slots = 2

    def fail(places: Places, addresses: object, base: int) -> None:
        raise RuntimeError("out of luck")

    objects = made()
    with attached(device, objects, final=False) as run:
        with monkeypatch.context() as patch:
            patch.setattr(Places, "lazy_moves", fail)
            iterate(run, objects)
            assert run.wait(20)
            run._snapshotter.prepare()
            arena = run._snapshotter._arenas._arena
            assert arena is not None
            for _ in range(slots + 1):
                with pytest.raises(RuntimeError, match="out of luck"):
                    iterate(run, objects, checkpoint=True)
                until_s = time.monotonic() + 20
                while len(arena.free) < slots:  # the daemon gives it back
                    assert time.monotonic() < until_s
                    time.sleep(0.01)
        until_taken(run, objects)
        assert run.report().skipped == {}


def test_a_slot_is_given_up_only_when_copies_from_devices_have_ended(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was enqueued before a snapshot failed goes on by itself."""

    def fail(places: Places, addresses: object, base: int) -> None:
        raise RuntimeError("out of luck")

    objects, order = made(), list[str]()
    with attached(device, objects, final=False) as run:
        until_taken(run, objects)
        monkeypatch.setattr(run._snapshotter._cuda, "finish", lambda: order.append("copies have ended"))
        tell = run._link.tell

        def told(frame: frames.Request) -> bool:
            order.append(type(frame).__name__)
            return tell(frame)

        monkeypatch.setattr(run._link, "tell", told)
        monkeypatch.setattr(Places, "lazy_moves", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            iterate(run, objects, checkpoint=True)
    assert order[:2] == ["copies have ended", "Abandon"]


def test_a_daemon_that_goes_while_memory_is_asked_for_ahead_does_not_end_training(
    device: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(make: object) -> None:
        raise DaemonUnavailableError("the daemon does not take frames: Broken pipe")

    objects = made()
    with attached(device, objects, final=False) as run:
        with monkeypatch.context() as patch:
            patch.setattr(run._link.client, "ask", gone)
            iterate(run, objects)
        assert "arena_not_prepared reason=the daemon does not take frames" in caplog.text
        while run.report().checkpoints_complete == 0:  # the first one asks for memory again
            iterate(run, objects, checkpoint=True)
            assert run.wait(20)


def test_a_copy_that_outlives_its_daemon_has_failed_and_says_nothing_to_the_next_one(
    device: Path, gate: Gate, daemon: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arena is unknown there, or another one has the number."""
    send, said = DaemonClient.send, list[tuple[DaemonClient, str]]()

    def noted(client: DaemonClient, frame: frames.Request) -> None:
        said.append((client, type(frame).__name__))
        send(client, frame)

    monkeypatch.setattr(DaemonClient, "send", noted)
    monkeypatch.setattr(slot_sealing_module, "ANNOUNCE_BYTES_MIN", 0)
    devices = [device, device.with_name("d1")]
    devices[1].mkdir()
    objects = made(width=4096)
    with contextlib.ExitStack() as daemons, attached(devices, objects, final=False) as run:
        until_taken(run, objects)
        gate.open.clear()
        iterate(run, objects, checkpoint=True)
        checkpoint = f"{run.attempt}.{run.steps}"
        daemon.kill()
        wait_until(lambda: run._link.broken)
        daemons.enter_context(daemon_process(Path(os.environ["EVERSTEP_SOCKET"])))

        def is_back() -> bool:
            run.step()
            return not run._link.broken

        wait_until(is_back)
        said.clear()
        gate.open.set()
        assert run.wait(60)
        assert [what for client, what in said if client is run._link.client] == []
        assert run.report().checkpoints_sealed == 1
        while run.report().checkpoints_complete == 1:  # behind all that the daemon had to answer before
            iterate(run, objects, checkpoint=True)
            assert run.wait(60)
        assert run.report().failures == (f"{checkpoint}: {DAEMON_LOST}",)
        assert run.report().checkpoints_sealed == 2


def test_the_last_boundary_asks_anew_for_memory_that_was_refused_long_ago(device: Path) -> None:
    """Nobody has asked for the answer to what an earlier boundary asked for ahead; by now there may be room."""
    objects = made()
    with attached(device, objects) as run:
        iterate(run, objects)
        assert run.wait(60)
        arenas = run._snapshotter._arenas
        assert arenas._asked is not None
        layout, granted = arenas._asked
        _, fd = granted.result()
        assert fd is not None
        os.close(fd)
        refused = Future[Answer]()
        refused.set_exception(MemoryRefusedError("2 slots of 4 GiB do not fit"))
        arenas._asked = (layout, refused)
    assert (run.report().checkpoints_complete, run.report().failures) == (1, ())


def test_the_last_boundary_asks_for_memory_again_and_again_and_ever_more_rarely(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer says that it is busy, the next try asks anew; what is there soon is looked at soon."""
    objects = made()
    slept: list[float] = []
    with attached(device, objects, final=False) as run:
        until_taken(run, objects)
        reasons = iter(
            [*[f"{NO_ROOM_YET}: it is being written", NO_ARENA] * 4, STILL_COPYING, STILL_COPYING, None]
        )
        monkeypatch.setattr(run._checkpoints, "_begin", lambda _: next(reasons))
        clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
        monkeypatch.setattr(run_checkpoints, "time", clock)
        assert run._checkpoints.take_last(time.monotonic() + 60)
    assert slept == [0.01, 0.02, 0.04, 0.08, 0.16, 0.2, 0.2, 0.2, 0.2, 0.01]


class TestReport:
    def test_the_eager_part_and_its_largest_leaf_are_named(self, device: Path) -> None:
        objects = made()
        objects["model"].register_buffer("large", torch.zeros(5000))
        with attached(device, objects) as run:
            until_taken(run, objects)
            report = run.report()
        assert report.largest_eager_leaf == "model.large"
        assert report.eager_bytes >= 4 * 5000
        assert report.eager_s > 0
        assert report.checkpoints_sealed >= 1

    def test_a_step_within_which_the_whole_checkpoint_ends_is_a_busy_one(self, device: Path) -> None:
        objects = made()
        with attached(device, objects, final=False) as run:
            until_taken(run, objects)  # the checkpoint is complete: what follows is quiet until the next one
            iterate(run, objects)
            before = run.report()
            for _ in range(3):
                iterate(run, objects)
            quiet = run.report()
            assert (quiet.quiet_steps, quiet.busy_steps) == (before.quiet_steps + 3, before.busy_steps)
            while run.report().checkpoints_complete == before.checkpoints_complete:
                iterate(run, objects, checkpoint=True)  # until the daemon has given a slot back
                assert run.wait(20)  # copied, written and reported before the next boundary
            assert run.report().busy_steps == quiet.busy_steps
            iterate(run, objects)
            iterate(run, objects)
            after = run.report()
            assert after.busy_steps == quiet.busy_steps + 1
            assert after.step_busy_s > 0

    def test_a_step_beside_which_an_arena_is_allocated_is_a_busy_one(
        self, device: Path, daemon: "subprocess.Popen[bytes]"
    ) -> None:
        objects = made()
        with attached(device, objects, final=False) as run:
            daemon.send_signal(signal.SIGSTOP)
            iterate(run, objects)  # asks for the arena
            daemon.send_signal(signal.SIGCONT)
            assert run.wait(20)
            iterate(run, objects)
            assert run.report().busy_steps == 1

    def test_seconds_are_counted_once(self, device: Path) -> None:
        objects = made()
        with attached(device, objects) as run:
            until_taken(run, objects)
            for _ in range(20):
                iterate(run, objects)
            report = run.report()
        assert report.stall_s == report.boundary_s + report.guard_s
        assert report.eager_s + report.wait_s <= report.boundary_s
        assert report.stall_s < report.train_s


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestForkedChild:
    """It may train what it likes, as a worker that evaluates does, and cannot call the run."""

    def test_trains_while_a_copy_of_its_parent_goes_on_and_is_refused_by_the_run(
        self, device: Path, gate: Gate
    ) -> None:
        objects = made()
        with attached(device, objects, final=False) as run:
            until_taken(run, objects)
            gate.open.clear()
            iterate(run, objects, checkpoint=True)
            child = os.fork()
            if not child:
                status = 1
                try:
                    model = nn.Linear(2, 2)
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                    for parameter in model.parameters():
                        parameter.grad = torch.ones_like(parameter)
                    optimizer.step()
                    by_whom = f"attached by process {os.getppid()}, and this is a"
                    with pytest.raises(UsageError, match=by_whom):
                        run.step()
                    with pytest.raises(UsageError, match=by_whom):
                        run.wait(20)
                    run.close()
                    grandchild = os.fork()
                    if grandchild:
                        status = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
                    else:
                        with pytest.raises(UsageError, match=by_whom):
                            run.step()
                        status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            gate.open.set()
            assert run.wait(20)
            assert (run.report().checkpoints_complete, run.report().failures) == (2, ())

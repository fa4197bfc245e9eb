"""Runs, slots, pins, exports and the draining of a node, asked of a real daemon over its real socket."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pausing import wait_until

from everstep.checkpoint.pins import LABEL_BYTES_MAX
from everstep.core.errors import LimitError, NotFoundError, ProtectedError, RunBusyError, UsageError
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.control.keep_service import EXPORTS_USER_MAX
from everstep.daemon.control.run_views import RunState
from everstep.daemon.events.event_types import EventKind, EventQuery
from everstep.daemon.slot_machine import SlotState
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.proto import frames

RUN = "test"


@pytest.fixture
def client(socket_path: Path) -> Iterator[ControlClient]:
    with daemon_process(socket_path), connected(socket_path) as found:
        yield found


@pytest.fixture
def trainer(socket_path: Path, client: ControlClient, devices: list[Path]) -> Iterator[FakeTrainer]:
    del client
    with FakeTrainer(socket_path) as found:
        found.open_run(devices, keep=frames.KeepRules(last=1))
        found.begin_attempt(1)
        yield found


def save(trainer: FakeTrainer, first: int, last: int) -> None:
    """Save these steps, each durable before the next."""
    arena = trainer.make_arena(trainer.layout())
    for step in range(first, last + 1):
        arena.save(CheckpointId(1, step), seed=step, slot=step % 2)
        trainer.event(frames.Persisted)
        trainer.send(frames.SealedEverywhere(attempt=1, step=step))
    arena.close()


def steps(client: ControlClient) -> list[int]:
    return [view.checkpoint.step for view in client.checkpoints(RUN)]


def command(socket_path: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "everstep.daemon.cli.main", *arguments],
        env={**os.environ, "EVERSTEP_SOCKET": str(socket_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


def test_runs_and_slots_say_what_is_in_memory(
    client: ControlClient, trainer: FakeTrainer, socket_path: Path, devices: list[Path]
) -> None:
    save(trainer, 1, 2)
    (run,) = client.runs()
    assert (run.status.name, run.state, run.checkpoint_count) == (RUN, RunState.ATTACHED, 2)
    assert run == client.run(RUN) == client.run(run.status.run_id)
    slots = client.slots(RUN)
    assert [(each.rank, each.slot) for each in slots] == [(0, 0), (0, 1)]
    assert CheckpointId(1, 2) in [each.checkpoint for each in slots]
    assert run.arena_bytes >= sum(each.size_bytes for each in slots) > 0
    assert {each.state for each in slots} <= {SlotState.KEPT, SlotState.FREE}
    with pytest.raises(NotFoundError):
        client.run("other")
    with pytest.raises(NotFoundError):
        client.slots("other")
    assert "attached" in command(socket_path, "runs", RUN)
    assert "kept" in command(socket_path, "slots")
    assert client.caches() == client.members() == client.groups() == []
    trainer.close()
    wait_until(lambda: client.run(RUN).state is RunState.LINGERING)


def test_runs_that_are_only_stored_are_listed(
    client: ControlClient, trainer: FakeTrainer, socket_path: Path, devices: list[Path]
) -> None:
    save(trainer, 1, 1)
    client.stop()
    with daemon_process(socket_path), connected(socket_path) as again, FakeTrainer(socket_path) as other:
        other.open_run(devices, name="other")
        (closed, stored) = again.runs()
        assert (closed.status.name, closed.state) == ("other", RunState.ATTACHED)
        assert (stored.status.name, stored.state) == (RUN, RunState.STORED)
        assert (stored.checkpoint_count, stored.arena_bytes) == (1, 0)


def test_a_pinned_checkpoint_stays_until_its_time_is_over(
    client: ControlClient, trainer: FakeTrainer, socket_path: Path
) -> None:
    save(trainer, 1, 2)
    view = client.pin(RUN, CheckpointId(1, 1), "copy to archive", ttl_s=0.0)
    assert [(each.label, each.expires_unix_s) for each in view.pins] == [("copy to archive", 0.0)]
    assert view.tags == ()
    client.pin(RUN, CheckpointId(1, 2), "look", ttl_s=1.0)
    save(trainer, 3, 6)
    with pytest.raises(ProtectedError, match="pin 'copy to archive'"):
        client.remove(RUN, CheckpointId(1, 1), force=False)
    kinds = EventQuery(kinds=frozenset({EventKind.CHECKPOINT_COMPLETE}))
    wait_until(lambda: len(list(client.events(kinds))) == 6)
    wait_until(
        lambda: not [pin for each in client.checkpoints(RUN) for pin in each.pins if pin.label == "look"]
    )
    save(trainer, 7, 8)
    wait_until(lambda: steps(client) == [8, 7, 1])
    assert "stays until" in command(socket_path, "pin", "copy to archive", f"{RUN}@1.1", "--ttl", "1h")
    (kept,) = [each for each in client.checkpoints(RUN) if each.pins]
    assert len(kept.pins) == 1, "its time is set anew"
    assert kept.pins[0].expires_unix_s > 0
    assert command(socket_path, "unpin", "copy to archive", RUN).startswith("test@1.1 is no longer pinned")
    save(trainer, 9, 9)
    wait_until(lambda: steps(client) == [9, 8])


def test_pins_outlive_the_daemon_and_end_without_it(
    client: ControlClient, trainer: FakeTrainer, socket_path: Path, devices: list[Path]
) -> None:
    save(trainer, 1, 2)  # as many as are kept anyhow
    client.pin(RUN, CheckpointId(1, 1), "for good", ttl_s=0.0)
    client.pin(RUN, CheckpointId(1, 2), "short", ttl_s=0.5)
    client.stop()
    with daemon_process(socket_path), connected(socket_path) as again, FakeTrainer(socket_path) as other:
        other.open_run(devices)
        wait_until(
            lambda: [pin.label for each in again.checkpoints(RUN) for pin in each.pins] == ["for good"]
        )


def test_a_pin_that_cannot_be_ended_holds_nobody_up(
    client: ControlClient, trainer: FakeTrainer, socket_path: Path, devices: list[Path]
) -> None:
    save(trainer, 1, 2)
    client.pin(RUN, CheckpointId(1, 2), "short", ttl_s=0.5)
    client.stop()
    devices[1].rename(devices[1].with_name("away"))
    devices[1].mkdir()  # mounted nowhere
    with daemon_process(socket_path), FakeTrainer(socket_path) as other, FakeTrainer(socket_path) as late:
        assert isinstance(other.open_run(devices), frames.RunOpened)
        log = socket_path.with_name("daemon.log")
        wait_until(lambda: "pins_not_ended" in log.read_text())
        assert isinstance(late.open_run(devices, name="late"), frames.RunOpened), (
            "it does not wait for the pin"
        )


def test_one_label_is_never_on_two_checkpoints(
    client: ControlClient, trainer: FakeTrainer, socket_path: Path
) -> None:
    """Whoever is first: all others are refused, or set its time anew."""
    save(trainer, 1, 2)

    def pin_again_and_again(step: int) -> None:
        with connected(socket_path) as mine:
            for _ in range(10):
                with contextlib.suppress(UsageError):
                    mine.pin(RUN, CheckpointId(1, step), "x", ttl_s=600.0)

    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(pin_again_and_again, 1 + number % 2) for number in range(6)]:
            done.result()
    assert [pin.label for each in client.checkpoints(RUN) for pin in each.pins] == ["x"]


def test_labels_are_bounded_and_unique(client: ControlClient, trainer: FakeTrainer) -> None:
    save(trainer, 1, 2)
    for label in ("", "x" * (LABEL_BYTES_MAX + 1), "a\nb"):
        with pytest.raises(UsageError, match="label"):
            client.pin(RUN, None, label, ttl_s=0.0)
    for ttl_s in (-1.0, 1e12, float("nan")):
        with pytest.raises(UsageError, match="pin for"):
            client.pin(RUN, None, "x", ttl_s=ttl_s)
    client.pin(RUN, CheckpointId(1, 1), "x", ttl_s=0.0)
    with pytest.raises(UsageError, match="is on checkpoint"):
        client.pin(RUN, CheckpointId(1, 2), "x", ttl_s=0.0)
    with pytest.raises(UsageError, match="does not begin"):
        client.tag(RUN, CheckpointId(1, 2), "pin:0:x")
    with pytest.raises(NotFoundError):
        client.unpin(RUN, "y")


def test_what_is_exported_is_not_collected_meanwhile(
    client: ControlClient, trainer: FakeTrainer, devices: list[Path]
) -> None:
    save(trainer, 1, 2)
    with client.exporting(RUN, CheckpointId(1, 1)) as held:
        assert held.directories == tuple(devices)
        assert held.summary.checkpoint == CheckpointId(1, 1)
        assert held.store_uid == os.getuid()
        save(trainer, 3, 5)
        wait_until(lambda: steps(client) == [5, 4, 1])
    later = itertools.count(6)

    def is_collected_with_one_more() -> bool:
        step = next(later)
        save(trainer, step, step)
        return 1 not in steps(client)

    wait_until(is_collected_with_one_more)  # the daemon hears a little later that the export has ended
    with pytest.raises(NotFoundError), client.exporting("other"):
        raise AssertionError("there is none")


def test_exports_are_bounded_and_their_places_given_back(client: ControlClient, trainer: FakeTrainer) -> None:
    save(trainer, 1, 1)
    going_on = [client.exporting(RUN) for _ in range(EXPORTS_USER_MAX)]
    for each in going_on:
        each.__enter__()
    with pytest.raises(LimitError, match="go on"), client.exporting(RUN):
        raise AssertionError("it is one too many")
    for each in going_on:
        each.__exit__(None, None, None)

    def is_possible() -> bool:
        try:
            with client.exporting(RUN):
                return True
        except LimitError:
            return False

    wait_until(is_possible)


def test_a_drained_node_takes_no_new_runs(
    client: ControlClient, trainer: FakeTrainer, socket_path: Path, devices: list[Path]
) -> None:
    drained = client.drain()
    assert (drained.is_draining, drained.unsettled_count, drained.attached_count) == (True, 0, 1)
    assert client.status().daemon.is_draining
    with FakeTrainer(socket_path) as late:
        refused = late.open_run(devices, name="late")
        assert isinstance(refused, frames.Failure)
        assert (refused.code, "drained" in refused.message) == ("RunBusyError", True)
    save(trainer, 1, 1)  # who is attached goes on
    assert "takes runs again" in command(socket_path, "drain", "--cancel")
    with FakeTrainer(socket_path) as late:
        assert isinstance(late.open_run(devices, name="late"), frames.RunOpened)
    kinds = [each.kind for each in client.events(EventQuery(since=0))]
    assert [each for each in kinds if each in {EventKind.DRAINING, EventKind.DRAINED}] == [
        EventKind.DRAINING,
        EventKind.DRAINED,
    ]


def test_what_is_read_keeps_its_tags_and_pins_when_it_is_to_be_removed(
    client: ControlClient, trainer: FakeTrainer
) -> None:
    save(trainer, 1, 3)
    first = CheckpointId(1, 2)
    client.tag(RUN, first, "best")
    client.pin(RUN, first, "copying", ttl_s=600)
    with client.exporting(RUN, first):
        with pytest.raises(RunBusyError, match="in use"):
            client.remove(RUN, first, force=True)
        (view,) = [each for each in client.checkpoints(RUN) if each.checkpoint == first]
        assert (view.tags, [each.label for each in view.pins]) == (("best",), ["copying"])

    def is_removed() -> bool:
        try:
            return client.remove(RUN, first, force=True).checkpoint_count == 1
        except RunBusyError:  # its reader has only just left
            return False

    wait_until(is_removed)
    assert 2 not in steps(client)
    client.tag(RUN, CheckpointId(1, 3), "best")  # the name is free


def test_a_run_of_which_something_is_read_is_not_removed_in_part(
    client: ControlClient, trainer: FakeTrainer
) -> None:
    save(trainer, 1, 3)
    wait_until(lambda: steps(client) == [3, 2])  # what is outdated goes after the newest was reported
    client.tag(RUN, CheckpointId(1, 2), "best")
    before = client.checkpoints(RUN)
    trainer.close()
    wait_until(lambda: client.run(RUN).state is not RunState.ATTACHED)
    slots = client.slots(RUN)
    with client.exporting(RUN, CheckpointId(1, 3)), pytest.raises(RunBusyError, match=r"1\.3"):
        client.remove_run(RUN, force=True)
    assert client.checkpoints(RUN) == before
    assert client.slots(RUN) == slots, "what waits in memory for a restart does so still"

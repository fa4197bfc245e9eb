"""Ctrl-C in the middle of a boundary, caught by whoever trains on: the next checkpoints come, and close() returns."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from interrupting import Interrupting
from pausing import wait_until
from torch import nn

import everstep
from everstep.daemon.testing import daemon_process
from everstep.hook.client import DaemonClient
from everstep.hook.one_rank import OneRank
from everstep.hook.run import Run
from everstep.proto.frames import SkipReason

STRIDE = 5
"""Lines between two that are interrupted."""
DEADLINE_S = 60.0
"""A slot that leaks would let close() wait for ten minutes."""


@pytest.fixture(autouse=True)
def daemon() -> Iterator[None]:
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])):
        yield


@pytest.fixture
def device(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    return tmp_path / "d"


def made() -> dict[str, Any]:
    model = nn.Linear(64, 64)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)}


def train(objects: dict[str, Any]) -> None:
    objects["optimizer"].zero_grad()
    objects["model"](torch.ones(2, 64)).sum().backward()
    objects["optimizer"].step()


def until_complete(run: Run, objects: dict[str, Any]) -> None:
    """Train on until one more checkpoint is complete."""
    complete, until_s = run.report().checkpoints_complete, time.monotonic() + DEADLINE_S
    while run.report().checkpoints_complete == complete:
        assert time.monotonic() < until_s, run.report().skipped
        train(objects)
        run.checkpoint()
        run.step()
        run.wait(1)


def train_on(run: Run, objects: dict[str, Any]) -> NoReturn:
    while True:
        train(objects)
        run.step()


def assert_closes(run: Run) -> None:
    began_s = time.monotonic()
    run.close()
    assert time.monotonic() - began_s < DEADLINE_S


HOW_FAR = {"before": 0.0, "in the middle": 0.5, "after": 1.0, "answered": 1.0}


class InterruptedSocket:
    """Raises KeyboardInterrupt once, when a frame of a kind has been sent as far as is wanted, or was answered."""

    def __init__(self, client: DaemonClient, kind: bytes, how: str) -> None:
        self._client, self._kind, self._how = client, kind, how
        self._sock = client._sock
        self.done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, data: bytes) -> None:
        if self.done or self._kind not in data:
            return self._sock.sendall(data)
        self.done = True
        self._sock.sendall(data[: int(len(data) * HOW_FAR[self._how])])
        if self._how == "answered":
            wait_until(lambda: not self._client._pending)
        raise KeyboardInterrupt


def train_until(run: Run, objects: dict[str, Any], interrupted: InterruptedSocket) -> None:
    while not interrupted.done:
        train(objects)
        run.checkpoint()
        run.step()


@pytest.mark.parametrize("how", HOW_FAR)
@pytest.mark.parametrize("kind", ["begin_snapshot", "make_arena"])
def test_while_a_frame_is_sent(device: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: str) -> None:
    objects = made()
    run = everstep.attach("interrupted", **objects, storage=device, every=10**6)
    until_complete(run, objects)
    if kind == "make_arena":  # a structure with more in it asks for one
        objects["model"].register_buffer("more", torch.zeros(2**20))
    for _ in range(3):  # more often than there are slots
        interrupted = InterruptedSocket(run._link.client, kind.encode(), how)
        monkeypatch.setattr(run._link.client, "_sock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_until(run, objects, interrupted)
        until_complete(run, objects)
        if kind == "make_arena":
            objects["model"].more = torch.zeros(2 * objects["model"].more.numel())
    assert_closes(run)


def test_at_any_line_of_a_boundary(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time somewhere else, from the first line of `run.step()` to its last."""
    monkeypatch.setattr("everstep.hook.link.RETRY_FIRST_S", 0.05)
    objects = made()
    run = everstep.attach("interrupted", **objects, storage=device, every=10**6)
    until_complete(run, objects)
    number, interrupts = 1, 0
    while True:
        train(objects)
        run.checkpoint()
        tracer = Interrupting(number)
        sys.settrace(tracer)
        try:
            run.step()
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.settrace(None)
        until_complete(run, objects)
        if not tracer.is_done:
            break  # it came to the end
        number += STRIDE
    assert interrupts > 20
    assert_closes(run)


@pytest.mark.parametrize("by", ["step", "wait", "close"])
@pytest.mark.parametrize("is_decided", [False, True])
def test_a_boundary_left_before_its_checkpoint_is_said_to_be_skipped(
    device: Path, monkeypatch: pytest.MonkeyPatch, *, is_decided: bool, by: str
) -> None:
    """Others may have begun theirs, and an operator may wait for it: as it is known, or as it was never asked about."""
    objects = made()
    run = everstep.attach("interrupted", **objects, storage=device, every=10**6)
    until_complete(run, objects)
    ranks = run._ranks
    run.checkpoint()
    with monkeypatch.context() as patched:

        def interrupted(step: int) -> bool:
            if is_decided:
                assert OneRank.is_due(ranks, step)  # pyright: ignore[reportArgumentType]
            raise KeyboardInterrupt

        patched.setattr(ranks, "is_due", interrupted)
        train(objects)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    complete, left = run.report().checkpoints_complete, run.steps
    if by == "step":
        train(objects)
        run.step()
        assert run.wait(DEADLINE_S)
    elif by == "wait":  # before an evaluation, say: other ranks wait for what they have begun
        assert run.wait(DEADLINE_S)
    else:
        assert_closes(run)
    assert not is_decided or run._checkpoints.progress.tried >= left, "it is asked for again"
    skipped = run.report().skipped
    if is_decided:
        assert skipped[SkipReason.ERROR].count == 1
        assert "left by an exception" in skipped[SkipReason.ERROR].example
    else:  # what was asked for is still asked for
        assert SkipReason.ERROR not in skipped
    if by == "step":
        assert run.report().checkpoints_complete == complete + (not is_decided)
    if by != "close":
        until_complete(run, objects)
        assert_closes(run)


def test_who_leaves_the_last_boundary_of_a_lease_by_an_exception_ends_with_the_next_one(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = made()
    run = everstep.attach("interrupted", **objects, storage=device, every=10**6)
    until_complete(run, objects)
    run.lease(600)
    monkeypatch.setattr(run._pace, "_held_s", 600.0)  # so that the next boundary is the last chance
    with monkeypatch.context() as patched:

        def interrupted(*_: object) -> bool:
            raise KeyboardInterrupt

        patched.setattr(run._checkpoints, "_begin_last", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_on(run, objects)
    assert not run._state.is_last
    train(objects)
    with pytest.raises(SystemExit):
        run.step()
    assert run.report().last_complete == f"1.{run.steps}"
    run.close()


def test_what_fails_as_a_run_is_made_leaves_nothing_that_hears_sigterm(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that is attached instead would not hear it, or end by the deadline of the one that was never made."""
    for what in ("_say_notes", "_make_checkpoints"):
        with monkeypatch.context() as patched:

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            patched.setattr(Run, what, interrupted)
            with pytest.raises(KeyboardInterrupt):
                everstep.attach("interrupted", **made(), storage=device, every=10**6)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    objects = made()
    run = everstep.attach("interrupted", **objects, storage=device, every=10**6)
    until_complete(run, objects)
    assert_closes(run)


def test_in_the_farewell_nothing_stays_held(device: Path) -> None:
    """Nobody can close the run again: the same name can be attached, and SIGTERM ends the process."""
    objects = made()
    run = everstep.attach("interrupted", **objects, storage=device, every=10**6)
    until_complete(run, objects)
    client = run._link.client
    client._sock = InterruptedSocket(client, b"detach", "before")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(KeyboardInterrupt):
        run.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    run.close()
    with everstep.attach("interrupted", **made(), storage=device, every=10**6) as again:
        assert again.restore() is not None

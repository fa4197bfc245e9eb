"""A state larger than the daemon's budget: as of its boundary, though most of it is copied long after."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from in_process import node_config
from overlapping import Loop, Slow, attached, data, exercise, facts, simple, take
from pausing import Pause, Phase, pausing_daemon
from torch import nn

from everstep.core.ids import CheckpointId
from everstep.daemon.testing import node_daemon
from everstep.hook.import_run import commit_components
from everstep.hook.link import RunAddress
from everstep.hook.run import Run
from everstep.hook.run_checkpoints import RunCheckpoints
from everstep.hook.run_state import RunState
from everstep.hook.state_protocol import Laziness, Sink

MIB = 1024**2
NAMES = [Path("nvme0"), Path("nvme1")]


@pytest.fixture
def storage(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "d0", tmp_path / "d1"]
    for path in paths:
        path.mkdir()
    return paths


@pytest.fixture
def budget(storage: list[Path], request: pytest.FixtureRequest) -> Iterator[int]:
    """A node daemon with so many MiB."""
    config = node_config(storage, f"arena_max_bytes = {request.param * MIB}\nreserve_bytes = 0\n")
    with node_daemon(config, Path(os.environ["EVERSTEP_SOCKET"])):
        yield request.param


class Frozen(nn.Linear):
    """Parameters that nobody trains, which are copied late, too."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.requires_grad_(requires_grad=False)


def wide(middle: Callable[[int, int], nn.Module] = nn.Linear) -> Callable[[], nn.Module]:
    """47 MiB with what AdamW keeps; statistics and random numbers that forward changes."""
    return lambda: nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 300_000), middle(300_000, 6)
    )


@pytest.mark.parametrize("budget", [22, 34], indirect=True)
@pytest.mark.parametrize("middle", [nn.Linear, Frozen])
def test_it_is_as_it_was_at_its_boundary_though_training_went_on(
    budget: int, middle: Callable[[int, int], nn.Module], slow: Slow
) -> None:
    """Forward and backward are through before one lazy byte is copied; then the optimizer waits for the drives."""
    notes: list[str] = []
    waited_s: list[float] = []

    def make(seed: int) -> Loop:
        loop = simple(seed, wide(middle))
        iterate = loop.iterate

        def noting(number: int, run: Run) -> None:
            notes.extend(run.report().notes)
            waited_s.append(run.report().guard_s)
            iterate(number, run)

        return Loop(loop.objects, noting)

    exercise(make, NAMES, slow)
    assert any(f"through a ring of {budget}.0 MiB" in note for note in notes)
    assert max(waited_s) > 0, "the report has what the optimizer waited"


@pytest.mark.parametrize("budget", [40], indirect=True)
@pytest.mark.usefixtures("budget")
def test_the_debug_mode_finds_what_was_written_past_it(slow: Slow) -> None:
    loop = simple(1, wide())
    with attached(loop, NAMES, debug=True) as run:
        loop.iterate(0, run)
        run.step()
        assert run.wait(20)
        loop.iterate(1, run)
        slow.arm()
        take(run)
        loop.objects["model"][4].weight.data[5, -1] += 1
        slow.open()
        assert run.wait(20)
        (failure,) = run.report().failures
        assert "model.4.weight was written to while its snapshot was being copied" in failure
        loop.iterate(2, run)
        take(run)
        assert run.wait(20)
        assert run.report().checkpoints_complete == 1


@pytest.mark.parametrize("budget", [16], indirect=True)
@pytest.mark.usefixtures("budget")
def test_what_must_be_copied_at_once_has_to_fit_beside_the_windows() -> None:
    """Buffers of 9 MiB: with them the least ring has no room, and the reason names what there is."""
    loop = simple(1, wide())
    loop.objects["model"].register_buffer("large", torch.zeros(9 * MIB, dtype=torch.uint8))
    with attached(loop, NAMES) as run:
        loop.iterate(0, run)
        for _ in range(3):
            run.checkpoint()
            run.step()
            assert run.wait(20)
        assert any(
            "needs at least 21 MiB, but the daemon's budget has 16 MiB left" in each.example
            for each in run.report().skipped.values()
        )


@pytest.mark.parametrize("budget", [48], indirect=True)
@pytest.mark.usefixtures("budget")
def test_more_to_copy_at_once_goes_through_the_same_ring_where_it_has_room() -> None:
    """A structure that changes in mid-run need not wait for memory."""
    loop = simple(1, wide())
    with attached(loop, NAMES) as run:
        loop.iterate(0, run)
        run.step()
        assert run.wait(20)
        take(run)
        assert run.wait(20)
        (first,) = run.report().notes
        loop.objects["model"].register_buffer("large", torch.zeros(2 * MIB, dtype=torch.uint8))
        loop.iterate(1, run)
        take(run)
        assert run.wait(20)
        report = run.report()
        assert (report.checkpoints_complete, report.failures) == (2, ())
        assert report.notes == (first,)


def test_it_counts_as_sealed_everywhere_only_once_it_is_durable(
    storage: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory holds it whole: had an older one gone for it, both were gone where its manifest has no room."""
    told: list[CheckpointId] = []
    tell = RunCheckpoints.sealed_everywhere

    def noting(checkpoints: RunCheckpoints, checkpoint: CheckpointId) -> None:
        told.append(checkpoint)
        tell(checkpoints, checkpoint)

    monkeypatch.setattr(RunCheckpoints, "sealed_everywhere", noting)
    write = "everstep.checkpoint.real_storage:RealStorage.write_small_new"
    no_room = Phase(write, match="/commits/", raises="NoSpaceError")
    config = node_config(storage[:1], f"arena_max_bytes = {34 * MIB}\nreserve_bytes = 0\n")
    loop = simple(1, wide())
    with pausing_daemon(Pause(tmp_path / "pause"), no_room, config), attached(loop, NAMES[:1]) as run:
        loop.iterate(0, run)
        run.step()
        assert run.wait(60)
        take(run)
        assert run.wait(60)
        (failure,) = run.report().failures
        assert "it streamed through a ring" in failure
        assert told == []
        take(run)
        assert run.wait(60)
        assert list(map(str, told)) == [run.report().last_complete]


@pytest.mark.parametrize("budget", [90], indirect=True)
@pytest.mark.usefixtures("budget")
def test_with_one_slot_each_snapshot_takes_the_place_of_the_one_before() -> None:
    loop = simple(1, wide())
    with attached(loop, NAMES) as run:
        for number in range(4):
            loop.iterate(number, run)
            run.step()
            assert run.wait(20)
            take(run)
            assert run.wait(20)
        report = run.report()
        assert (report.checkpoints_complete, report.failures) == (4, ())
        (note,) = report.notes
        assert note.startswith(
            "1 of 2 snapshots fit in memory, and it is given up when the next one is begun"
        )
        expected = facts(loop)
    again = simple(99, wide())
    with attached(again, NAMES) as run:
        restored = run.restore()
        assert restored is not None
        assert restored.source == "memory"
        assert facts(again) == expected
        again.iterate(4, run)
        take(run)
        assert run.wait(20)
        assert run.report().checkpoints_complete == 1


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [34], indirect=True)
@pytest.mark.usefixtures("budget")
def test_cuda_tensors_go_window_by_window(slow: Slow) -> None:
    def make(seed: int) -> Loop:
        torch.manual_seed(seed)
        net = wide()().cuda()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def iterate(number: int, run: Run) -> None:
            assert run.report().failures == ()
            optimizer.zero_grad()
            net(data(number, 4, 6).cuda()).square().mean().backward()
            optimizer.step()

        return Loop({"model": net, "optimizer": optimizer}, iterate)

    exercise(make, NAMES, slow)


def test_the_next_daemons_ring_may_be_smaller(storage: list[Path]) -> None:
    """What was planned for the ring before would lie behind the end of this one."""
    loop, again = simple(1, wide()), simple(99, wide())
    socket = Path(os.environ["EVERSTEP_SOCKET"])

    def daemon(budget: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
        memory = f"arena_max_bytes = {budget * MIB}\nreserve_bytes = 0\n"
        return node_daemon(node_config(storage, memory), socket)

    def save(run: Run) -> int:
        """Save one boundary; return the size of the ring."""
        complete = run.report().checkpoints_complete
        while run.report().checkpoints_complete == complete:
            assert run.report().failures == ()
            loop.iterate(0, run)
            run.checkpoint()
            run.step()
            run.wait(20)
        assert run._snapshotter._arenas._arena is not None
        return run._snapshotter._arenas._arena.size_bytes // MIB

    with contextlib.ExitStack() as training:
        with daemon(40) as first:
            run = training.enter_context(attached(loop, NAMES))
            assert save(run) == 40
            first.kill()
        with daemon(22):
            assert save(run) == 22
            expected = facts(loop)
            training.close()
            with attached(again, NAMES) as run:
                assert run.restore() is not None
                assert facts(again) == expected


class Imported:
    """One tensor of 90 MiB."""

    name = "model"

    def capture(self, sink: Sink) -> None:
        sink.leaf("model.w", torch.arange(90 * MIB, dtype=torch.uint8), Laziness.FROZEN)
        sink.value({})


@pytest.mark.parametrize("budget", [40], indirect=True)
@pytest.mark.usefixtures("budget")
def test_an_import_streams_too(storage: list[Path]) -> None:
    address = RunAddress(name="given", rank=0, world_size=1, storage=("nvme0", "nvme1"), takeover=False)
    state = RunState(lambda: None)
    checkpoint = commit_components([Imported()], address, state=state, kind="test", notes={})
    files = [path for device in storage for path in device.glob("runs/*/*/data/*/*.safetensors")]
    assert str(checkpoint) == "1.0"
    assert len(files) > 8
    assert sum(path.stat().st_size for path in files) > 90 * MIB

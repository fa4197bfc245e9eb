"""Counters, page cache, working folder, replay: each with real files, processes and tensors."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from everstep.core.errors import UsageError
from everstep.dataloader.analysis import page_cache, work_folder
from everstep.dataloader.analysis.proc_cores import usable_cores
from everstep.dataloader.analysis.proc_files import held_files, queued_s, read_bytes
from everstep.dataloader.analysis.replay import BATCHES_MAX, Replay
from everstep.dataloader.analysis.storage_probe import probe_storage
from everstep.dataloader.analysis.work_folder import WorkFolder
from everstep.dataloader.analysis.worker_counters import Counters, WorkTotals, open_row

SIZE = 256 * 1024


def test_another_process_writes_its_row_and_nothing_is_left() -> None:
    counters = Counters()
    code = (
        "import sys; from everstep.dataloader.analysis.worker_counters import open_row\n"
        "row = open_row(sys.argv[1], 3); row[0] += 2; row[2] += 0.5"
    )
    subprocess.run([sys.executable, "-P", "-c", code, counters.path], check=True)
    counters.row(0)[0] += 1
    assert counters.totals() == WorkTotals(batches=3, busy_s=0.5)
    path = counters.path
    counters.close()
    assert open_row(path, 0) is None


def test_files_leave_memory(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(SIZE))
    with path.open("rb") as file:
        assert page_cache.resident_share(file.fileno()) == 1.0
        dropped = page_cache.drop([str(path), str(tmp_path / "absent")])
        assert page_cache.resident_share(file.fileno()) == 0.0, "just written, too"
        before = read_bytes()
        assert len(file.read()) == SIZE
        after = read_bytes()
    assert (dropped.files, dropped.size_bytes, dropped.kept) == (1, SIZE, [])
    assert dropped.refused == [str(tmp_path / "absent")]
    assert after.calls - before.calls >= SIZE
    assert after.storage - before.storage >= SIZE


def test_files_in_shared_memory_stay_and_are_named() -> None:
    path = Path(f"/dev/shm/everstep-test-{os.getpid()}")
    path.write_bytes(bytes(SIZE))
    try:
        assert page_cache.drop([str(path)]).kept == [str(path)]
    finally:
        path.unlink()


def test_held_files_are_those_open_or_mapped(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x")
    assert str(path) not in set(held_files())
    with path.open("rb"):
        assert str(path) in set(held_files())
    assert queued_s() >= 0.0


def test_the_probe_reads_from_storage(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(8)]
    for path in paths:
        path.write_bytes(os.urandom(SIZE))
    before = read_bytes()
    probe = probe_storage([*map(str, paths), str(tmp_path / "absent")], sample_bytes=65536.0, seconds=10.0)
    assert probe is not None
    assert read_bytes().storage - before.storage >= len(paths) * SIZE
    assert probe.read_s > 0.0
    assert probe.bytes_per_s > 0.0
    assert probe_storage([], sample_bytes=4096.0) is None


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/job", {"job/cpu.max": "50000 100000"}, 0.5),
        ("0::/job", {"job/cpu.max": "max 100000", "cpu.max": "25000 100000"}, 0.25),
        ("0::/of/the/host", {"cpu.max": "30000 100000"}, 0.3),
        (
            "4:cpuacct,cpu:/job\n3:memory:/x",
            {"cpu/job/cpu.cfs_quota_us": "10000", "cpu/job/cpu.cfs_period_us": "20000"},
            0.5,
        ),
        ("4:cpu:/job", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "20000"}, None),
        ("0::/", {}, None),
    ],
)
def test_a_quota_of_a_container_counts_as_so_many_cores(
    tmp_path: Path, own: str, files: dict[str, str], cores: float | None
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    expected = float(len(os.sched_getaffinity(0))) if cores is None else cores
    assert usable_cores(tmp_path / "root", tmp_path / "own") == expected


# -- the working folder --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> WorkFolder:
    """The view of a project with `data/` above it, a file, and a folder of checkpoints."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.jpg").write_text("photo")
    project = tmp_path / "project"
    (project / "runs" / "old").mkdir(parents=True)
    (project / "runs" / "best.pt").write_text("mine")
    (project / "config.yaml").write_text("lr: 1")
    (tmp_path / "scratch").mkdir()
    made = WorkFolder(tmp_path / "scratch", project)
    made.make()
    return made


def test_the_scratch_folder_shows_what_the_real_one_shows(folder: WorkFolder) -> None:
    assert (folder.path / "config.yaml").read_text() == "lr: 1"
    assert (folder.path / "runs" / "best.pt").read_text() == "mine"
    assert Path(f"{folder.path}/../data/0.jpg").read_text() == "photo"


def test_what_is_written_is_the_scratch_folders_own(folder: WorkFolder, tmp_path: Path) -> None:
    place = folder.path / "runs" / "best.pt"
    folder.own(str(place), True)
    assert place.read_text() == "mine"
    place.write_text("spoilt")
    folder.own(str(folder.path / "runs" / "old" / "new.pt"), False)
    (folder.path / "runs" / "old" / "new.pt").write_text("new")
    folder.own(str(folder.path / "config.yaml"), False)
    (folder.path / "config.yaml").unlink()
    project = tmp_path / "project"
    assert (project / "runs" / "best.pt").read_text() == "mine"
    assert (project / "config.yaml").read_text() == "lr: 1"
    assert list((project / "runs" / "old").iterdir()) == []


def test_a_working_folder_with_too_many_entries_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_folder, "ENTRIES_MAX", 2)
    project = tmp_path / "project"
    project.mkdir()
    for number in range(3):
        (project / str(number)).touch()
    with pytest.raises(UsageError, match="more than 2 entries"):
        WorkFolder(tmp_path / "scratch", project).make()


# -- replay --------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    y: list[int | str]


def test_batches_come_again_as_they_were() -> None:
    replay = Replay()
    replay.keep({"x": torch.ones(3), "pair": Pair(torch.zeros(2), [1, "a"])})
    first = replay.next()
    assert isinstance(first, dict)
    x = first.pop("x")
    first["pair"].y.append(2)
    again = replay.next()
    assert isinstance(again, dict)
    assert again["x"] is x, "the same memory, pinned or not"
    assert again["pair"].y == [1, "a"]
    assert isinstance(again["pair"], Pair)


def test_a_tensor_changed_in_place_is_handed_out_as_a_copy_from_then_on() -> None:
    replay = Replay()
    replay.keep([torch.ones(3)])
    first = replay.next()
    assert isinstance(first, list)
    first[0].mul_(2)
    second, third = replay.next(), replay.next()
    assert isinstance(second, list)
    assert isinstance(third, list)
    assert second[0].data_ptr() != third[0].data_ptr()


def test_only_the_last_few_are_kept() -> None:
    replay = Replay()
    for number in range(BATCHES_MAX + 5):
        replay.keep(torch.tensor(number))
    assert len(replay) == BATCHES_MAX
    assert replay.next() == torch.tensor(5)

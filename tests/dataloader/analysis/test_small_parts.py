"""Counters, page cache, working folder, replay: each with real files, processes and tensors."""

import itertools
import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from everstep.core.errors import UsageError
from everstep.dataloader.analysis import declared, page_cache, storage_probe, work_folder
from everstep.dataloader.analysis.declared import declared_files
from everstep.dataloader.analysis.proc_cores import usable_cores
from everstep.dataloader.analysis.proc_files import mapped_files, open_files, queued_s, read_bytes
from everstep.dataloader.analysis.replay import BATCHES_MAX, Replay
from everstep.dataloader.analysis.storage_probe import probe_storage
from everstep.dataloader.analysis.work_folder import WorkFolder
from everstep.dataloader.analysis.worker_counters import Counters, WorkTotals, open_row

SIZE = 256 * 1024
FORK = multiprocessing.get_context("fork")


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


IN_NAMESPACE = """
import os, sys
from everstep.dataloader.analysis import page_cache
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        file.read()
        print(page_cache.resident_share(file.fileno()), page_cache.drop([path]).kept)
"""


@pytest.mark.root
def test_what_the_kernel_tells_nobody_is_not_taken_for_in_memory(tmp_path: Path) -> None:
    """Root of a user namespace, as in a rootless container: mincore calls all pages of a stranger's file resident."""
    own, strange = tmp_path / "own", tmp_path / "strange"
    for path in (own, strange):
        path.write_bytes(os.urandom(SIZE))
    os.chown(strange, 12345, 12345)
    unshare = ["unshare", "--user", "--map-root-user"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no user namespace can be made: {getattr(error, 'stderr', error)}")
    command = [sys.executable, "-P", "-c", IN_NAMESPACE, str(own), str(strange)]
    said = subprocess.run([*unshare, *command], check=True, capture_output=True, text=True, timeout=60)
    assert said.stdout.splitlines() == ["1.0 []", "0.0 []"]
    with strange.open("rb") as file:
        assert page_cache.drop([str(strange)]).kept == [], "root of the machine is told"
        file.read()
        assert page_cache.resident_share(file.fileno()) == 1.0
    read_only = 'mount --bind "$0" "$0"; mount -o remount,ro,bind "$0"; exec "$@"'
    alone = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", read_only, str(tmp_path)]
    said = subprocess.run([*alone, *command], check=True, capture_output=True, text=True, timeout=60)
    assert said.stdout.splitlines() == ["1.0 []", "1.0 []"], "and where nobody could write"


def test_files_are_found_while_they_are_open_or_mapped(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x")
    assert str(path) not in {*open_files(), *mapped_files()}
    with path.open("rb") as file:
        assert str(path) in set(open_files())
        assert str(path) not in set(open_files({str(path)}))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with mapped:
        assert str(path) in set(mapped_files())
        assert str(path) not in set(mapped_files({str(path)}))
    assert queued_s() >= 0.0


def test_the_probe_reads_from_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_probe, "SECONDS", 60.0)
    paths = [tmp_path / str(number) for number in range(8)]
    for path in paths:
        path.write_bytes(os.urandom(SIZE))
    before = read_bytes()
    probe = probe_storage([*map(str, paths), str(tmp_path / "absent")], sample_bytes=65536.0, seconds=60.0)
    assert probe is not None
    assert read_bytes().storage - before.storage >= len(paths) * SIZE
    assert probe.read_s > 0.0
    assert probe.bytes_per_s > 0.0
    assert probe.paced_s is not None
    assert probe.paced_s > 0.0
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


def test_a_folder_with_too_many_entries_to_write_into_is_left_alone(
    folder: WorkFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one in its place would be the end of the script, of which nobody would know why."""
    for number in range(3):
        (tmp_path / "data" / f"{number}.jpg").touch()
    monkeypatch.setattr(work_folder, "ENTRIES_MAX", 2)
    place = Path(f"{folder.path.parent}/data")
    with pytest.raises(UsageError, match=r"the script writes into .*data, which has more than 2 entries"):
        folder.own(str(place / "new.jpg"), True)
    assert (place / "0.jpg").exists()


def test_processes_that_write_and_read_at_once_find_all_files(folder: WorkFolder, tmp_path: Path) -> None:
    """The change from a link to a folder of links is one step for who reads below it."""
    for number in range(400):
        (tmp_path / "data" / f"{number}.jpg").write_text("photo")
    place = Path(f"{folder.path.parent}/data")
    go = FORK.Event()

    def write(number: int) -> None:
        go.wait()
        for each in range(100):
            path = place / f"{number}-{each}.txt"
            folder.own(str(path), True)
            path.write_text("new")
            folder.own(str(place / f"{each}.jpg"), True)
            (place / f"{each}.jpg").write_text("spoilt")

    def read() -> None:
        go.wait()
        while not (place / "0-99.txt").exists():
            for each in range(200, 400):
                assert (place / f"{each}.jpg").read_text() == "photo"

    children = [FORK.Process(target=write, args=(0,)), FORK.Process(target=write, args=(1,))]
    children += [FORK.Process(target=read), FORK.Process(target=read)]
    for child in children:
        child.start()
    go.set()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert {path.read_text() for path in (tmp_path / "data").iterdir()} == {"photo"}


def test_the_interpreter_is_no_data() -> None:
    """It is mapped by every process, and never leaves memory: each cold run would be a lower bound."""
    code = (
        "import pathlib, sys; from everstep.dataloader.analysis.open_watch import watch_opens\n"
        "watch = watch_opens(sys.argv[1], drops=False); open(sys.executable, 'rb').close(); watch.look()\n"
        "print(*(path.read_text() for path in pathlib.Path(sys.argv[1]).glob('*.names')))"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, folder], check=True, capture_output=True, text=True
        )
    assert os.path.realpath(sys.executable) not in done.stdout.split()


def test_what_another_thread_opens_while_one_looks_is_named_by_who_opened_it(tmp_path: Path) -> None:
    """Sending a tensor, a worker's feeder thread makes files of its own: that is not native code."""
    code = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from everstep.dataloader.analysis import open_watch\n"
        "here, opened = Path(sys.argv[1]), []\n"
        "found = open_watch.open_files\n"
        "def meanwhile(known):\n"
        "    def opens():\n"
        "        opened.extend([(here / 'made').open('xb'), (here / 'data').open('rb')])\n"
        "    other = threading.Thread(target=opens)\n"
        "    other.start()\n"
        "    other.join()\n"
        "    yield from found(known)\n"
        "(here / 'data').write_bytes(b'1')\n"
        "watch = open_watch.watch_opens(sys.argv[2], drops=False)\n"
        "open_watch.open_files = meanwhile\n"
        "watch.look()\n"
    )
    names, here = tmp_path / "scratch" / "names", tmp_path / "here"
    names.mkdir(parents=True)
    here.mkdir()
    subprocess.run([sys.executable, "-P", "-c", code, here, names], check=True)
    [path] = names.iterdir()
    assert set(path.read_text().splitlines()) == {f"wrote\t{here / 'made'}", f"{here / 'data'}"}


# -- declared files ------------------------------------------------------------------------------------------------


class Declares:
    def __init__(self, files: Iterable[object]) -> None:
        self.given = files

    def get_bytes(self, index: int) -> bytes:
        raise IndexError(index)

    def files(self) -> Iterator[object]:
        yield from self.given


class Holder:
    """A dataset over a source; its own `files` is something else."""

    files = "something else"

    def __init__(self, source: object) -> None:
        self.source = source


def test_declared_files_come_from_the_sources_behind_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    found = declared_files(Holder(Holder(Declares(["/a", Path("/b"), b"/c"]))))
    assert (found.paths, found.notes) == (["/a", "/b", "/c"], [])
    assert declared_files(Holder(None)).paths == []
    wrong = declared_files(Declares(["/a", 5]))
    assert wrong.paths == []
    assert wrong.notes[0].startswith("Declares.files() raised TypeError: ")
    monkeypatch.setattr(declared, "DECLARED_MAX", 2)
    many = declared_files(Declares(map(str, itertools.count())))
    assert many.paths == ["0", "1"]
    assert many.notes == ["Declares reads more than 2 files: the rest leaves memory only when it is opened"]


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

"""`make bench-data` on a few images: each row's code runs, and counts what it says it counts."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Generator
from pathlib import Path

import analyze_rig
import cached_rows as cached_rows_module
import data as bench_data
import jpegs
import page_cache_group as page_cache_group_module
import peers_rows as peers_rows_module
import pytest
import rig as rig_module
import shared_rows as shared_rows_module
import torch
from augment import augmented
from cache_hits import measured
from cached_rows import bytes_rows, epoch_rows
from child import ChildError, child
from image_drive import ImageDrive, Part, Unbuffered, image_drive
from jpegs import PhotographsError, made
from loader_cpu import compared
from node import hook_daemon
from page_cache_group import MEMORY, PREFIX, page_cache_group
from pausing import wait_until
from peers_rows import peers_rows
from PIL import Image
from places import memory_folder
from resume_rows import resume_rows
from rig import RigError
from shared_rows import shared_rows, unbuffered
from state_rows import state_rows

from everstep.dataloader.sources import ImageFolderSource, SourceDataset

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create"
)  # workers that wait for the drive
COUNT = 96
PAGE = 4096


@pytest.fixture(autouse=True)
def own_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows set where their daemon listens; it is set back after each test."""
    monkeypatch.setenv("EVERSTEP_SOCKET", str(tmp_path / "data.sock"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two that nobody has photographed: the packages with photographs are not needed here."""
    folder, found = tmp_path_factory.mktemp("pictures"), dict[str, Path]()
    for name in ("left", "right"):
        small = Image.frombytes("RGB", (48, 40), random.Random(name).randbytes(48 * 40 * 3))
        found[name] = folder / f"{name}.png"
        small.resize((640, 480), Image.Resampling.BICUBIC).save(found[name])
    return found


@pytest.fixture(scope="module")
def images(pictures: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("images"), COUNT, sources=pictures)


@pytest.fixture
def source(images: Path, tmp_path: Path) -> ImageFolderSource:
    return ImageFolderSource(images, index=tmp_path)


@pytest.fixture
def decoded(source: ImageFolderSource) -> SourceDataset[torch.Tensor]:
    return SourceDataset(source, decode=augmented)


@pytest.fixture
def own_rig(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A place of its own, so that somebody's rig that is up stays; skipped where there can be none."""
    try:
        rig_module.groups()
    except RigError as error:
        pytest.skip(str(error))
    with memory_folder() as folder:
        monkeypatch.setattr(rig_module, "IMAGES", folder / "rig")
        monkeypatch.setattr(rig_module, "LOCK", folder / "rig.lock")
        try:
            yield folder
        finally:
            rig_module.down()  # what a test that failed has left


@pytest.fixture
def drive(own_rig: Path, images: Path, tmp_path: Path) -> Generator[ImageDrive]:
    with image_drive(images, tmp_path) as found:
        yield found


def values(rows: list[bench_data.Row]) -> dict[str, float]:
    return {row.measure: row.value for row in rows}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*.jpg"))}


def test_images_follow_from_the_seed_and_are_made_once(
    images: Path, pictures: dict[str, Path], tmp_path: Path
) -> None:
    files = contents(images)
    assert len(files) == COUNT
    assert {Path(name).parent.name for name in files} == set(pictures)
    assert len(set(files.values())) == COUNT
    again = made(tmp_path, COUNT, sources=pictures)
    assert contents(again) == files
    stamps = {path: path.stat().st_mtime_ns for path in again.glob("*/*.jpg")}
    made(tmp_path, COUNT, sources=pictures)
    assert {path: path.stat().st_mtime_ns for path in again.glob("*/*.jpg")} == stamps
    assert contents(made(tmp_path, COUNT, seed=1, sources=pictures)) != files


def test_what_an_interrupted_run_left_is_made_again(
    images: Path, pictures: dict[str, Path], tmp_path: Path
) -> None:
    half = tmp_path / images.name / "left"
    half.mkdir(parents=True)
    (half / "000000.jpg").write_bytes(b"half of an")
    assert contents(made(tmp_path, COUNT, sources=pictures)) == contents(images)


def test_without_the_packages_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpegs, "PHOTOGRAPHS", {"no-such-photographs": ("x.png",)})
    with pytest.raises(PhotographsError, match="pip install --no-deps no-such-photographs"):
        jpegs.photographs()


def test_images_are_decoded_and_augmented_at_random(source: ImageFolderSource) -> None:
    random.seed(0)
    first, second = augmented(source.get_bytes(0)), augmented(source.get_bytes(0))
    assert first.shape == (3, 224, 224)
    assert first.dtype is torch.uint8
    assert not torch.equal(first, second)


def test_a_part_has_all_classes(source: ImageFolderSource) -> None:
    part = Part(source, 10)
    assert len(part) == 10
    assert {Path(path).parent.name for path in part.files()} == {"left", "right"}
    assert part.get_bytes(9) == source.get_bytes(9 * (COUNT // 10))
    assert part.fingerprint() != Part(source, 11).fingerprint()


def test_processor_time_beside_torchs_loader(decoded: SourceDataset[torch.Tensor]) -> None:
    found = values(compared("few", decoded, batch_size=16, workers=1, pairs=1))
    assert len(found) == 5
    assert all(value > 0 for value in found.values())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_state_at_every_step(decoded: SourceDataset[torch.Tensor]) -> None:
    pytest.importorskip("torchdata")
    found = values(state_rows(decoded, batch_size=16, workers=1, pairs=1))
    assert found["everstep, without, samples per second"] > 0
    assert found["StatefulDataLoader, state at every step, samples per second"] > 0


def test_resuming_far_into_a_large_dataset() -> None:
    time_row, memory_row = resume_rows(1)
    assert time_row.value > 0
    assert memory_row.value < 50, "it holds for any machine: the order takes no memory"


def test_hits(tmp_path: Path) -> None:
    with hook_daemon(tmp_path):
        cost, rate = measured(50, 10_000, 1)
    assert cost.value > 0
    assert rate.value > 0


def test_jobs_that_share_prepare_each_batch_once(
    source: ImageFolderSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rows_module, "BATCH", 8)
    monkeypatch.setattr(shared_rows_module, "REST_S", 3.0)
    found = values(shared_rows(Part(source, COUNT), drive=None, pairs=1, jobs=[2]))
    assert found["2 jobs: preparations / separate jobs' x 2"] == 1
    assert found["2 jobs: batches prepared once more to be compared"] == 1
    assert found["2 jobs: time of separate jobs / of shared ones"] > 0


def test_predictions_of_a_simulated_drive() -> None:
    plan = analyze_rig.Plan(shares=(0.5,), workers=(1, 2), factors=(1.0,), runs=1, work=1)
    found = values(analyze_rig.measure(analyze_rig.simulated(400.0, 320), plan, None))
    assert set(found) == {
        f"prediction of 2 settings: {name}" for name in ("largest error", "error", "A/A spread")
    }


@pytest.mark.root
def test_predictions_of_a_peer(drive: ImageDrive, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BATCH": 2, "WARMUP": 2, "EPOCHS": 1, "SHARES": (0.3,)}.items():
        monkeypatch.setattr(peers_rows_module, name, value)
    found = values(peers_rows(drive, images=COUNT, runs=1))
    assert set(found) == {
        f"prediction of a peer, 1 shares: {name}"
        for name in ("largest error", "error", "error with the report's network", "A/A spread")
    }


@pytest.mark.root
def test_every_byte_that_is_read_is_the_uncached_ones(drive: ImageDrive) -> None:
    part = Part(drive.source, COUNT)
    pages = sum(-(-Path(path).stat().st_size // PAGE) * PAGE for path in part.files())
    drive.drop(part)
    before = drive.read_bytes()
    for index in range(COUNT):
        part.get_bytes(index)
    assert drive.read_bytes() - before == pages
    found = values(bytes_rows(drive))
    for share in (0.35, 0.5, 0.65):
        # The budget's end falls within some image.
        assert found[f"bytes read in an epoch / all, {share:.0%} cached"] == pytest.approx(
            1 - share, abs=3 / COUNT
        )


@pytest.mark.root
def test_reads_past_the_page_cache_are_all_counted(drive: ImageDrive) -> None:
    source = unbuffered(drive, 5)
    assert isinstance(source, Unbuffered)
    before = drive.read_bytes()
    for _ in range(3):
        assert source.get_bytes(2) == Part(drive.source, 5).get_bytes(2)
    assert drive.read_bytes() - before >= 3 * len(source.get_bytes(2))


@pytest.mark.root
def test_an_epoch_beside_a_page_cache_of_the_same_size(
    drive: ImageDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_rows_module, "SHARES", (0.5,))
    found = values(epoch_rows(drive, images=COUNT, pairs=1))
    assert found["epoch, DataLoader / ours, 50% cached"] > 0
    assert found["DataLoader's miss share of bytes, 50% cached"] <= 1.05
    assert found["ours, bytes read / all, 50% cached"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.root
def test_shared_reads_are_a_kth_of_separate_ones(drive: ImageDrive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rows_module, "BATCH", 8)
    monkeypatch.setattr(shared_rows_module, "REST_S", 3.0)
    found = values(shared_rows(unbuffered(drive, COUNT), drive=drive, pairs=1, jobs=[2]))
    assert found["2 jobs: bytes read / separate jobs' x 2"] == pytest.approx(1, abs=0.05)


@pytest.mark.root
def test_the_page_cache_of_a_group_is_held(drive: ImageDrive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache_group_module, "LEAST_BYTES", 0)  # this one takes no other memory
    part = Part(drive.source, COUNT)
    wanted = part.size_bytes() // 2
    with page_cache_group() as group, child(_read_all, part) as work:
        group.add(work.pid)
        with group.holding(wanted):
            for _ in range(2):  # who looks for the second time has set the limit
                wait_until(lambda: bool(group.held_bytes()))
            for _ in range(20):
                work.next()
            assert 0 < group.cached_bytes() <= 1.2 * wanted
    assert not list(MEMORY.rglob(f"{PREFIX}{os.getpid()}"))


def _read_all(part: Part) -> Generator[None]:
    while True:
        for index in range(len(part)):
            part.get_bytes(index)
        yield


def test_a_child_that_fails_says_why_and_leaves_nobody(tmp_path: Path) -> None:
    def fail() -> Generator[int]:
        if os.fork() == 0:  # a worker of its own
            time.sleep(60)
            os._exit(0)
        yield os.getpgid(0)
        raise ValueError("no images")

    with child(fail) as work:
        group = work.next()
        with pytest.raises(ChildError, match="no images"):
            work.next()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


@pytest.mark.root
@pytest.mark.timeout(240)
def test_a_run_that_is_told_to_end_leaves_nothing(own_rig: Path, images: Path, tmp_path: Path) -> None:
    """In the middle of an epoch on a throttled drive: no drive, no group, no process."""
    output = tmp_path / "out.json"
    run = multiprocessing.get_context("fork").Process(target=_run_epoch_rows, args=(images, tmp_path, output))
    run.start()
    pid = run.pid
    assert pid is not None
    until = time.monotonic() + 60
    while not list(MEMORY.rglob(f"{PREFIX}{pid}")):
        assert time.monotonic() < until
        assert run.is_alive()
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    run.join(100)
    assert run.exitcode == 128 + signal.SIGTERM
    run.close()
    assert not list(MEMORY.rglob(f"{PREFIX}{pid}"))
    assert not rig_module.IMAGES.exists()
    assert str(rig_module.IMAGES) not in Path("/proc/mounts").read_text()


def _run_epoch_rows(images: Path, folder: Path, output: Path) -> None:
    index = folder / "plain"
    index.mkdir()
    with bench_data.ended_by_sigterm():
        bench = bench_data.Bench(
            images=images, source=ImageFolderSource(images, index=index), pairs=50, share=1.0, folder=folder
        )
        bench_data.run(bench, ["epoch"], output)

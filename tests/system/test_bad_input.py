"""What is wrong outside gets a clear error, and what was committed before is still there and can be restored."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.checkpoint.testing import opened
from everstep.core.errors import (
    ConfigError,
    CorruptDataError,
    DaemonUnavailableError,
    DeviceMissingError,
    EverstepError,
    FormatVersionError,
    LoaderStateError,
    MemoryRefusedError,
    StateMismatchError,
    StateTypeError,
    StorageError,
    UsageError,
    VersionMismatchError,
)
from everstep.daemon.testing import daemon_process, node_daemon
from everstep.dataloader import DataLoader
from everstep.hook.run import Run

MIB = 1024**2
_seeds = itertools.count(1)
"""Each trainer begins from other weights: what it restores cannot be what it had."""
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(8.0) * (index + 1))


@dataclass
class Training:
    """A training loop in this process; `saved` are the weights of each complete checkpoint, the newest last."""

    run: Run
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[torch.Tensor]
    saved: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _batches: Iterator[torch.Tensor] | None = None

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1).clone() for parameter in self.model.parameters()])

    def step(self) -> None:
        if self._batches is None:
            self._batches = (batch for _ in self.run.epochs(1000) for batch in self.loader)
        batch = next(self._batches)
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.run.step()

    def save(self) -> str:
        """Train until one more checkpoint is complete; return its name."""
        before = self.run.report()
        while (report := self.run.report()).checkpoints_complete == before.checkpoints_complete:
            assert report.failures == before.failures
            if report.skipped != before.skipped:  # the arena is being allocated
                threading.Event().wait(0.02)
            self.attempt_to_save()
        self.saved[report.last_complete] = self.weights()
        return report.last_complete

    def attempt_to_save(self) -> None:
        self.run.checkpoint()
        self.step()
        assert self.run.wait(60)


def objects(*, count: int = 64, width: int = 8) -> dict[str, Any]:
    torch.manual_seed(next(_seeds))
    model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loader": DataLoader(Numbers(count), batch_size=4, shuffle=True),
    }


@contextlib.contextmanager
def training(
    storage: list[Path] | list[str], *, count: int = 64, width: int = 8, more: Any = None, **options: Any
) -> Generator[Training]:
    state = objects(count=count, width=width)
    extra = {} if more is None else {"more": more}
    with everstep.attach("bad", **state, **extra, storage=storage, every=10**6, **options) as run:
        made = Training(run, **state)
        yield made
    made.saved[run.report().last_complete] = made.weights()


def own_socket() -> Path:
    return Path(os.environ["EVERSTEP_SOCKET"])


@contextlib.contextmanager
def service() -> Generator[subprocess.Popen[bytes]]:
    """A private daemon of this block's own."""
    own_socket().with_name("daemon.log").unlink(missing_ok=True)
    with daemon_process(own_socket()) as process:
        yield process


def saved_run(storage: list[Path], count: int = 2, width: int = 8) -> dict[str, torch.Tensor]:
    """A run that ended well, with `count` checkpoints; its daemon is gone."""
    with service(), training(storage, width=width) as trained:
        for _ in range(count - 1):
            trained.save()
        trained.step()
    assert len(trained.saved) == count, trained.saved.keys()
    return trained.saved


def assert_restores(
    storage: list[Path] | list[str], saved: dict[str, torch.Tensor], name: str | None = None, **options: Any
) -> Any:
    """A new trainer gets the checkpoint `name`, else the newest, bit for bit; return what restore() said."""
    name = name or list(saved)[-1]
    with contextlib.ExitStack() as stack:
        if not own_socket().exists():
            stack.enter_context(service())
        trained = stack.enter_context(training(storage, **options))
        restored = trained.run.restore()
        assert restored is not None
        assert str(restored.checkpoint) == name
        assert torch.equal(trained.weights(), saved[name])
        return restored


@contextlib.contextmanager
def refused(kind: type[EverstepError], *parts: object, hint: str) -> Generator[None]:
    """The error is of exactly this class, its message holds all parts, its hint says what to do."""
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    for part in parts:
        assert str(part) in caught.value.message
    assert hint in caught.value.hint


@pytest.fixture
def storage(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "d0", tmp_path / "d1"]
    for path in paths:
        path.mkdir()
    return paths


def segments(device: Path, checkpoint: str) -> list[Path]:
    """The files of a checkpoint on a device, by the generation that its manifest names."""
    from everstep.core.ids import CheckpointId

    with opened([device.parent / "d0", device.parent / "d1"], read_only=True) as (store, _):
        (run,) = store.runs()
        record = run.shard(CheckpointId.parse(checkpoint), 0)
        return sorted(device.glob(f"runs/*/*/data/{record.generation}/*.safetensors"))


def manifests(storage: list[Path], checkpoint: str) -> list[Path]:
    found = [path for device in storage for path in device.glob(f"runs/*/*/commits/{checkpoint}.0.mf")]
    assert len(found) == len(storage)
    return found


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def truncate(path: Path, to: float = 0.5) -> None:
    os.truncate(path, int(path.stat().st_size * to))


class TestDirectories:
    def test_a_missing_one_is_named(self, storage: list[Path], tmp_path: Path) -> None:
        saved = saved_run(storage)
        with (
            service(),
            refused(
                ConfigError, tmp_path / "nowhere", "does not exist", hint="create it, or mount the drive"
            ),
            training([*storage, tmp_path / "nowhere"]),
        ):
            pass
        assert not (tmp_path / "nowhere").exists()
        assert_restores(storage, saved)

    def test_a_file_is_no_directory(self, storage: list[Path], tmp_path: Path) -> None:
        saved = saved_run(storage)
        (tmp_path / "file").write_text("mine")
        with (
            service(),
            refused(ConfigError, tmp_path / "file", "is no directory", hint="name a directory"),
            training([*storage, tmp_path / "file"]),
        ):
            pass
        assert (tmp_path / "file").read_text() == "mine"
        assert_restores(storage, saved)

    def test_the_same_one_twice_is_refused(self, storage: list[Path], tmp_path: Path) -> None:
        saved = saved_run(storage)
        (tmp_path / "link").symlink_to(storage[0])
        with (
            service(),
            refused(ConfigError, storage[0], "the same directory", hint="name each drive once"),
            training([*storage, tmp_path / "link"]),
        ):
            pass
        assert_restores(storage, saved)

    def test_two_on_one_file_system_are_allowed_and_said(
        self, storage: list[Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        saved_run(storage)
        (said,) = [
            record.getMessage() for record in caplog.records if "one file system" in record.getMessage()
        ]
        assert f"{storage[0]} and {storage[1]} are on one file system" in said

    def test_devices_of_two_stores_are_refused(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            for device in ("d0", "d1"):
                (tmp_path / name / device).mkdir(parents=True)
        first = [tmp_path / "a" / "d0", tmp_path / "a" / "d1"]
        second = [tmp_path / "b" / "d0", tmp_path / "b" / "d1"]
        saved, others = saved_run(first), saved_run(second)
        with (
            service(),
            refused(ConfigError, first[0], second[0], "store", hint="directories of one store"),
            training([first[0], second[0]]),
        ):
            pass
        assert_restores(first, saved)
        assert_restores(second, others)

    def test_an_empty_directory_in_place_of_a_device_is_missing_not_new(
        self, storage: list[Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        saved = saved_run(storage)
        storage[1].rename(storage[1].with_name("unmounted"))
        storage[1].mkdir()
        with service(), contextlib.suppress(CorruptDataError), training(storage) as trained:
            with refused(
                CorruptDataError, "can be restored", f"{storage[1]} (missing)", hint="mount missing devices"
            ):
                trained.run.restore()
            raise CorruptDataError("leave without a last boundary")
        assert not list(storage[1].iterdir())
        storage[1].rmdir()
        storage[1].with_name("unmounted").rename(storage[1])
        assert_restores(storage, saved)

    def test_a_degraded_store_says_so(self, storage: list[Path], caplog: pytest.LogCaptureFixture) -> None:
        saved_run(storage)
        storage[1].rename(storage[1].with_name("unmounted"))
        with service(), training(storage, fresh=True) as trained:
            trained.save()
        assert any(
            f"{storage[1]}" in record.getMessage() and "missing" in record.getMessage()
            for record in caplog.records
        )

    def test_while_a_device_is_missing_a_fresh_run_deletes_nothing(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        before = set(storage[0].rglob("*.safetensors"))
        storage[1].rename(storage[1].with_name("unmounted"))
        storage[1].mkdir()
        with service(), training(storage, fresh=True) as trained:
            for _ in range(5):
                trained.save()
        assert before <= set(storage[0].rglob("*.safetensors"))
        assert not list(storage[1].iterdir())
        storage[1].rmdir()
        storage[1].with_name("unmounted").rename(storage[1])
        assert_restores(storage, saved | trained.saved)

    def test_an_unknown_empty_directory_beside_a_missing_device_is_no_new_device(
        self, storage: list[Path], tmp_path: Path
    ) -> None:
        saved = saved_run(storage)
        (tmp_path / "other").mkdir()
        with (
            service(),
            refused(
                DeviceMissingError,
                storage[1],
                "is missing",
                tmp_path / "other",
                "empty",
                hint="unmounted drive",
            ),
            training([storage[0], tmp_path / "other"]),
        ):
            pass
        assert not list((tmp_path / "other").iterdir())
        assert_restores(storage, saved)

    def test_a_device_whose_disk_id_is_lost_is_not_made_anew(self, tmp_path: Path) -> None:
        (tmp_path / "d0").mkdir()
        saved = saved_run([tmp_path / "d0"])
        content = (tmp_path / "d0" / "disk.id").read_bytes()
        (tmp_path / "d0" / "disk.id").unlink()
        with (
            service(),
            refused(CorruptDataError, tmp_path / "d0", "disk.id is lost", hint="put disk.id back"),
            training([tmp_path / "d0"]),
        ):
            pass
        (tmp_path / "d0" / "disk.id").write_bytes(content)
        assert_restores([tmp_path / "d0"], saved)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB, of its own."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=0700", "everstep-test", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.root
class TestFileSystems:
    def test_a_read_only_one_is_named(self, small_disk: Path) -> None:
        (small_disk / "d").mkdir()
        saved = saved_run([small_disk / "d"])
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        with (
            service(),
            refused(StorageError, small_disk / "d", "Read-only file system", hint="is read-only"),
            training([small_disk / "d"]),
        ):
            pass
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        assert_restores([small_disk / "d"], saved)

    def test_an_empty_read_only_directory_is_named(self, small_disk: Path) -> None:
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        with (
            service(),
            refused(StorageError, small_disk, "Read-only file system", hint="is read-only"),
            training([small_disk]),
        ):
            pass

    def test_when_one_is_full_training_goes_on_and_older_checkpoints_stay(
        self, small_disk: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (small_disk / "d").mkdir()
        filler = small_disk / "filler"
        with service(), training([small_disk / "d"], width=40_000) as trained:
            first = trained.save()
            free = os.statvfs(small_disk)
            filler.write_bytes(bytes(free.f_bavail * free.f_frsize - 16 * MIB))
            files = {path: path.stat().st_size for path in small_disk.rglob("*.safetensors")}
            trained.attempt_to_save()
            trained.step()
            report = trained.run.report()
            (reason,) = report.failures
            assert f"{small_disk / 'd'} has room for 0 bytes" in reason
            assert any("checkpoint_failed" in record.getMessage() for record in caplog.records)
            assert report.last_complete == first
            assert {path: path.stat().st_size for path in small_disk.rglob("*.safetensors")} == files
            filler.unlink()
            trained.save()
        assert_restores([small_disk / "d"], trained.saved, width=40_000)

    @pytest.mark.xfail(strict=True, reason="Run.on_event hands on PersistFailed.message without its hint")
    def test_a_failure_says_what_to_do(self, small_disk: Path) -> None:
        with service(), training([small_disk], width=40_000) as trained:
            trained.save()
            free = os.statvfs(small_disk)
            (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - 16 * MIB))
            trained.attempt_to_save()
            (reason,) = trained.run.report().failures
        assert "free space there" in reason

    def test_a_last_checkpoint_that_does_not_fit_is_reported_and_the_older_is_restored(
        self, small_disk: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (small_disk / "d").mkdir()
        with service(), training([small_disk / "d"], width=40_000) as trained:
            first = trained.save()
            weights = trained.weights()
            free = os.statvfs(small_disk)
            (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - 16 * MIB))
            trained.step()
        assert len(trained.run.report().failures) == 1
        (small_disk / "filler").unlink()
        assert_restores([small_disk / "d"], {first: weights}, width=40_000)


class Hookless:
    """Looks like an optimizer and has no hooks."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, object]] = []

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


class Holder:
    """An object with any state."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


class TestObjects:
    @pytest.mark.parametrize(
        ("more", "kind", "words", "hint"),
        [
            (Hookless(), UsageError, "Hookless, which is no torch.optim.Optimizer", "torch.optim.Optimizer"),
            (object(), StateTypeError, "more is a builtins.object, which cannot be saved", "state_dict()"),
            ([nn.Linear(1, 1)], StateTypeError, "more is a builtins.list", "its own keyword"),
            (torch.zeros(1), StateTypeError, "more is a torch.Tensor", "buffer"),
        ],
    )
    def test_what_cannot_be_saved_is_refused_by_attach(
        self, storage: list[Path], more: object, kind: type[EverstepError], words: str, hint: str
    ) -> None:
        saved = saved_run(storage)
        with service():
            with refused(kind, words, hint=hint), training(storage, more=more):
                pass
            assert_restores(storage, saved)

    @pytest.mark.parametrize(
        ("state", "path"),
        [
            ({"a": {"b": [1, (2, print)]}}, "more.a.b[1][1]"),
            ({"a": {1: Hookless()}}, "more.a[1]"),
            ({"k": {object(): 1}}, "more.k"),
        ],
    )
    def test_a_value_that_cannot_be_saved_is_named_by_its_path(
        self, storage: list[Path], state: object, path: str
    ) -> None:
        saved = saved_run(storage)
        with (
            service(),
            pytest.raises(StateTypeError) as caught,
            training(storage, more=Holder(state)) as trained,
        ):
            trained.step()
        assert path in caught.value.message
        assert caught.value.hint
        assert_restores(storage, saved)

    def test_a_model_of_another_shape_is_refused_and_nothing_changes(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        with service(), contextlib.suppress(KeyboardInterrupt), training(storage, width=9) as trained:
            before = trained.weights()
            with refused(StateMismatchError, "model", "0.weight", hint=""):
                trained.run.restore()
            assert torch.equal(trained.weights(), before)
            raise KeyboardInterrupt
        assert_restores(storage, saved)


class TestDamage:
    @pytest.mark.parametrize("device", [0, 1])
    def test_a_changed_segment_is_named_with_its_block_and_the_older_one_is_restored(
        self, storage: list[Path], device: int
    ) -> None:
        saved = saved_run(storage)
        older, newest = saved
        (path,) = segments(storage[device], newest)
        flip(path, path.stat().st_size - 1)
        (skipped,) = assert_restores(storage, saved, older).skipped
        assert skipped.startswith(f"{newest}: ")
        assert str(path) in skipped
        assert "block 0" in skipped

    def test_the_block_that_changed_is_named(self, storage: list[Path]) -> None:
        saved = saved_run(storage, width=400_000)
        older, newest = saved
        (path,) = segments(storage[0], newest)
        assert path.stat().st_size > 12 * MIB
        flip(path, 9 * MIB)
        (skipped,) = assert_restores(storage, saved, older, width=400_000).skipped
        assert f"block 2 of {path}" in skipped or (str(path) in skipped and "block 2" in skipped)

    @pytest.mark.parametrize("damage", [truncate, Path.unlink], ids=["truncated", "removed"])
    def test_a_segment_that_is_not_whole_is_named(
        self, storage: list[Path], damage: Callable[[Path], None]
    ) -> None:
        saved = saved_run(storage)
        older, newest = saved
        (path,) = segments(storage[1], newest)
        damage(path)
        (skipped,) = assert_restores(storage, saved, older).skipped
        assert skipped.startswith(f"{newest}: ")
        assert str(path) in skipped

    @pytest.mark.parametrize("damage", [truncate, lambda path: flip(path, 100)], ids=["truncated", "changed"])
    def test_one_bad_copy_of_a_manifest_is_mended(
        self, storage: list[Path], damage: Callable[[Path], None]
    ) -> None:
        saved = saved_run(storage)
        path = manifests(storage, list(saved)[-1])[0]
        content = path.read_bytes()
        damage(path)
        assert assert_restores(storage, saved).skipped == ()
        assert path.read_bytes() == content
        assert list((storage[0] / "quarantine").iterdir())

    @pytest.mark.parametrize("damage", [truncate, lambda path: flip(path, 100)], ids=["truncated", "changed"])
    def test_a_manifest_without_a_whole_copy_is_put_aside_and_the_older_one_restored(
        self, storage: list[Path], damage: Callable[[Path], None]
    ) -> None:
        saved = saved_run(storage)
        older, newest = saved
        for path in manifests(storage, newest):
            damage(path)
        assert_restores(storage, saved, older)
        for device in storage:
            (put_aside,) = (device / "quarantine").iterdir()
            assert f"{newest}.0.mf" in put_aside.name

    @pytest.mark.xfail(
        strict=True, reason="Restored.skipped does not name a checkpoint whose manifest is lost"
    )
    def test_a_checkpoint_whose_manifest_is_lost_is_among_those_skipped(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        older, newest = saved
        for path in manifests(storage, newest):
            flip(path, 100)
        (skipped,) = assert_restores(storage, saved, older).skipped
        assert skipped.startswith(f"{newest}: ")
        assert f"{newest}.0.mf" in skipped

    def test_when_all_are_damaged_nothing_is_changed_and_fresh_starts_anew(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        for name in saved:
            (path,) = segments(storage[0], name)
            flip(path, path.stat().st_size - 1)
        with service():
            with contextlib.suppress(KeyboardInterrupt), training(storage) as trained:
                before = trained.weights()
                with refused(CorruptDataError, "none of the 2 checkpoints", *saved, hint="fresh=True"):
                    trained.run.restore()
                assert torch.equal(trained.weights(), before)
                raise KeyboardInterrupt
            with training(storage, fresh=True) as fresh:
                assert fresh.run.restore() is None
                fresh.save()
        assert_restores(storage, fresh.saved)

    def test_an_abandoned_branch_stays_abandoned(self, storage: list[Path]) -> None:
        """The restart after a restore of an older step goes on from the newest attempt, not from the largest step."""
        with service(), training(storage) as trained:
            older = trained.save()
            for _ in range(60):
                trained.step()
            newest = trained.save()
        last = list(trained.saved)[-1]
        for name in {newest, last}:
            (path,) = segments(storage[0], name)
            flip(path, path.stat().st_size - 1)
        with service(), training(storage) as again:
            restored = again.run.restore()
            assert restored is not None
            assert str(restored.checkpoint) == older
            branch = again.save()
        assert branch.startswith("2.")
        assert int(branch.split(".")[1]) < int(newest.split(".")[1])
        assert_restores(storage, again.saved)


class TestNewerFormat:
    @staticmethod
    def raise_version(path: Path) -> bytes:
        content = path.read_bytes()
        document = json.loads(content)
        path.write_text(json.dumps(document | {"format": 2}))
        return content

    def test_of_disk_id(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        path = storage[1] / "disk.id"
        content = self.raise_version(path)
        with (
            service(),
            refused(FormatVersionError, path, "format version 2", "up to 1", hint="upgrade everstep"),
            training(storage),
        ):
            pass
        path.write_bytes(content)
        assert_restores(storage, saved)

    @pytest.mark.parametrize("name", ["run.json", "floor.json", "attempts/1"])
    def test_of_a_runs_file(self, storage: list[Path], name: str) -> None:
        saved = saved_run(storage)
        (path,) = storage[1].glob(f"runs/*/*/{name}")
        content = self.raise_version(path)
        with (
            service(),
            refused(FormatVersionError, path, "format version 2", "up to 1", hint="upgrade everstep"),
            training(storage),
        ):
            pass
        path.write_bytes(content)
        assert_restores(storage, saved)

    def test_of_a_manifest_it_stays_and_the_older_one_is_restored(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        older, newest = saved
        content = {path: newer_manifest(path.read_bytes()) for path in manifests(storage, newest)}
        for path, newer in content.items():
            path.write_bytes(newer)
        data = {path for device in storage for path in segments(device, older)}
        everything = {path for device in storage for path in device.rglob("*.safetensors")}
        assert_restores(storage, saved, older)
        assert {path: path.read_bytes() for path in content} == content
        assert data < everything <= {path for device in storage for path in device.rglob("*.safetensors")}

    @pytest.mark.xfail(strict=True, reason="Restored.skipped does not name a checkpoint of a newer format")
    def test_of_a_manifest_it_is_among_those_skipped(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        older, newest = saved
        for path in manifests(storage, newest):
            path.write_bytes(newer_manifest(path.read_bytes()))
        (skipped,) = assert_restores(storage, saved, older).skipped
        assert skipped.startswith(f"{newest}: ")
        assert "format version 2" in skipped


def newer_manifest(content: bytes) -> bytes:
    """The same manifest as a newer everstep would have framed it: the version follows the magic."""
    return content[:8] + bytes([2]) + content[9:]


class TestLoaders:
    def test_another_dataset_is_refused_by_fingerprint_and_nothing_changes(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        with service(), contextlib.suppress(KeyboardInterrupt), training(storage, count=65) as trained:
            before = trained.weights()
            with refused(LoaderStateError, "'Numbers' of 64 samples", "of 65", hint="give the dataset"):
                trained.run.restore()
            assert torch.equal(trained.weights(), before)
            raise KeyboardInterrupt
        assert_restores(storage, saved)

    def test_after_iteration_began_nothing_is_restored(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        with service(), contextlib.suppress(KeyboardInterrupt), training(storage) as trained:
            before = trained.weights()
            batches = iter(trained.loader)
            next(batches)
            with refused(LoaderStateError, "iteration has begun", hint="before the first iter()"):
                trained.run.restore()
            assert torch.equal(trained.weights(), before)
            raise KeyboardInterrupt
        assert_restores(storage, saved)

    def test_after_training_began_nothing_is_restored(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        with service(), contextlib.suppress(KeyboardInterrupt), training(storage) as trained:
            trained.step()
            with refused(UsageError, "restore() comes once", hint="attach, restore, then train"):
                trained.run.restore()
            raise KeyboardInterrupt
        assert_restores(storage, saved)


class TestDaemons:
    def test_of_another_protocol(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        other = (
            "import everstep.proto.frames as frames; frames.PROTOCOL = 7\n"
            "import sys; from everstep.daemon.main import private_main; sys.exit(private_main())"
        )
        log = own_socket().with_name("daemon.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", other, "--private", "--socket", own_socket()], stderr=output
            )
        try:
            while b"daemon_ready" not in log.read_bytes():
                assert process.poll() is None, log.read_text()
            with (
                refused(
                    VersionMismatchError,
                    "speaks protocol 7",
                    "1",
                    process.pid,
                    hint="one version of everstep",
                ),
                training(storage),
            ):
                pass
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
        assert_restores(storage, saved)

    def test_a_stale_socket_file_is_no_daemon(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(own_socket()))
        with service():
            assert_restores(storage, saved)

    def test_one_that_ends_at_once_is_said_with_its_log(
        self, storage: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved = saved_run(storage)
        with monkeypatch.context() as patch:
            patch.setenv("EVERSTEP_LINGER_S", "long")
            with (
                refused(
                    DaemonUnavailableError, "ended at once", "EVERSTEP_LINGER_S='long'", hint="daemon.log"
                ),
                training(storage),
            ):
                pass
        assert_restores(storage, saved)

    def test_a_directory_open_to_others_is_refused(
        self, storage: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        saved = saved_run(storage)
        (tmp_path / "open").mkdir(mode=0o755)
        with monkeypatch.context() as patch:
            patch.setenv("EVERSTEP_SOCKET", str(tmp_path / "open" / "data.sock"))
            with refused(ConfigError, tmp_path / "open", "755", hint="chmod 700"), training(storage):
                pass
        assert_restores(storage, saved)

    def test_devices_held_by_another_one_in_use_are_named_with_its_holder(
        self, storage: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from everstep.core.errors import DeviceLockedError

        with service() as first, training(storage) as trained:
            trained.save()
            with (
                monkeypatch.context() as patch,
                daemon_process(tmp_path / "s" / "data.sock"),
            ):
                patch.setenv("EVERSTEP_SOCKET", str(tmp_path / "s" / "data.sock"))
                with (
                    refused(DeviceLockedError, storage[0], f"pid {first.pid}", hint="use that daemon"),
                    training(storage),
                ):
                    pass
            trained.save()
        assert_restores(storage, trained.saved)


@contextlib.contextmanager
def node(storage: list[Path], memory: str) -> Generator[list[str]]:
    """A node daemon over the directories; gives the names of its devices."""
    config = storage[0].with_name("node.toml")
    own_socket().with_name("daemon.log").unlink(missing_ok=True)
    devices = "".join(f'nvme{number} = "{path}"\n' for number, path in enumerate(storage))
    config.write_text(f'[daemon]\nsocket = "{own_socket()}"\n[memory]\n{memory}\n[devices]\n{devices}')
    with node_daemon(config, own_socket()):
        yield [f"nvme{number}" for number in range(len(storage))]


class TestMemory:
    @pytest.mark.parametrize(
        ("memory", "words"),
        [
            ("arena_max_bytes = 4096", "above what the daemon's budget has left (0 MiB)"),
            (f"reserve_bytes = {2**50}", "/proc/meminfo has"),
        ],
        ids=["budget", "node"],
    )
    def test_without_room_for_an_arena_training_goes_on_and_the_report_says_why(
        self, storage: list[Path], memory: str, words: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        saved = saved_run(storage)
        with node(storage, memory) as names:
            with training(names, fresh=True) as trained:
                for _ in range(3):
                    trained.run.checkpoint()
                    trained.step()
                while not any(words in reason for reason in trained.run.report().skipped):
                    trained.run.checkpoint()
                    trained.step()
                report = trained.run.report()
            assert report.checkpoints_complete == 0
            assert report.failures == ()
            assert any(
                "checkpoint_skipped" in record.getMessage() and words in record.getMessage()
                for record in caplog.records
            )
        with opened(storage, read_only=True) as (store, _):
            (run,) = store.runs()
            assert {str(info.checkpoint) for info in run.checkpoints()} == set(saved)

    def test_without_room_to_restore_it_says_so_and_restores_later(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        with (
            node(storage, "arena_max_bytes = 4096") as names,
            contextlib.suppress(KeyboardInterrupt),
            training(names) as trained,
        ):
            before = trained.weights()
            with refused(MemoryRefusedError, "an arena of", "budget", hint="memory.arena_max_bytes"):
                trained.run.restore()
            assert torch.equal(trained.weights(), before)
            raise KeyboardInterrupt
        assert_restores(storage, saved)

    @pytest.mark.root
    def test_the_limit_of_a_cgroup_is_named(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        group = Path(f"/sys/fs/cgroup/memory/everstep-test-{os.getpid()}")
        if not group.parent.is_dir():
            pytest.skip("needs cgroup v1's memory controller at /sys/fs/cgroup/memory")
        group.mkdir()
        try:
            (group / "memory.limit_in_bytes").write_text(str(1024 * MIB))
            with service() as daemon, training(storage, fresh=True) as trained:
                (group / "cgroup.procs").write_text(str(daemon.pid))
                trained.step()
                while not any(str(group) in reason for reason in trained.run.report().skipped):
                    trained.run.checkpoint()
                    trained.step()
        finally:
            group.rmdir()
        with opened(storage, read_only=True) as (store, _):
            (run,) = store.runs()
            assert {str(info.checkpoint) for info in run.checkpoints()} == set(saved)


@pytest.mark.root
def test_a_dev_shm_of_64_mib_is_enough(storage: list[Path]) -> None:
    """A container's usual size; state, arena and loader workers take no part of it that grows with the state."""
    script = [sys.executable, "-P", str(SCRIPTS / "wide_train.py"), "--storage", *map(str, storage)]
    line = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", line, "sh", *script]
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert first.returncode == 0, first.stderr[-3000:]
    said = json.loads(first.stdout.splitlines()[-1])
    assert said["shm_mib"] == 64
    assert said["state_mib"] > 64
    assert said["failures"] == []
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert again.returncode == 0, again.stderr[-3000:]
    told = json.loads(again.stdout.splitlines()[-1])
    assert told["restored"] == said["complete"]
    assert told["first_digest"] == said["last_digest"]

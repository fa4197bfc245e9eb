"""What is wrong outside gets a clear error, and what was committed before is still there and can be restored."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import (
    assert_restores,
    flip,
    manifests,
    own_socket,
    refused,
    saved_run,
    segments,
    service,
    training,
    truncate,
)
from pausing import wait_until
from torch import nn

import everstep
from everstep.core.errors import (
    ConfigError,
    CorruptDataError,
    DaemonUnavailableError,
    DeviceMissingError,
    EverstepError,
    FormatVersionError,
    LoaderStateError,
    StateMismatchError,
    StateTypeError,
    StorageError,
    UsageError,
    VersionMismatchError,
)
from everstep.daemon.testing import daemon_process
from everstep.proto.frames import PROTOCOL

MIB = 1024**2
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def storage(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "d0", tmp_path / "d1"]
    for path in paths:
        path.mkdir()
    return paths


@pytest.mark.parametrize(
    ("argument", "value", "said", "hint"),
    [
        ("every", 0, "every=0", "at least 1"),
        ("slots", 1, "slots=1", "2 to 64"),
        ("keep", 3, "keep=3", "everstep.Keep"),
        ("storage", [], "storage=[] is empty", "name at least one directory"),
        ("storage", "", "storage='' is empty", "name at least one directory"),
        ("storage", 5, "storage=5", "a path or several"),
        ("storage", b"/tmp", "storage=b'/tmp'", "a path or several"),
        ("name", 5, "the run is named 5", "a str"),
        ("every", True, "every=True", "an int of at least 1"),
        ("every", 100.0, "every=100.0", "an int of at least 1"),
        ("every", float("nan"), "every=nan", "an int of at least 1"),
        ("every", "3", "every='3'", "an int of at least 1"),
        ("slots", 2.0, "slots=2.0", "2 to 64"),
        ("slots", True, "slots=True", "2 to 64"),
        ("preemption", 3, "preemption=3", "everstep.Preemption("),
        ("name", "", "''", "choose another name"),
        ("everstep", nn.Linear(1, 1), "'everstep'", "use another keyword"),
    ],
)
def test_a_bad_argument_of_attach_is_named(
    storage: list[Path], argument: str, value: Any, said: str, hint: str
) -> None:
    arguments: dict[str, Any] = {"name": "x", "storage": storage, "every": 1, "model": nn.Linear(1, 1)}
    with refused(UsageError, said, hint=hint):
        everstep.attach(**(arguments | {argument: value}))
    assert not any(list(path.iterdir()) for path in storage)


def test_directories_may_come_from_whatever_yields_them(storage: list[Path]) -> None:
    """As of `Path.glob()`."""
    attach: Any = everstep.attach
    with service(), attach("x", model=nn.Linear(1, 1), storage=(path for path in storage)) as run:
        run.step()
    assert all(list(path.iterdir()) for path in storage)


def test_objects_without_their_names_are_refused(storage: list[Path]) -> None:
    attach: Any = everstep.attach
    with refused(UsageError, "without a name: Linear, int", hint="attach('x', model=model"):
        attach("x", nn.Linear(1, 1), 3, storage=storage)


def frames_of(error: BaseException) -> list[str]:
    return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]


def test_errors_of_attach_and_restore_come_without_the_way_inside(storage: list[Path]) -> None:
    with pytest.raises(ConfigError) as caught, service():
        everstep.attach("x", model=nn.Linear(1, 1), storage=[storage[0] / "absent"])
    assert frames_of(caught.value) == [Path(__file__).name, "plain_errors.py"]
    assert "concurrent" not in "".join(traceback.format_exception(caught.value))
    saved_run(storage)
    with service(), training(storage, width=9) as trained:
        with pytest.raises(StateMismatchError) as caught:
            trained.run.restore()
        assert frames_of(caught.value)[-1] == "plain_errors.py"
        assert "ranks.py" not in "".join(traceback.format_exception(caught.value))


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

    def test_one_that_is_too_small_is_said_once_and_not_with_each_checkpoint(
        self, small_disk: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (small_disk / "d").mkdir()
        (small_disk / "filler").write_bytes(bytes(28 * MIB))
        with (
            service(),
            contextlib.suppress(KeyboardInterrupt),
            training([small_disk / "d"], width=40_000) as trained,
        ):
            wait_until(lambda: trained.attempt_to_save() or len(trained.run.report().failures) >= 11)
            notes = [note for note in trained.run.report().notes if "too small for this state" in note]
            logged = [text for text in caplog.messages if "too small for this state" in text]
            failed = [text for text in caplog.messages if text.startswith("checkpoint_failed")]
            assert (len(notes), len(logged), len(failed)) == (1, 1, 2)
            assert f"{small_disk / 'd'}: too small for this state: a checkpoint takes 5.2 MiB, 4" in notes[0]
            assert "MiB are free. None can be written: free space there, or add a directory" in notes[0]
            assert failed[1].endswith("(as the 9 before it)")
            assert "11 x 1." in str(trained.run.report())
            raise KeyboardInterrupt

    def test_one_with_room_is_not_said_to_be_too_small(
        self, small_disk: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (small_disk / "d").mkdir()
        (small_disk / "filler").write_bytes(bytes(20 * MIB))
        with service(), training([small_disk / "d"], width=40_000) as trained:
            trained.save()
        assert "too small" not in caplog.text

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
            assert "16.0 MiB of each file system stay free" in reason
            assert any("checkpoint_failed" in record.getMessage() for record in caplog.records)
            assert report.last_complete == first
            assert {path: path.stat().st_size for path in small_disk.rglob("*.safetensors")} == files
            filler.unlink()
            trained.save()
        assert_restores([small_disk / "d"], trained.saved, width=40_000)

    def test_that_there_is_no_room_is_said_at_once(
        self, small_disk: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (small_disk / "d").mkdir()
        free = os.statvfs(small_disk)
        (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - 16 * MIB))
        with service(), training([small_disk / "d"]):
            pass
        said = f"{small_disk / 'd'} has no room"
        assert any(said in record.getMessage() for record in caplog.records)

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
            (3.5, StateTypeError, "more is a builtins.float", "run.log(more=3.5)"),
            ("text", StateTypeError, "more is a builtins.str", "an object with state_dict()"),
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
            with refused(StateMismatchError, "model", "0.weight", hint="fresh=True"):
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
        written = [
            path for device in storage for path in segments(device, newest)
        ]  # where, is for the speeds to say
        path = max(written, key=lambda path: path.stat().st_size)
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

    def test_an_older_one_that_is_not_whole_was_not_skipped(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        (path,) = segments(storage[1], next(iter(saved)))
        truncate(path)
        assert assert_restores(storage, saved).skipped == ()

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

    def test_a_checkpoint_whose_manifest_is_lost_is_among_those_skipped(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        older, newest = saved
        for path in manifests(storage, newest):
            flip(path, 100)
        (skipped,) = assert_restores(storage, saved, older).skipped
        assert skipped.startswith(f"{newest}: ")
        assert f"{newest}.0.mf" in skipped

    def test_when_all_are_damaged_no_step_is_taken_from_a_mixture_and_fresh_starts_anew(
        self, storage: list[Path]
    ) -> None:
        """Damaged where only weights lie: what is compared before anything is written can be read."""
        saved = saved_run(storage, width=400_000)
        for name in saved:
            paths = [path for device in storage for path in segments(device, name)]
            flip(max(paths, key=lambda path: path.stat().st_size), 9 * MIB)
        with service():
            with contextlib.suppress(KeyboardInterrupt), training(storage, width=400_000) as trained:
                with refused(CorruptDataError, "none of the 2 checkpoints", *saved, hint="fresh=True"):
                    trained.run.restore()
                with refused(CorruptDataError, "hold parts of a checkpoint", hint="new process"):
                    trained.run.step()
                raise KeyboardInterrupt
            with training(storage, width=400_000, fresh=True) as fresh:
                assert fresh.run.restore() is None
                fresh.save()
        assert_restores(storage, fresh.saved, width=400_000)

    def test_an_object_that_refuses_its_part_leaves_nothing_to_train_on(self, storage: list[Path]) -> None:
        """The others may hold theirs by then."""

        class Refuses:
            def state_dict(self) -> dict[str, int]:
                return {"known": 1}

            def load_state_dict(self, _: dict[str, int]) -> None:
                raise LookupError("made for another version")

        with service():
            with training(storage, more=Refuses()) as trained:
                trained.save()
            with contextlib.suppress(KeyboardInterrupt), training(storage, more=Refuses()) as again:
                with refused(
                    StateMismatchError, "'more'", "LookupError: made for another version", hint="fresh=True"
                ):
                    again.run.restore()
                with refused(CorruptDataError, "hold parts of a checkpoint", hint="new process"):
                    again.run.step()
                raise KeyboardInterrupt

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
    def raise_version(path: Path, version: int = 2) -> bytes:
        content = path.read_bytes()
        document = json.loads(content)
        path.write_text(json.dumps(document | {"format": version}))
        return content

    def test_of_disk_id(self, storage: list[Path]) -> None:
        saved = saved_run(storage)
        path = storage[1] / "disk.id"
        content = self.raise_version(path, 3)
        with (
            service(),
            refused(FormatVersionError, path, "format version 3", "up to 2", hint="upgrade everstep"),
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
            "import everstep.proto.frames as frames; frames.PROTOCOL += 1\n"
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
                    f"speaks protocol {PROTOCOL + 1}",
                    "1",
                    process.pid,
                    hint="one version of everstep",
                ),
                training(storage),
            ):
                pass
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
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
                    DaemonUnavailableError,
                    "ended at once",
                    "EVERSTEP_LINGER_S: daemon.linger_s is 'long'",
                    hint="daemon.log",
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

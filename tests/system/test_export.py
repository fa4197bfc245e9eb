"""Exports read by the tools that they are for, and compared bit by bit with what was in memory."""

import json
import os
import signal
import subprocess
import sys
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import kinds_of_state
import pytest
import torch
from in_process import service, training
from pausing import SCRIPTS, Pause, Phase
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from everstep.hook.state_testing import bits
from everstep.hook.trainer_testing import end_daemon

Saved = tuple[dict[str, Any], list[Path]]
EVERSTEP = Path(sys.executable).with_name("everstep")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A trained state and the store that holds it; its daemon is gone."""
    folder = tmp_path_factory.mktemp("saved")
    storage = [folder / "d0", folder / "d1"]
    for path in storage:
        path.mkdir()
    state = kinds_of_state.make()
    kinds_of_state.train(state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERSTEP_SOCKET", str(folder / "s" / "data.sock"))
        kinds_of_state.save("kinds", storage, state)
        end_daemon()
    return state, storage


def tool(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [EVERSTEP, *arguments, "--json"], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == code, done
    return json.loads(done.stdout)


def export(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    return tool("export", *arguments, code=code)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


class TestTorch:
    def test_objects_load_what_torch_load_gives(self, saved: Saved, tmp_path: Path) -> None:
        state, storage = saved
        made = export("kinds", tmp_path / "out", "--to", "torch", "--storage", *storage)
        assert made["left_out"] == []
        for use_mmap in (False, True):
            loaded = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True, mmap=use_mmap)
            fresh = kinds_of_state.make(1)
            fresh["model"].load_state_dict(loaded["model"])
            fresh["optimizer"].load_state_dict(loaded["optimizer"])
            fresh["schedule"].load_state_dict(loaded["schedule"])
            fresh["draws"].set_state(loaded["draws"])
            wanted = state["model"].state_dict()
            assert loaded["model"].keys() == wanted.keys()
            for name, tensor in fresh["model"].state_dict().items():
                if isinstance(tensor, torch.Tensor):
                    assert same(tensor, wanted[name]), name
            assert loaded["model"]["_extra_state"] == {"version": 3, "ids": (1, 2)}
            assert_same_optimizer(fresh["optimizer"].state_dict(), state["optimizer"].state_dict())
            assert fresh["schedule"].state_dict() == state["schedule"].state_dict()
            assert torch.equal(fresh["draws"].get_state(), state["draws"].get_state())

    def test_memory_is_shared_and_strided_as_it_was(self, saved: Saved, tmp_path: Path) -> None:
        _, storage = saved
        export("kinds", tmp_path / "out", "--to", "torch", "--storage", *storage)
        model = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["model"]
        assert model["embed.weight"].data_ptr() == model["head.weight"].data_ptr()
        assert model["conv.weight"].is_contiguous(memory_format=torch.channels_last)

    def test_values_are_plain(self, saved: Saved, tmp_path: Path) -> None:
        state, storage = saved
        made = export("kinds", tmp_path / "out", "--to", "torch", "--storage", *storage)
        loaded = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
        notes, wanted = loaded["notes"], state["notes"].state
        assert (notes["last"], notes["names"], notes["number"]) == ([1, 2], {"x"}, 1.5)
        assert (notes["blob"], notes["odd"], notes["text"]) == (wanted["blob"], wanted["odd"], ["a", "bc"])
        assert (notes["counts"], notes["tally"]) == ({3: 1, ((1, 2), ""): b""}, Counter(a=2))
        assert (notes["sets"], notes["day"], notes["waits"]) == (
            {(1,), 0.5},
            "2024-02-29",
            ["5 hours", "7 hours"],
        )
        assert (notes["foreign"].tolist(), notes["wide"].tolist(), notes["wider"]) == ([1, 2], [1.5], 2.5)
        assert notes["huge"] == hex(1 << 3000)
        assert notes["array"].tolist() == wanted["array"].tolist()
        assert notes["long"].tolist() == wanted["long"].tolist()
        assert torch.equal(notes["tensor"], wanted["tensor"])
        assert torch.equal(notes["sparse"].to_dense(), torch.eye(3))
        assert (made["checkpoint"], loaded["everstep"]["step"]) == ("kinds@1.2", 1)  # after the last boundary
        assert loaded["log"]["loss"]["values"].tolist() == [0.5]
        side = json.loads((tmp_path / "out" / "everstep.json").read_text())
        assert side["values"]["notes"]["state"]["last"] == {"$deque": [3, [1, 2]]}

    def test_the_archive_is_whole_and_aligned(self, saved: Saved, tmp_path: Path) -> None:
        export("kinds", tmp_path / "out", "--to", "torch", "--storage", *saved[1])
        file = tmp_path / "out" / "checkpoint.pt"
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
            for info in archive.infolist():
                head = file.read_bytes()[info.header_offset : info.header_offset + 30]
                lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
                assert (info.header_offset + 30 + lengths) % 64 == 0, info.filename


def assert_same_optimizer(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for key, state in wanted["state"].items():
        assert found["state"][key].keys() == state.keys()
        for name, tensor in state.items():
            assert same(found["state"][key][name], tensor), (key, name)


def test_weights_that_only_the_optimizer_has_are_in_its_dict_and_import_says_that_it_leaves_them(
    tmp_path: Path, devices: list[Path]
) -> None:
    model = nn.Linear(3, 3).bfloat16()
    named = [(name, each.detach().float().requires_grad_()) for name, each in model.named_parameters()]
    optimizer = torch.optim.AdamW(named)
    kinds_of_state.save("masters", devices, {"model": model, "optimizer": optimizer})
    export("masters", tmp_path / "out", "--to", "torch", "--storage", *devices)
    loaded = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["optimizer"]
    assert all(same(loaded["own"][name], tensor.detach()) for name, tensor in named)
    optimizer.load_state_dict(loaded)
    made = tool("import", tmp_path / "out" / "checkpoint.pt", "--run", "again", "--storage", *devices)
    end_daemon()
    assert "weights that only an optimizer had are not taken" in made["left_out"]["optimizer.own"]


class TestSafetensors:
    def test_one_file_where_it_fits(self, saved: Saved, tmp_path: Path) -> None:
        state, storage = saved
        made = export("kinds", tmp_path / "out", "--to", "safetensors", "--storage", *storage)
        assert set(made["files"]) == {"model.safetensors", "everstep.json"}
        loaded = load_file(tmp_path / "out" / "model.safetensors")
        self.assert_model(loaded, state)
        with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
            assert file.metadata()["format"] == "pt"

    def test_shards_and_their_index(self, saved: Saved, tmp_path: Path) -> None:
        state, storage = saved
        made = export("kinds", tmp_path / "out", "--to", "safetensors", "--shard-bytes", "1KiB", *storage)
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        names = sorted(name for name in made["files"] if name.endswith(".safetensors"))
        assert len(names) > 2
        assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
        assert set(index["weight_map"].values()) == set(names)
        loaded: dict[str, torch.Tensor] = {}
        for name in names:
            part = load_file(tmp_path / "out" / name)
            assert {key for key, file in index["weight_map"].items() if file == name} == part.keys()
            loaded |= part
        self.assert_model(loaded, state)
        total = sum(tensor.numel() * tensor.element_size() for tensor in loaded.values())
        assert index["metadata"]["total_size"] == total

    def assert_model(self, loaded: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        side = {"complex64", "float8_e4m3fnuz"}
        for name, tensor in state["model"].state_dict().items():
            if not isinstance(tensor, torch.Tensor):
                continue
            found = loaded[f"model.{name}"]
            if str(tensor.dtype)[6:] in side:
                assert found.dtype == torch.uint8
                found = found.view(tensor.dtype)
            assert same(found, tensor), name
        parameter = state["model"].conv.weight
        assert same(
            loaded["optimizer.state.conv.weight.exp_avg"], state["optimizer"].state[parameter]["exp_avg"]
        )


class TestDcp:
    def test_what_dcp_cannot_hold_is_said(self, saved: Saved, tmp_path: Path) -> None:
        error = export("kinds", tmp_path / "out", "--to", "dcp", "--storage", *saved[1], code=2)["error"]
        assert "sparse" in error["message"]
        assert list(tmp_path.iterdir()) == []

    def test_model_and_optimizer(self, tmp_path: Path, devices: list[Path]) -> None:
        state = kinds_of_state.make()
        kinds_of_state.train(state)
        del state["notes"].state["sparse"]
        state["notes"].state["pair"] = (torch.ones(2), torch.zeros(3))
        kinds_of_state.save("kinds", devices, state)
        made = export("kinds", tmp_path / "out", "--to", "dcp", "--storage", *devices)
        end_daemon()
        assert b"TensorRef" not in (tmp_path / "out" / "__0_0.distcp").read_bytes()
        assert {".metadata", "__0_0.distcp", "everstep.json"} == set(made["files"])
        fresh = kinds_of_state.make(1)
        wanted: dict[str, Any] = {
            "model": fresh["model"].state_dict(),
            "optimizer": get_optimizer_state_dict(fresh["model"], fresh["optimizer"]),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group exists
            load_dcp(wanted, checkpoint_id=tmp_path / "out", no_dist=True)
        for name, tensor in state["model"].state_dict().items():
            if isinstance(tensor, torch.Tensor):
                assert same(wanted["model"][name], tensor), name
        expected = get_optimizer_state_dict(state["model"], state["optimizer"])
        assert_same_optimizer(wanted["optimizer"], expected)


class TestPlaces:
    def test_beside_a_daemon(self, tmp_path: Path, devices: list[Path]) -> None:
        with service(), training(devices) as trained:
            name = trained.save()
            made = export("bad", tmp_path / "out", "--to", "safetensors")
            assert made["checkpoint"] == f"bad@{name}"
            loaded = load_file(tmp_path / "out" / "model.safetensors")
            for key, tensor in trained.model.state_dict().items():
                assert torch.equal(loaded[f"model.{key}"], tensor)

    def test_nothing_is_overwritten(self, saved: Saved, tmp_path: Path) -> None:
        _, storage = saved
        out = tmp_path / "out"
        out.mkdir()
        export("kinds", out, "--to", "safetensors", "--storage", *storage)  # an empty folder is taken
        before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
        error = export("kinds", out, "--to", "torch", "--storage", *storage, code=2)["error"]
        assert "is there already" in error["message"]
        assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    @pytest.mark.parametrize(
        ("arguments", "code", "said"),
        [
            (("nobody",), 3, "no run"),
            (("kinds@9.9",), 3, "no checkpoint 9.9"),
            (("kinds", "--rank", "4"), 3, "rank 4"),
            (("kinds", "--shard-bytes", "3"), 2, "--shard-bytes"),
            (("kinds", "--shard-bytes", "5 Gb"), 2, "--shard-bytes: a size is"),
        ],
    )
    def test_what_is_not_there(
        self,
        saved: Saved,
        tmp_path: Path,
        arguments: tuple[str, ...],
        code: int,
        said: str,
    ) -> None:
        run, *more = arguments
        error = export(run, tmp_path / "out", "--to", "torch", *more, "--storage", *saved[1], code=code)[
            "error"
        ]
        assert said in error["message"]
        assert list(tmp_path.iterdir()) == []

    def test_a_flipped_bit_is_never_exported(self, tmp_path: Path, devices: list[Path]) -> None:
        kinds_of_state.save("kinds", devices, kinds_of_state.make())
        end_daemon()
        segment = next(path for device in devices for path in device.rglob("*.safetensors"))
        content = bytearray(segment.read_bytes())
        content[-1] ^= 1
        segment.write_bytes(content)
        error = export("kinds", tmp_path / "out", "--to", "torch", "--storage", *devices, code=1)["error"]
        assert (error["code"], str(segment) in error["message"]) == ("CorruptDataError", True)
        assert not (tmp_path / "out").exists()
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

    def test_an_interrupted_export_leaves_nothing(self, tmp_path: Path, devices: list[Path]) -> None:
        save_large(devices, megabytes=16)
        pause, written = Pause(tmp_path / "pause"), Phase("everstep.hook.export_folder:_sync")
        command = [EVERSTEP, "export", "large", tmp_path / "out", "--to", "torch", "--storage", *devices]
        environment = os.environ | pause.environment(written) | {"PYTHONPATH": str(SCRIPTS / "everywhere")}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        ) as process:
            pause.reached(process)
            assert list(tmp_path.glob(".out.*.tmp/checkpoint.pt"))
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        assert not list(tmp_path.glob("*out*"))
        assert not list(tmp_path.glob(".out*"))


def save_large(storage: list[Path], *, megabytes: int) -> None:
    model = nn.ParameterList(nn.Parameter(torch.randn(2**22)) for _ in range(max(1, megabytes // 16)))
    kinds_of_state.save("large", storage, {"model": model})
    end_daemon()


@pytest.fixture(scope="module")
def two_sizes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Stores of 16 MiB and of 256 MiB, in tensors of 16 MiB."""
    folder = tmp_path_factory.mktemp("sizes")
    places = (folder / "small", folder / "large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERSTEP_SOCKET", str(folder / "s" / "data.sock"))
        for place, megabytes in zip(places, (16, 256), strict=True):
            place.mkdir()
            save_large([place], megabytes=megabytes)
    return places


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_memory_does_not_grow_with_the_state(form: str, tmp_path: Path, two_sizes: tuple[Path, Path]) -> None:
    """What is kept at once is a few tensors and the blocks of the reader."""
    small, large = (peak_rss_bytes(form, place, tmp_path / place.name) for place in two_sizes)
    assert large - small < 128 * 2**20, (small, large)


def peak_rss_bytes(form: str, storage: Path, destination: Path) -> int:
    """The largest process of an export: the one that writes."""
    command = [EVERSTEP, "export", "large", destination, "--to", form, "--storage", storage]
    reporter = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(done.returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", reporter, *command], capture_output=True, text=True, check=True
    )
    return int(done.stdout.splitlines()[-1]) * 1024

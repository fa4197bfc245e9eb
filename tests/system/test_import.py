"""What other tools saved becomes a checkpoint that a run restores, bit for bit; what it lacks is said."""

import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import kinds_of_state
import pytest
import torch
from in_process import objects, saved_run
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import everstep
from everstep.core.errors import StateMismatchError
from everstep.hook.restore import Restored
from everstep.hook.state_testing import bits
from everstep.hook.trainer_testing import end_daemon

EVERSTEP = Path(sys.executable).with_name("everstep")


def tool(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [EVERSTEP, *arguments, "--json"], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == code, done
    return json.loads(done.stdout)


def restore(name: str, storage: list[Path], state: dict[str, Any]) -> Restored:
    with everstep.attach(name, **state, storage=storage, every=10**6) as run:
        restored = run.restore()
    end_daemon()
    assert restored is not None
    return restored


def small(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def train(state: dict[str, Any], first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.sin(torch.arange(24.0).reshape(4, 6) * (step + 1))
        state["optimizer"].zero_grad()
        state["model"](x).square().sum().backward()
        state["optimizer"].step()
        state["schedule"].step()


def assert_same(one: object, other: object, path: str = "") -> None:
    """Equal trees; tensors by their bits."""
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert bits(one.to_dense()) == bits(other.to_dense()), path
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif type(one).__module__ == "numpy":
        assert str(one) == str(other), path
    else:
        assert one == other, path


def states(state: dict[str, Any]) -> dict[str, Any]:
    return {name: found.state_dict() for name, found in state.items() if hasattr(found, "state_dict")}


def saved_as(form: str, folder: Path, state: dict[str, Any]) -> Path:
    """Save a state as scripts do; return what is imported."""
    if form == "torch":
        found = {f"{name}_state_dict": value.state_dict() for name, value in state.items()}
        torch.save({**found, "epoch": 3, "loss": 0.25}, folder / "last.pt")
        return folder / "last.pt"
    by_name = form == "dcp by name"
    optimizer = get_optimizer_state_dict(state["model"], state["optimizer"]) if by_name else None
    tree: dict[str, Any] = {**states(state), **({"optimizer": optimizer} if by_name else {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group exists
        save_dcp(tree, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@pytest.mark.parametrize("form", ["torch", "dcp", "dcp by name"])
def test_training_goes_on_bit_for_bit(form: str, tmp_path: Path, devices: list[Path]) -> None:
    state = small(0)
    train(state, 0, 5)
    source = saved_as(form, tmp_path, state)
    made = tool("import", source, "--run", "new", "--step", "5", "--storage", *devices)
    assert made["checkpoint"] == "new@1.5"
    assert sorted(made["components"]) == ["model", "optimizer", "schedule"]
    fresh = small(1)
    restored = restore("new", devices, fresh)
    assert (str(restored.checkpoint), restored.left_as_given) == ("1.5", ("rng", "log"))
    assert_same(states(fresh), states(state))
    train(state, 5, 8)
    train(fresh, 5, 8)
    assert_same(states(fresh), states(state))


def test_parameters_by_number_in_another_order_are_refused_and_not_exchanged(
    tmp_path: Path, devices: list[Path]
) -> None:
    def layers() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        return {"model": model, "optimizer": torch.optim.Adam(reversed([*model.parameters()]))}

    state = layers()
    state["model"](torch.ones(1, 4)).sum().backward()
    state["optimizer"].step()
    torch.save(states(state), tmp_path / "last.pt")
    tool("import", tmp_path / "last.pt", "--run", "new", "--storage", *devices)
    with pytest.raises(StateMismatchError, match="group 0 was imported by number, in the module's order"):
        restore("new", devices, layers())
    end_daemon()


def tied(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    return {"model": model}


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_tied_weights_that_a_tool_stores_twice_are_one_tensor_again(
    form: str, tmp_path: Path, devices: list[Path]
) -> None:
    state, fresh = tied(0), tied(1)
    tool("import", saved_as(form, tmp_path, state), "--run", "new", "--storage", *devices)
    restore("new", devices, fresh)
    assert fresh["model"][1].weight is fresh["model"][0].weight
    assert_same(states(fresh), states(state))


def test_so_are_those_of_which_a_tool_stores_one_name_alone(tmp_path: Path, devices: list[Path]) -> None:
    state, fresh = tied(0), tied(1)
    save_model(state["model"], str(tmp_path / "model.safetensors"))
    tool("import", tmp_path / "model.safetensors", "--run", "new", "--storage", *devices)
    restore("new", devices, fresh)
    assert fresh["model"][1].weight is fresh["model"][0].weight
    assert_same(states(fresh), states(state))


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_an_optimizer_that_has_no_state_is_one_all_the_same(
    form: str, tmp_path: Path, devices: list[Path]
) -> None:
    """DCP keeps no empty dicts."""

    def plain(lr: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=lr)}

    state, fresh = plain(0.25), plain(0.5)
    tool("import", saved_as(form, tmp_path, state), "--run", "new", "--storage", *devices)
    restore("new", devices, fresh)
    assert_same(states(fresh), states(state))


def test_what_is_no_state_is_told(tmp_path: Path, devices: list[Path]) -> None:
    source = saved_as("torch", tmp_path, small(0))
    made = tool("import", source, "--run", "new", "--storage", *devices)
    assert made["left_out"] == {"epoch": "3", "loss": "0.25"}
    end_daemon()
    notes = tool("show", "new", *devices)["checkpoint"]["notes"]
    assert (notes["imported"], notes["imported.epoch"]) == ("torch", "3")
    assert tool("verify", "new", *devices)["ok"]


def test_an_export_comes_back_whole(tmp_path: Path, devices: list[Path]) -> None:
    state = kinds_of_state.make()
    kinds_of_state.train(state)
    kinds_of_state.save("kinds", devices, state)
    end_daemon()
    tool(
        "export",
        "kinds",
        tmp_path / "out",
        "--to",
        "safetensors",
        "--shard-bytes",
        "4096",
        "--storage",
        *devices,
    )
    other = tmp_path / "other"
    other.mkdir()
    tool("import", tmp_path / "out", "--run", "again", "--storage", other)
    fresh = kinds_of_state.make(1)
    restored = restore("again", [other], fresh)
    assert restored.left_as_given == ()
    assert_same(states(fresh), states(state))
    assert fresh["model"].head.weight is fresh["model"].embed.weight
    assert torch.equal(fresh["draws"].get_state(), state["draws"].get_state())


def test_an_exported_torch_file_brings_the_loader_back(tmp_path: Path, devices: list[Path]) -> None:
    saved = saved_run([devices[0]])
    tool("export", "bad", tmp_path / "out", "--to", "torch", "--storage", devices[0])
    made = tool("import", tmp_path / "out", "--run", "again", "--storage", devices[1])
    assert made["left_out"].keys() == {"rng", "log"}
    for name, follows in (("rng", "begins with those of its process"), ("log", "begin empty")):
        assert follows in made["left_out"][name]
        assert "an export --to safetensors keeps them" in made["left_out"][name]
    fresh = objects()
    restored = restore("again", [devices[1]], fresh)
    assert restored.left_as_given == ("rng", "log")
    weights = torch.cat([each.detach().reshape(-1) for each in fresh["model"].parameters()])
    assert torch.equal(weights, list(saved.values())[-1])
    assert fresh["loader"].state_dict()["cursor"] > 0
    assert fresh["loader"].ledger.record().tallies


def test_weights_alone_leave_the_rest_as_given(
    tmp_path: Path, devices: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    state, fresh = small(0), small(1)
    save_file(state["model"].state_dict(), tmp_path / "model.safetensors")
    before = fresh["optimizer"].state_dict()
    tool("import", tmp_path / "model.safetensors", "--run", "new", "--storage", devices[0])
    with caplog.at_level(logging.WARNING):
        restored = restore("new", [devices[0]], fresh)
    assert restored.left_as_given == ("rng", "log", "optimizer", "schedule")
    assert "left_as_given=rng,log,optimizer,schedule" in caplog.text
    assert_same(fresh["model"].state_dict(), state["model"].state_dict())
    assert_same(fresh["optimizer"].state_dict(), before)


def test_a_checkpoint_of_a_run_may_lack_nothing(devices: list[Path]) -> None:
    state = small(0)
    del state["schedule"]
    kinds_of_state.save("own", devices, state)
    with (
        pytest.raises(StateMismatchError, match="schedule"),
        everstep.attach("own", **small(1), storage=devices) as run,
    ):
        run.restore()
    end_daemon()


def test_names_that_do_not_fit_are_a_mismatch(tmp_path: Path, devices: list[Path]) -> None:
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "other.safetensors")
    tool("import", tmp_path / "other.safetensors", "--run", "new", "--storage", *devices)
    with (
        pytest.raises(StateMismatchError, match="'model'"),
        everstep.attach("new", **small(1), storage=devices) as run,
    ):
        run.restore()
    end_daemon()


def test_an_import_under_a_name_that_the_script_does_not_have(tmp_path: Path, devices: list[Path]) -> None:
    """Training would begin from nothing, and the import be collected some checkpoints later."""
    save_file(small(0)["model"].state_dict(), tmp_path / "model.safetensors")
    tool("import", tmp_path / "model.safetensors", "--run", "new", "--as", "net", "--storage", *devices)
    with (
        pytest.raises(
            StateMismatchError, match=r"holds net; this script attaches model, optimizer, schedule"
        ) as caught,
        everstep.attach("new", **small(1), storage=devices) as run,
    ):
        run.restore()
    assert "--as" in caught.value.hint
    end_daemon()


def test_what_the_script_no_longer_attaches_is_named(
    devices: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    state, fresh = small(0), small(1)
    kinds_of_state.save("own", devices, state)
    del fresh["schedule"]
    with caplog.at_level(logging.WARNING):
        assert restore("own", devices, fresh).not_attached == ("schedule",)
    assert "not_attached=schedule" in caplog.text


class TestRefused:
    def error(self, source: Path, devices: list[Path], *more: str, code: int = 1) -> str:
        found = tool("import", source, "--run", "new", *more, "--storage", *devices, code=code)["error"]
        end_daemon()
        assert not [path for device in devices for path in device.rglob("*.mf")]
        return found["message"] + found["hint"]

    def test_a_run_that_has_checkpoints(self, tmp_path: Path, devices: list[Path]) -> None:
        source = saved_as("torch", tmp_path, small(0))
        tool("import", source, "--run", "new", "--storage", *devices)
        error = tool("import", source, "--run", "new", "--storage", *devices, code=2)["error"]
        end_daemon()
        assert "has checkpoints already" in error["message"]

    def test_an_object_in_a_torch_file(self, tmp_path: Path, devices: list[Path]) -> None:
        torch.save({"model": nn.Linear(2, 2)}, tmp_path / "whole.pt")
        said = self.error(tmp_path / "whole.pt", devices)
        assert "weights_only: it holds an object of torch.nn.modules.linear.Linear" in said
        assert "save model.state_dict() instead" in said

    @pytest.mark.parametrize(
        ("name", "said"),
        [("text.pt", "text.pt is no file of torch.save"), ("text.safetensors", "is no safetensors file")],
    )
    def test_what_is_another_file(self, name: str, said: str, tmp_path: Path, devices: list[Path]) -> None:
        (tmp_path / name).write_text("Dear reader, this is a letter.\n")
        assert said in self.error(tmp_path / name, devices)

    def test_leaving_out_what_is_not_there(self, tmp_path: Path, devices: list[Path]) -> None:
        source = saved_as("torch", tmp_path, small(0))
        said = self.error(source, devices, "--without", "optimiser", code=2)
        assert "--without optimiser: the source holds no such object" in said
        assert "model" in said

    def test_a_hostile_torch_file_is_not_executed(self, tmp_path: Path, devices: list[Path]) -> None:
        torch.save({"model": _Touches(tmp_path / "touched")}, tmp_path / "hostile.pt")
        assert "weights_only" in self.error(tmp_path / "hostile.pt", devices)
        assert not (tmp_path / "touched").exists()

    def test_parameters_that_cannot_be_told(self, tmp_path: Path, devices: list[Path]) -> None:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD([model.weight])  # one of two: numbers tell nothing
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / "part.pt")
        assert "--without optimizer" in self.error(tmp_path / "part.pt", devices, code=2)
        tool("import", tmp_path / "part.pt", "--run", "new", "--without", "optimizer", "--storage", *devices)
        end_daemon()

    def test_a_step_beside_the_objects_is_the_steps_of_the_run(
        self, tmp_path: Path, devices: list[Path]
    ) -> None:
        model = {"model": nn.Linear(3, 3).state_dict(), "step": 77, "note": "best"}
        torch.save(model, tmp_path / "stepped.pt")
        made = tool("import", tmp_path / "stepped.pt", "--run", "new", "--storage", *devices)
        end_daemon()
        assert (made["checkpoint"], made["left_out"]) == ("new@1.77", {"note": "'best'"})

    def test_named_parameters_can_be_told(self, tmp_path: Path, devices: list[Path]) -> None:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD([("weight", model.weight)], momentum=0.5)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / "part.pt")
        made = tool("import", tmp_path / "part.pt", "--run", "new", "--storage", *devices)
        assert made["components"] == ["model", "optimizer"]
        end_daemon()

    @pytest.mark.parametrize("damage", ["cut", "header", "offsets", "dtype", "empty"])
    def test_a_damaged_safetensors_file(self, damage: str, tmp_path: Path, devices: list[Path]) -> None:
        path = tmp_path / "model.safetensors"
        save_file({"w": torch.ones(64)}, path)
        content = bytearray(path.read_bytes())
        match damage:
            case "cut":
                del content[-1:]
            case "header":
                content[0:8] = (2**40).to_bytes(8, "little")
            case "offsets":
                content = content.replace(b"[0,256]", b"[0,999]")
            case "dtype":
                content = content.replace(b'"F32"', b'"X32"')
            case _:
                content.clear()
        path.write_bytes(content)
        assert str(path) in self.error(path, devices)

    def test_what_is_not_there(self, tmp_path: Path, devices: list[Path]) -> None:
        assert "no " in self.error(tmp_path / "absent.pt", devices, code=3)
        assert ".metadata" in self.error(tmp_path, devices, code=3)


class _Touches:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)

"""DCP's `.metadata` is a pickle: what it may ask for, and what happens to one that asks for more."""

import os
import pickle
import pickletools
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from everstep.core.errors import CorruptDataError, NotFoundError
from everstep.hook.dcp_metadata import StoredChunk, read_metadata

TIME_MAX_S = 60.0
"""The child's processor time ends after 20 s; on a busy machine that takes longer."""


def metadata() -> Metadata:
    tensor = TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.bfloat16),
        size=torch.Size([4, 3]),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size([row, 0]), sizes=torch.Size([2, 3])) for row in (0, 2)
        ],
    )
    return Metadata(
        state_dict_metadata={"model.w": tensor, "epoch": BytesStorageMetadata()},
        planner_data={"model.w": ("model", "w"), "epoch": ("epoch",)},
        storage_data={
            MetadataIndex("model.w", [0, 0], index=0): _StorageInfo("__0_0.distcp", 0, 700),
            MetadataIndex("model.w", [2, 0], index=1): _StorageInfo("__1_0.distcp", 0, 700),
            MetadataIndex("epoch"): _StorageInfo("__0_0.distcp", 700, 90),
        },
        storage_meta=StorageMeta(checkpoint_id=Path("/somewhere")),
    )


def write(folder: Path, content: bytes) -> Path:
    (folder / ".metadata").write_bytes(content)
    return folder


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_dcp_writes_is_read(protocol: int, tmp_path: Path) -> None:
    found = read_metadata(write(tmp_path, pickle.dumps(metadata(), protocol)))
    (tensor,) = found.tensors
    assert (tensor.name, tensor.dtype, tensor.size) == ("model.w", "bfloat16", (4, 3))
    assert tensor.chunks[1] == StoredChunk((2, 0), (2, 3), "__1_0.distcp", 0, 700)
    (other,) = found.objects
    assert (other.name, other.file, other.offset, other.length) == ("epoch", "__0_0.distcp", 700, 90)
    assert found.paths == {"model.w": ("model", "w"), "epoch": ("epoch",)}


def test_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_metadata(tmp_path)


class Calls:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def global_call(module: str, name: str, *arguments: bytes) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR."


TOUCH = b"Vtouch %s\n"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("subprocess", "Popen"),
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("builtins", "getattr"),
        ("builtins", "open"),
        ("builtins", "__import__"),
        ("importlib", "import_module"),
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("__main__", "give_up_privileges"),
        ("pickle", "loads"),
        ("collections", "OrderedDict"),
    ],
)
def test_any_other_global_is_refused_by_name(module: str, name: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    content = global_call(module, name, TOUCH % str(touched).encode())
    with pytest.raises(CorruptDataError, match=f"asks for {module}.{name}".replace(".", "\\.")):
        read_metadata(write(tmp_path, content))
    assert not touched.exists()


def test_a_call_within_a_call_is_refused(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    nested = metadata()
    nested.planner_data = {"x": (Calls(getattr, Calls(os.execlp, "touch", "touch", str(touched)), "real"),)}
    with pytest.raises(CorruptDataError, match=r"asks for (os\.execlp|builtins\.getattr)"):
        read_metadata(write(tmp_path, pickle.dumps(nested)))
    assert not touched.exists()


def bombs() -> dict[str, bytes]:
    """Pickles that take without bound what is not bounded: memory, time, stack."""
    doubled = b"\x80\x04(lp0\n" + b"".join(
        b"(lp%d\n" % step + b"g%d\na" % (step - 1) * 10 for step in range(1, 40)
    )
    words = b"\x80\x04]q\x00" + b"(" + b"h\x00" * 10
    return {
        "a length of 2**62 bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
        "a memo index of 2**31": b"\x80\x04]r" + struct.pack("<I", 2**31 - 1) + b".",
        "an integer of 2**31 bytes": b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"1.",
        "lists of lists of lists": doubled + b".",
        "a million nested lists": b"\x80\x04" + b"]" * 10**6 + b"a" * (10**6 - 1) + b".",
        "a million nested tuples": b"\x80\x04)" + b"\x85" * 10**6 + b".",
        "itself": words + b"e.",
        "a frame of 2**60 bytes": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b".",
        "text as a long number": b"\x80\x00L" + b"9" * (20 * 2**20) + b"L\n.",
        "a pickle with no end": b"\x80\x04" + b"]0" * 10**6,
        "an unknown opcode": b"\x80\x04\xff.",
        "a number of an extension": b"\x80\x04\x82\x01.",
        "a persistent id": b"Px\n.",
        "an attribute of a class": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n}U\x01aK\x01sb.",
        "nothing": b"",
    }


@pytest.mark.parametrize("bomb", bombs())
def test_a_bomb_ends_within_bounds(bomb: str, tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(CorruptDataError, match=r"refused|could not be read within"):
        read_metadata(write(tmp_path, bombs()[bomb]))
    assert time.monotonic() - began_s < TIME_MAX_S


def test_one_row_shared_a_million_times_ends_within_bounds(tmp_path: Path) -> None:
    """The answer would be large though the pickle is small: 10,000 tensors of the same 10,000 chunks."""
    large = metadata()
    tensor = large.state_dict_metadata["model.w"]
    assert isinstance(tensor, TensorStorageMetadata)
    tensor.chunks *= 5000
    for number in range(10_000):
        large.state_dict_metadata[f"t{number}"] = tensor
    with pytest.raises(CorruptDataError, match=r"refused|could not be read within"):
        read_metadata(write(tmp_path, pickle.dumps(large)))


def test_a_file_larger_than_allowed_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.truncate(300 * 2**20)
    with pytest.raises(CorruptDataError, match="more than"):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"storage_data": {}}, "nothing says where"),
        ({"storage_data": None}, "no dict"),
        ({"planner_data": {"x": "y"}}, "no tuple"),
        ({"planner_data": {1: ("y",)}}, "no text"),
        ({"state_dict_metadata": {"model.w": 5}}, "no TensorEntry"),
    ],
)
def test_metadata_that_do_not_hold_together_are_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    found = metadata()
    for name, value in change.items():
        setattr(found, name, value)
    with pytest.raises(CorruptDataError, match=said):
        read_metadata(write(tmp_path, pickle.dumps(found)))


def test_compressed_files_are_refused(tmp_path: Path) -> None:
    found = metadata()
    found.storage_data[MetadataIndex("epoch")] = _StorageInfo("f", 0, 1, ["zstd"])
    with pytest.raises(CorruptDataError, match="compressed"):
        read_metadata(write(tmp_path, pickle.dumps(found)))


def test_the_child_has_given_everything_up(tmp_path: Path) -> None:
    """Asked of the kernel while the child waits for its input, which comes through a pipe that the test holds."""
    import subprocess
    import sys

    from everstep.hook.dcp_metadata import _CHILD

    command = [sys.executable, "-I", "-S", str(_CHILD), "10"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as child:
        status = _status_once_it_waits(child.pid)
        assert status["NoNewPrivs"] == "1"
        if os.geteuid() == 0:
            assert status["Uid"].split() == ["65534"] * 4
            assert status["Groups"] == ""
            assert int(status["CapEff"], 16) == 0
        limits = Path(f"/proc/{child.pid}/limits").read_text()
        for name in ("Max file size", "Max processes", "Max core file size"):
            line = next(line for line in limits.splitlines() if line.startswith(name))
            assert line.removeprefix(name).split()[:2] == ["0", "0"]
        child.communicate(b"N.")


def _status_once_it_waits(pid: int) -> dict[str, str]:
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if status["NoNewPrivs"] == "1" and status["Uid"].split()[0] == str(os.getuid() or 65534):
            return status
    raise AssertionError("it does not give its privileges up")


@settings(max_examples=25)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(pickle.dumps(metadata()))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("changed")
    try:
        found = read_metadata(write(folder, bytes(content)))
    except CorruptDataError:
        return
    assert len(found.tensors) <= 2


def test_the_bombs_are_pickles_as_far_as_they_go() -> None:
    """Else they would test nothing but the first byte."""
    ops = [op.name for op, _, _ in pickletools.genops(bombs()["lists of lists of lists"])]
    assert ops.count("APPEND") == 390

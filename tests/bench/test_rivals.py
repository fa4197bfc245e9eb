"""What cannot be compared with is said in the table, not left out in silence."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from paired import publish, row
from rivals import DEEPSPEED, rivals

BUILDER = "deepspeed.ops.op_builder"


def test_what_is_not_installed_stands_in_the_table_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, BUILDER, None)
    found, absent = rivals()
    assert list(found) == ["torch.save + fsync", "DCP save", "safetensors + fsync"]
    assert absent == {DEEPSPEED: "not installed"}
    publish("bench", [row("disk: persist / DCP save", [2.0], goal=1.0)], tmp_path / "b.json", absent)
    lines = capsys.readouterr().out.splitlines()
    assert any(DEEPSPEED in line and "not installed" in line for line in lines)


@pytest.mark.parametrize("is_compatible", [True, False])
def test_deepspeed_is_a_rival_where_its_io_can_be_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_compatible: bool
) -> None:
    written: list[str] = []

    def sync_pwrite(_tensor: object, path: str) -> None:
        written.append(path)
        Path(path).touch()

    handle = SimpleNamespace(sync_pwrite=sync_pwrite)
    module = ModuleType(BUILDER)
    builder = SimpleNamespace(
        is_compatible=lambda: is_compatible, load=lambda: SimpleNamespace(aio_handle=lambda *_: handle)
    )
    vars(module)["AsyncIOBuilder"] = lambda: builder
    monkeypatch.setitem(sys.modules, BUILDER, module)
    found, absent = rivals()
    assert (DEEPSPEED in found) == is_compatible
    assert ("cannot build" in absent.get(DEEPSPEED, "")) == (not is_compatible)
    if is_compatible:
        found[DEEPSPEED]({"m": torch.zeros(1)}, tmp_path)
        assert written == [str(tmp_path / "m")]
        assert absent == {}

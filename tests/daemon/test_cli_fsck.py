"""`everstep fsck`: what it prints, its exit codes, its JSON; over directories, and beside a daemon."""

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.testing import make_state, opened, save
from everstep.core.ids import CheckpointId
from everstep.daemon.cli.main import main
from everstep.daemon.testing import node_daemon


def everstep(*arguments: str | Path) -> tuple[int, str, str]:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def document(*arguments: str | Path, code: int) -> Any:
    found = everstep(*arguments, "--json")
    assert (found[0], found[2]) == (code, ""), found
    return json.loads(found[1])


@pytest.fixture
def stored(devices: list[Path]) -> list[Path]:
    with opened(devices) as (store, _):
        run = store.run(os.geteuid(), "demo", create=True)
        run.begin_attempt(1, fresh=False)
        for step in (1, 2):
            save(run, make_state(store, step), CheckpointId(1, step))
            run.set_complete_floor(CheckpointId(1, step))
    return devices


def test_clean_is_0(stored: list[Path]) -> None:
    code, out, err = everstep("fsck", *stored)
    assert (code, err) == (0, "")
    assert "metadata of 2 shards is whole; blocks were not read (--data reads them)" in out
    assert "metadata of 2 shards is whole; every block was read" in everstep("fsck", "--data", *stored)[1]
    assert document("fsck", "--data", *stored, code=0) == {
        "source": f"{stored[0]}, {stored[1]}",
        "repaired": False,
        "run_count": 1,
        "shard_count": 2,
        "blocks_read": True,
        "findings": [],
        "put_aside": [],
    }


def test_repairable_is_1_until_it_was_repaired(stored: list[Path]) -> None:
    temporary = stored[0] / ".tmp.1"
    temporary.write_bytes(b"half")
    code, out, _ = everstep("fsck", *stored)
    assert code == 1
    assert f"repairable  {temporary}" in out
    assert "--repair: removes it" in out
    (finding,) = document("fsck", *stored, code=1)["findings"]
    assert (finding["severity"], finding["repair"]) == ("repairable", "removes it")
    assert temporary.exists()
    assert "repaired: removed it" in everstep("fsck", "--repair", *stored)[1]
    assert everstep("fsck", *stored)[0] == 0


def test_lost_is_2(stored: list[Path]) -> None:
    next(stored[1].rglob("*.safetensors")).unlink()
    assert document("fsck", *stored, code=2)["findings"][0]["severity"] == "lost"
    assert everstep("fsck", "--repair", *stored)[0] == 2
    assert everstep("fsck", *stored)[0] == 0  # what was lost is in quarantine, and stays a note
    assert len(document("ls", *stored, code=0)["checkpoints"]) == 1


def test_one_bad_block_is_one_finding_and_the_repair_names_what_to_remove(stored: list[Path]) -> None:
    segment = next(stored[1].rglob("*.safetensors"))
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content)
    (finding,) = document("fsck", "--data", *stored, code=2)["findings"]
    assert finding["path"] == str(segment)
    assert "is damaged: block 0 " in finding["problem"]
    code, out, _ = everstep("fsck", "--data", "--repair", *stored)
    assert (code, out.count("lost  ")) == (2, 1)
    assert "repaired: moved its manifests to quarantine" in out
    aside = [path for device in stored for path in (device / "quarantine").iterdir()]
    assert len(aside) == len(stored)
    assert all(f"  {path}\n" in out for path in aside)
    for path in aside:
        path.unlink()
    assert everstep("fsck", "--repair", *stored)[0] == 1  # the orphans that this leaves
    assert everstep("fsck", "--data", *stored)[0] == 0


def test_what_is_not_certain_is_not_repaired(stored: list[Path]) -> None:
    (stored[1] / "disk.id").unlink()
    code, out, _ = everstep("fsck", "--repair", *stored)
    assert code == 2
    assert "! nothing was repaired" in out


def test_usage(stored: list[Path], tmp_path: Path) -> None:
    assert everstep("fsck", "demo", *stored)[0] == 2
    assert "need directories" in everstep("fsck", "--repair")[2]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert everstep("fsck", empty)[0] == 3
    assert everstep("fsck")[0] == 3
    with opened(stored):
        error = document("fsck", *stored, code=1)["error"]
    assert (error["code"], "pid 4711" in error["message"]) == ("DeviceLockedError", True)


def test_beside_a_daemon(node_config: Path, socket_path: Path, stored: list[Path]) -> None:
    with node_daemon(node_config, socket_path):
        assert document("fsck", code=0)["shard_count"] == 2
        manifest = next(stored[0].rglob("1.1.0.mf"))
        manifest.unlink()
        (finding,) = document("fsck", code=1)["findings"]
        assert (finding["path"], finding["severity"]) == (str(manifest), "repairable")
        assert "is held by a node daemon" in everstep("fsck", *stored)[2]
        assert not manifest.exists()

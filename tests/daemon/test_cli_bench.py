"""`everstep bench io` on this machine's own file system: real engines, real interrupts, a real picture."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.io_sweep import sweep
from everstep.core.errors import ConfigError, NoSpaceError
from everstep.daemon.cli.plot_child import plot
from everstep.daemon.config import DaemonConfig, load_config

EVERSTEP = Path(sys.executable).with_name("everstep")
SHORT = ("--seconds", "0.2", "--size-mib", "16")


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [EVERSTEP, "bench", "io", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "COLUMNS": "80"},
    )


def test_what_is_printed_can_be_pasted(devices: list[Path], tmp_path: Path) -> None:
    done = bench(*devices, *SHORT, "--json")
    assert done.returncode == 0, done
    document = json.loads(done.stdout)
    assert [device["path"] for device in document["devices"]] == list(map(str, devices))
    for device in document["devices"]:
        assert all(cell["write_bytes_per_s"] > 0 < cell["read_bytes_per_s"] for cell in device["cells"])
        assert device["engine_by_default"] in {cell["engine"] for cell in device["cells"]}
    file = tmp_path / "node.toml"
    file.write_text(f'[devices]\nnvme0 = "{devices[0]}"\n{document["toml"]}')
    io = load_config(file).io
    recommended = document["recommended"]
    assert io.engine == recommended["engine"]
    assert io.engine_config().block_size_bytes == recommended["block_size_bytes"]
    assert io.engine_config().queue_depth == recommended["queue_depth"]
    assert [list(device.iterdir()) for device in devices] == [[], []]


def test_the_table_fits_80_columns(devices: list[Path]) -> None:
    lines = bench(devices[0], *SHORT).stdout.splitlines()
    assert lines[0] == str(devices[0])
    assert any(line.startswith("ENGINE") and line.rstrip().endswith("64") for line in lines)
    assert (
        max(len(line) for line in lines if not line.startswith(("/", "!")) and "in flight" not in line) <= 80
    )
    tail = "\n".join(lines[lines.index("[io]") :])
    assert tomllib.loads(tail)["io"].keys() == {"engine", "block_size_bytes", "queue_depth"}


def test_a_picture_comes_with_the_table(devices: list[Path], tmp_path: Path) -> None:
    """The command as a user types it; the picture has a line for each engine and block size that the table has."""
    pytest.importorskip("matplotlib", reason="pip install 'everstep[plot]'")
    png = tmp_path / "io.png"
    done = bench(devices[0], *SHORT, "--png", png)
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("ENGINE")][1:], (
        "a table for writing and one for reading"
    )
    assert f"picture: {png}" in done.stdout.replace("\n", "")
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert content.endswith(b"IEND\xaeB`\x82")
    assert len(content) > 20_000  # an empty pair of axes has a tenth of that
    assert list(devices[0].iterdir()) == []


def test_an_interrupt_leaves_nothing(devices: list[Path]) -> None:
    command = [EVERSTEP, "bench", "io", devices[0], "--seconds", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not _has_unnamed_file(process.pid, devices[0]):
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert list(devices[0].iterdir()) == []


def _has_unnamed_file(pid: int, directory: Path) -> bool:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith(str(directory)):
            return True
    return False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seconds", "0"), "--seconds is 0"),
        (("--size-mib", "1"), "--size-mib is 1"),
        (("--png", "/nowhere/at/all.png"), "lies in no directory"),
    ],
)
def test_wrong_usage(devices: list[Path], arguments: tuple[str, ...], said: str) -> None:
    done = bench(devices[0], *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_no_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    with pytest.raises(NoSpaceError, match="bytes free"):
        sweep(tmp_path, seconds=1, size_bytes=space.f_bavail * space.f_frsize)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    done = bench(tmp_path / "absent", *SHORT)
    assert done.returncode == 2
    assert "is no directory" in done.stderr


def picture_document() -> dict[str, Any]:
    cells = [
        {
            "engine": engine,
            "block_size_bytes": block,
            "queue_depth": depth,
            "write_bytes_per_s": 1e9 * depth,
            "read_bytes_per_s": 2e9 * depth,
        }
        for engine in ("aio", "uring", "plain")
        for block in (2**18, 2**20)
        for depth in ((1, 4) if engine != "plain" else (1,))
    ]
    return {"devices": [{"path": path, "cells": cells} for path in ("/nvme0", "/nvme1")]}


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'everstep[plot]'")
    plot(picture_document(), tmp_path / "io.png", "bench_plot")
    content = (tmp_path / "io.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))
    assert width > 1000 < height + 300


@pytest.mark.parametrize("key", ["block_size_bytes = 1000", "queue_depth = 0", "queue_depth = 5000"])
def test_what_an_engine_cannot_be_is_no_configuration(key: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f'[devices]\nx = "/x"\n[io]\n{key}\n')
    with pytest.raises(ConfigError, match=key.partition(" ")[0]):
        load_config(file)
    assert DaemonConfig().io.engine_config().queue_depth == 256

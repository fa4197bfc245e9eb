"""Which devices a run's storage means: directories of a private daemon, names or directories of a node's."""

import asyncio
import os
from pathlib import Path

import pytest

from everstep.core.errors import ConfigError
from everstep.daemon.config import DaemonConfig
from everstep.daemon.devices.stores import StoreBook


@pytest.mark.parametrize("named", ["name", "directory", "directory with a detour", "where its link leads"])
def test_a_nodes_device_is_meant_by_its_name_or_its_directory(tmp_path: Path, named: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "other").mkdir()
    said = {
        "name": "nvme0",
        "directory": str(tmp_path / "link"),
        "directory with a detour": f"{tmp_path}/other/../link/",
        "where its link leads": str(tmp_path / "real"),
    }[named]
    config = DaemonConfig(devices={"nvme0": str(tmp_path / "link"), "nvme1": str(tmp_path / "other")})
    book = StoreBook(config, socket=tmp_path / "socket", private=False)

    async def chosen() -> list[str]:
        opened = await book.open([said])
        try:
            return [device.path for device in book.chosen(opened, [said])]
        finally:
            opened.close()

    assert asyncio.run(chosen()) == [os.path.realpath(tmp_path / "real")]


@pytest.mark.parametrize("said", ["nvme2", "/elsewhere", "", "."])
def test_what_is_no_device_of_the_node_is_refused_by_its_name(tmp_path: Path, said: str) -> None:
    book = StoreBook(
        DaemonConfig(devices={"nvme0": str(tmp_path)}), socket=tmp_path / "socket", private=False
    )
    with pytest.raises(ConfigError, match=f"this node has no device '{said}'") as caught:
        asyncio.run(book.open([said]))
    assert caught.value.hint == "storage= selects among nvme0, or by their directories"

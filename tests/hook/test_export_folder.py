"""The folder of an export: what killed ones left goes, what living ones make stays."""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from everstep.core.errors import UsageError
from everstep.hook.export_folder import published_folder

MAKER = """
import sys, pathlib
from everstep.hook.export_folder import published_folder
with published_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "part").write_bytes(b"half")
    print(folder, flush=True)
    sys.stdin.read()
"""


def maker(destination: Path) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", MAKER, str(destination)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def folder_of(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


class FailedError(Exception):
    """An export failed."""


def test_it_appears_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    with published_folder(tmp_path / "out") as folder:
        (folder / "part").write_bytes(b"all")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(UsageError, match="there already"), published_folder(tmp_path / "out"):
        pass
    with pytest.raises(FailedError), published_folder(tmp_path / "other"):
        raise FailedError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_one_left_goes_and_what_a_living_one_makes_stays(tmp_path: Path) -> None:
    destination = tmp_path / "out"
    with maker(destination) as killed, maker(destination) as living:
        left, made = folder_of(killed), folder_of(living)
        assert (left / "part").exists()  # the second one left it to its living maker
        killed.kill()
        killed.wait()
        others = [
            tmp_path / name for name in (".out.1.tmp", f".outer.{'0' * 16}.tmp", f".out.{'0' * 16}.tmp")
        ]
        for path in others[:2]:
            path.mkdir()
        others[2].write_text("a file")
        with pytest.raises(FailedError), published_folder(destination):
            raise FailedError
        assert not left.exists()
        assert (made / "part").read_bytes() == b"half"
        assert all(path.exists() for path in others)
        living.communicate("")
    assert (destination / "part").read_bytes() == b"half"


def test_makers_of_one_folder_never_take_each_others(tmp_path: Path) -> None:
    def make(number: int) -> None:
        with suppress(FailedError), published_folder(tmp_path / "out") as folder:
            (folder / str(number)).touch()
            os.sched_yield()
            assert [path.name for path in folder.iterdir()] == [str(number)]
            raise FailedError

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(400)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_a_folder_that_may_not_be_written_to_is_named() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # every folder above may be entered by all
        Path(name).chmod(0o755)
        os.seteuid(65534)
        try:
            refused = pytest.raises(UsageError, match=f"uid 65534 may make nothing in {name}")
            with refused, published_folder(Path(name) / "out"):
                pass
        finally:
            os.seteuid(0)
        assert list(Path(name).iterdir()) == []

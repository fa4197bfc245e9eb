"""The wheel holds exactly the files of the checkout, and no folder is importable under a second name."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import everstep

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "proto", "checkpoint", "dataloader", "daemon", "hook")
COMPILED = {f"everstep/hook/_{name}.abi3.so" for name in ("tensor_facts", "copies")}
HAS_COMPILER = shutil.which("gcc") is not None


def build(target: Path, **variables: str) -> Path:
    command = [sys.executable, str(ROOT / "tools" / "build_wheel.py"), str(target)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


def expected_files() -> set[str]:
    """Return what the wheel has to hold, as paths inside it."""
    files = {"everstep/__init__.py", "everstep/client.py", "everstep/py.typed"}
    for folder in FOLDERS:
        wanted = ("*.py", "*.pyi", "*.proto") if folder == "proto" else ("*.py", "*.pyi")
        for pattern in wanted:
            paths = (path.relative_to(ROOT) for path in (ROOT / folder).rglob(pattern))
            files |= {f"everstep/{path}" for path in paths}
    web = ROOT / "daemon" / "web" / "static"
    files |= {f"everstep/{path.relative_to(ROOT)}" for path in web.iterdir()}
    return files | (COMPILED if HAS_COMPILER else set[str]())


def test_wheel_holds_exactly_the_modules_on_disk(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    page = f"everstep-{everstep.__version__}.data/data/share/man/man1/everstep.1"
    assert page in names
    names.remove(page)
    assert names == expected_files()


def test_without_a_compiler_the_wheel_holds_all_the_rest(wheel: Path, tmp_path: Path) -> None:
    without = build(tmp_path, CC=str(tmp_path / "none"))
    assert without.name == wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(without) as other:
        assert set(other.namelist()) == set(archive.namelist()) - COMPILED


def test_wheel_serves_every_python_and_carries_the_license(wheel: Path) -> None:
    machine = os.uname().machine
    assert wheel.name == f"everstep-{everstep.__version__}-cp311-abi3-linux_{machine}.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"everstep-{everstep.__version__}.dist-info/entry_points.txt").decode()
    assert f"everstep-{everstep.__version__}.dist-info/licenses/LICENSE" in names
    assert "everstep = everstep.daemon.cli.main:main" in entry_points


def test_version_is_the_installed_one() -> None:
    assert metadata.version("everstep") == everstep.__version__


def test_changelog_knows_the_version() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert everstep.__version__ in headings


def test_every_module_imports_under_one_name_only() -> None:
    modules = sorted(
        "everstep." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path.stem != "__main__"
    )
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"twice = sorted(name for name in sys.modules if name.split('.')[0] in {FOLDERS!r})\n"
        "sys.exit(f'imported under a second name: {twice}' if twice else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr


def test_a_folder_imported_from_the_repository_root_says_so() -> None:
    for folder in FOLDERS:
        done = subprocess.run(
            [sys.executable, "-c", f"import {folder}"], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode != 0, folder
        assert f"use everstep.{folder}" in done.stderr


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'restore_everything'"):
        getattr(everstep, "restore_everything")  # noqa: B009


def test_public_names_resolve() -> None:
    assert set(everstep.__all__) <= set(dir(everstep))
    assert issubclass(everstep.errors.UsageError, everstep.EverstepError)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("sys.platform = 'darwin'", "Linux only"),
        ("sys.version_info = (3, 10, 4)", "Python 3.11"),
    ],
)
def test_other_systems_get_a_clear_error(before: str, message: str) -> None:
    code = f"import sys\n{before}\nimport everstep\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert message in done.stderr

"""Rules of the repository that linters do not know."""

import ast
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "proto", "checkpoint", "dataloader", "daemon", "hook")
OTHERS = ("everstep", "tests", "tools", "examples")
PACKAGES = tuple(
    str(init.parent.relative_to(ROOT))
    for folder in FOLDERS
    for init in sorted((ROOT / folder).rglob("__init__.py"))
)
LINES_MAX = 800


def python_files() -> Iterator[Path]:
    for folder in (*FOLDERS, *OTHERS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in path.name:
                yield path


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_mapped_folder_is_a_regular_package_with_a_guard(folder: str) -> None:
    text = (ROOT / folder / "__init__.py").read_text()
    assert f'if __name__ != "everstep.{folder}":' in text
    assert not list((ROOT / folder).rglob("conftest.py")), "pytest would import it under a second name"


@pytest.mark.parametrize("folder", PACKAGES)
def test_every_package_has_a_map_of_its_files(folder: str) -> None:
    readme = ROOT / folder / "README.md"
    assert readme.is_file(), f"{folder}/README.md is missing"
    text = readme.read_text()
    unnamed = [path.name for path in sorted((ROOT / folder).glob("*.py")) if path.name not in text]
    assert [name for name in unnamed if name != "__init__.py"] == [], f"not in {folder}/README.md"


def test_every_package_is_in_the_wheel() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted(
        ["everstep", *("everstep." + each.replace("/", ".") for each in PACKAGES)]
    )


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in python_files()}
    assert not {str(path): length for path, length in lengths.items() if length > LINES_MAX}


def test_nothing_is_left_to_do() -> None:
    mark = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in python_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if mark.search(line)
    ]
    assert found == []


DECODES_AT_START = ("daemon/configuration/",)
"""The daemon reads its configuration before it has a thread; one that is read again has been learned."""


def decodes_in_place(path: Path) -> Iterator[int]:
    """Yield the lines where a type is decoded that msgspec may not have learned yet."""
    tree = ast.parse(path.read_text())
    calls = {node: ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inside = {
        each
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for each in ast.walk(node)
    }
    for call, name in calls.items():
        is_typed = len(call.args) + len(call.keywords) > 1
        if (
            name == "msgspec.convert"
            or (re.fullmatch(r"msgspec\.(json|msgpack)\.decode", name) and is_typed)
            or (call in inside and re.fullmatch(r"msgspec\.(json|msgpack)\.Decoder|Converter", name))
        ):
            yield call.lineno


def test_types_that_are_decoded_are_learned_while_their_module_is_imported() -> None:
    """Two threads that decode a struct first, at the same time, end the process: see core/converter.py."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files()
        if path.relative_to(ROOT).parts[0] in FOLDERS
        and path != ROOT / "core/converter.py"
        and not str(path.relative_to(ROOT)).startswith(DECODES_AT_START)
        for line in decodes_in_place(path)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["node.proto", "peer.proto"])
def test_every_field_value_and_call_of_our_protocols_is_explained(name: str) -> None:
    lines = (ROOT / "proto" / name).read_text().splitlines()
    said = list(itertools.pairwise(each.strip() for each in lines))
    needing = [pair for pair in said if re.match(r"rpc |[\w<]", pair[1]) and pair[1].endswith(";")]
    needing = [pair for pair in needing if not re.match(r"syntax |package |\w+_UNSPECIFIED = 0;", pair[1])]
    assert len(needing) > 20
    assert [line for before, line in needing if not re.match(r"// ?\w|// ?[\"'`(]", before)] == []


def test_every_fraction_of_the_control_api_is_a_time_or_says_what_it_is_a_share_of() -> None:
    text = (ROOT / "proto" / "node.proto").read_text()
    fields = re.findall(r"((?: *//[^\n]*\n)+) +(?:optional )?(?:double|float) (\w+) = ", text)
    assert len(fields) > 20
    assert [each for comment, each in fields if not each.endswith("_s") and "hare" not in comment] == []


def test_pinned_versions_are_exact_and_name_no_index() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line)] == []

"""Imports point one way, pure modules stay pure, and the daemon and the command line stay light."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "proto": {"core"},
    "checkpoint": {"core", "proto"},
    "dataloader": {"core", "proto"},
    "daemon": {"core", "proto", "checkpoint", "dataloader"},
    "hook": {"core", "proto", "checkpoint", "dataloader"},
}
TRAINING = {"torch", "numpy"}
ONLY_THE_DAEMON = {
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "google",
    "prometheus_client",
    "rich",
    "aiofiles",
}
UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
WRITES_PICKLES = {"hook/export_torch.py"}
"""May import pickle, whose Pickler torch's file format needs; nothing of it that reads."""
UNPRIVILEGED = {"hook/dcp_metadata_child.py"}
"""Unpickles, in a process of its own that has given up everything; nobody may import it."""
LOADS_WEIGHTS = {"hook/import_files.py"}
"""May call torch.load, always with weights_only=True."""
READS_PICKLE = {"load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"}
IMPURE = {
    "aiofiles", "asyncio", "cffi", "concurrent", "ctypes", "datetime", "fcntl", "grpc", "logging", "mmap",
    "multiprocessing", "os", "platform", "queue", "random", "resource", "secrets", "select", "selectors", "shutil",
    "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "torch", "uuid", "warnings",
}  # fmt: skip
PURE_SUFFIXES = ("_machine", "_plan", "_format")
PURE_PATHS = {"PurePath", "PurePosixPath"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
TOUCHES_THE_WORLD = {"open", "print", "input"}


@functools.cache
def modules(folder: str) -> tuple[tuple[str, Path, ast.Module], ...]:
    """Return (folder, path, syntax tree) of every module of a folder that is not generated."""
    return tuple(
        (folder, path, ast.parse(path.read_text(), filename=str(path)))
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in path.name
    )


def sources(*folders: str) -> Iterator[tuple[str, Path, ast.Module]]:
    """Yield the modules of these folders, or of all."""
    return chain.from_iterable(modules(folder) for folder in folders or tuple(MAY_IMPORT))


def imported(tree: ast.Module) -> Iterator[tuple[int, str, frozenset[str]]]:
    """Yield (relative level, first name, names taken from it) of every import, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name.split(".")[0], frozenset[str]()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = frozenset(alias.name for alias in node.names)
            if node.module:
                yield node.level, node.module.split(".")[0], names
            else:
                yield from ((node.level, name, frozenset[str]()) for name in names)


def absolute(tree: ast.Module) -> set[str]:
    return {name for level, name, _ in imported(tree) if level == 0}


def called(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield (plain or dotted name, call) of every call whose function is written as a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_only_point_down(folder: str) -> None:
    for _, path, tree in sources(folder):
        outside = 1 + len(path.relative_to(ROOT / folder).parts)  # 2 dots, in a sub-package 3
        up = {name for level, name, _ in imported(tree) if level == outside}
        assert up <= MAY_IMPORT[folder], f"{path}: imports {sorted(up - MAY_IMPORT[folder])} by '..'"
        assert not [name for level, name, _ in imported(tree) if level > outside], path
        siblings = absolute(tree) & {"everstep", *MAY_IMPORT}
        assert not siblings, f"{path}: {sorted(siblings)} must be imported relatively ('..')"


def test_node_side_knows_neither_torch_nor_numpy() -> None:
    for _, path, tree in sources("core", "proto", "checkpoint", "daemon"):
        assert not absolute(tree) & TRAINING, f"{path}: {sorted(absolute(tree) & TRAINING)}"


def test_only_the_daemon_knows_the_control_api_and_its_tools() -> None:
    for _, path, tree in sources("core", "proto", "checkpoint", "dataloader", "hook"):
        found = absolute(tree) & ONLY_THE_DAEMON
        assert not found, f"{path}: {sorted(found)}; a trainer forks and must stay free of it"


def test_the_product_imports_no_test_helper() -> None:
    for _, path, tree in sources():
        if path.stem.endswith("testing"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                parts = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
                helpers = {part for part in parts if part.endswith("testing")}
                assert not helpers, f"{path}:{node.lineno}: imports {sorted(helpers)}"


def test_pure_modules_import_nothing_that_acts() -> None:
    for _, path, tree in sources():
        if not path.stem.endswith(PURE_SUFFIXES):
            continue
        assert not absolute(tree) & IMPURE, f"{path}: {sorted(absolute(tree) & IMPURE)}"
        for level, name, taken in imported(tree):
            if level == 0 and name == "pathlib":
                assert taken, f"{path}: import PurePath by name"
                assert taken <= PURE_PATHS, f"{path}: {sorted(taken)}"
        acts = {name for name, _ in called(tree)} & TOUCHES_THE_WORLD
        acts |= {name for name, _ in called(tree) if "random" in name.split(".")}
        assert not acts, f"{path}: calls {sorted(acts)}"


def test_nothing_unpickles_or_runs_text() -> None:
    for _, path, tree in sources():
        place = str(path.relative_to(ROOT))
        assert not {name for _, name, _ in imported(tree)} & {Path(each).stem for each in UNPRIVILEGED}, path
        if place in UNPRIVILEGED:
            assert not [level for level, _, _ in imported(tree) if level], f"{path}: it has no package"
            continue
        if place in WRITES_PICKLES:
            assert absolute(tree) & UNSAFE == {"pickle"}
            read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & READS_PICKLE
            read |= {name for _, module, taken in imported(tree) if module == "pickle" for name in taken}
            assert not read, f"{path}: {sorted(read)}"
        else:
            assert not absolute(tree) & UNSAFE, f"{path}: {sorted(absolute(tree) & UNSAFE)}"
        for name, call in called(tree):
            where = f"{path}:{call.lineno}: {name}"
            if place in LOADS_WEIGHTS and name == "torch.load":
                safe = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert safe.get("weights_only") == "True", where
                continue
            assert name not in RUNS_TEXT, where
            assert name not in {
                "os.system",
                "os.popen",
                "torch.load",
                "torch.save",
                "np.load",
                "numpy.load",
            }, where
            for keyword in call.keywords:
                assert keyword.arg not in {"shell", "allow_pickle"}, f"{where} with {keyword.arg}="


def modules_after(statement: str) -> set[str]:
    """Run a statement in a new interpreter and return the first names of all modules that are loaded then."""
    code = f"{statement}\nimport sys\nsys.stdout.write('\\n'.join({{n.split('.')[0] for n in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_root_package_is_cheap() -> None:
    loaded = modules_after("import everstep; everstep.__version__; dir(everstep)")
    assert not loaded & (TRAINING | ONLY_THE_DAEMON | {"msgspec", "asyncio"})


def test_the_shipped_test_helpers_need_no_test_tool() -> None:
    helpers = [f"{folder}.{path.stem}" for folder, path, _ in sources() if path.stem.endswith("testing")]
    assert helpers
    loaded = modules_after("; ".join(f"import everstep.{helper}" for helper in helpers))
    assert not loaded & {"pytest", "_pytest", "hypothesis"}


@pytest.mark.parametrize("module", ["cli.main", "main"])
def test_daemon_and_command_line_start_without_torch(module: str) -> None:
    loaded = modules_after(f"import everstep.daemon.{module}")
    assert not loaded & TRAINING

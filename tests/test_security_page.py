"""SECURITY.md names a test for each threat, and each of them exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "SECURITY.md").read_text()
THREATS = PAGE.partition("## Threats")[2]
ROWS = [line for line in THREATS.splitlines() if line.startswith("|")][2:]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(?:\w+::)?(\w+)`")


def test_every_threat_has_a_test_that_exists() -> None:
    assert len(ROWS) >= 16
    for row in ROWS:
        named = NAMED.findall(row)
        assert named, row
        for path, name in named:
            assert (ROOT / path).is_file(), path
            functions = [
                node.name for node in ast.walk(ast.parse((ROOT / path).read_text()))
                if isinstance(node, ast.FunctionDef)
            ]  # fmt: skip
            assert name in functions, f"{path} has no {name}"


def test_the_node_side_starts_no_shell() -> None:
    """Beside what tests/test_layers.py forbids: no shell as a program, no process from a string."""
    forbidden = {"os.execl", "os.execlp", "os.spawnl", "subprocess.getoutput", "pty.spawn"}
    forbidden |= {"subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "code.interact"}
    for folder in ("daemon", "checkpoint", "core", "proto"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    assert ast.unparse(node.func) not in forbidden, f"{path}:{node.lineno}"
                    texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                    starts = ast.unparse(node.func).startswith(
                        ("subprocess.", "os.exec", "asyncio.create_sub")
                    )
                    assert not (starts and {"sh", "bash", "/bin/sh", "-c"} & {*map(str, texts)}), (
                        f"{path}:{node.lineno}: a shell, or a program as text"
                    )

"""Build the source distribution and, from it, the wheel into a folder.

They are built from a copy that holds only what belongs in them: `build/` in a checkout keeps files that were
deleted or renamed since, and setuptools would pack them. Usage: build_wheel.py FOLDER
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("pyproject.toml", "README.md", "LICENSE", "docs/everstep.1")
FOLDERS = ("everstep", "core", "proto", "checkpoint", "dataloader", "daemon", "hook")


def build_wheel(target: Path) -> Path:
    """Return the path of the wheel; the source distribution lies beside it."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "everstep"
        copy.mkdir()
        for name in FILES:
            (copy / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"build failed with exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    (wheel,) = target.glob("everstep-*.whl")
    return wheel


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(build_wheel(Path(sys.argv[1]).resolve()))

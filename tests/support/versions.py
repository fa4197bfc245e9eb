"""Two versions of everstep side by side: this one, and an earlier one out of the history of the repository."""

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest

from everstep.hook.trainer_start_testing import Process

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "proto", "checkpoint", "dataloader", "daemon", "hook")
TRAIN = Path("tests/scripts/small_train.py")
COMMIT = ROOT / "tests" / "system" / "earlier_version.txt"
"""Names the commit that counts as the version before this one: what was published last."""


@dataclass(frozen=True, slots=True)
class Version:
    """One of them: everything that it runs is its own, its test script included."""

    name: str
    script: Path
    path: str
    """Where Python finds its package; empty: where it is installed."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a process of this version and all that it starts."""
        return {"PYTHONPATH": self.path} if self.path else {}

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run Python with these arguments to its end."""
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self.environment},
        )

    def start(self, arguments: list[str], log: Path) -> Process:
        """Start a trainer; see trainer_start_testing.Start."""
        with log.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-P", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )

    def protocol(self) -> int:
        """Return what it speaks on the data socket."""
        done = self.run("-c", "from everstep.proto.frames import PROTOCOL; print(PROTOCOL)")
        assert done.returncode == 0, done.stderr
        return int(done.stdout)


def this_version() -> Version:
    """Return what is being tested."""
    return Version("this", ROOT / TRAIN, "")


def earlier_version(folder: Path) -> Version:
    """Unpack the earlier version into a folder; the test is skipped where the history does not reach back to it."""
    commit = COMMIT.read_text().strip()
    wanted = ["everstep", *FOLDERS, str(TRAIN)]
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", commit, *wanted], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(
            f"needs the history of the repository back to {commit[:7]}: {done.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    for name in FOLDERS:
        (folder / name).rename(folder / "everstep" / name)
    found = Version("earlier", folder / TRAIN, str(folder))
    where = found.run("-c", "import everstep.hook; print(everstep.hook.__file__)")
    assert where.stdout.startswith(str(folder)), where
    return found

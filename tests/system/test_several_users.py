"""Two users train with one daemon that root started: killed, each gets its own back, by commands as its uid, too."""

import hashlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from users import UIDS

from everstep.daemon.testing import node_daemon

pytestmark = pytest.mark.root

A, B = UIDS[:2]
SAME, ONLY_A = "the-same-name", "alpha-of-a"
SERVICE = "nobody"

TRAIN = """
import hashlib, json, os, signal, sys
import torch
from torch import nn
import everstep

uid, name, is_new = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "new"
torch.set_num_threads(1)
torch.manual_seed(uid if is_new else 1)
model = nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

def digest():
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()

with everstep.attach(name, model=model, optimizer=optimizer, storage=["nvme0", "nvme1"], every=10**6) as run:
    restored = run.restore()
    if restored is not None:
        print(json.dumps({"restored": digest()}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    while run.report().checkpoints_complete < 2:
        run.checkpoint()
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        run.step()
        assert run.wait(60)
    print(json.dumps({"saved": digest()}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can pass, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="es-users-", dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def runs_for_others(python: Path, place: Path) -> bool:
    try:
        return as_user(A, place, python, "-P", "-c", "import torch, everstep.hook.run").returncode == 0
    except PermissionError:
        return False


@pytest.fixture
def python(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that every user can run, with the packages of this one: that may stand in root's own folder."""
    found = Path(sys.executable)
    if not runs_for_others(found, place):
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = place / "venv" / "lib" / version / "site-packages"
        packages.mkdir(parents=True)
        (place / "venv" / "bin").mkdir()
        (place / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
        (packages / "these.pth").write_text(
            f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        )
        found = place / "venv" / "bin" / "python"
        found.symlink_to(f"/usr/bin/{version}")
        if not runs_for_others(found, place):
            pytest.skip(f"neither {sys.executable} nor /usr/bin/{version} runs everstep for other users")
    monkeypatch.setattr(sys, "executable", str(found))
    return found


@pytest.fixture
def config(place: Path) -> Path:
    """Of a daemon that becomes another user and lets both in."""
    service = pwd.getpwnam(SERVICE)
    for name, mode in (("s", 0o711), ("d0", 0o700), ("d1", 0o700)):
        (place / name).mkdir()
        (place / name).chmod(mode)
        os.chown(place / name, service.pw_uid, service.pw_gid)
    path = place / "node.toml"
    path.write_text(
        f'[devices]\nnvme0 = "{place}/d0"\nnvme1 = "{place}/d1"\n'
        f'[daemon]\nsocket = "{place}/s/data.sock"\nuser = "{SERVICE}"\nusers = ["{A}", "{B}"]\n'
    )
    return path


def as_user(uid: int, place: Path, *command: str | Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "EVERSTEP_SOCKET": str(place / "s" / "data.sock"), "HOME": str(place)}
    environment.pop(
        "TORCHINDUCTOR_CACHE_DIR", None
    )  # a folder of this user's, which torch names once it is imported
    return subprocess.run(
        command,
        user=uid,
        group=uid,
        extra_groups=[],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def everstep(uid: int, place: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return as_user(uid, place, sys.executable, "-P", "-m", "everstep.daemon.cli.main", *arguments)


def trained(uid: int, place: Path, name: str, *, is_new: bool) -> dict[str, Any]:
    """Train until two checkpoints are complete, or restore; then be killed."""
    done = as_user(
        uid, place, sys.executable, "-P", "-c", TRAIN, str(uid), name, "new" if is_new else "again"
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return json.loads(done.stdout)


def digest_of(exported: Path) -> str:
    model = torch.load(exported / "checkpoint.pt", weights_only=True)["model"]
    parts = b"".join(model[name].numpy().tobytes() for name in ("weight", "bias"))
    return hashlib.sha256(parts).hexdigest()


@pytest.mark.usefixtures("python")
def test_each_gets_its_own_back_and_sees_no_others(place: Path, config: Path) -> None:
    with node_daemon(config, place / "s" / "data.sock") as daemon:
        saved = {uid: trained(uid, place, SAME, is_new=True)["saved"] for uid in (A, B)}
        trained(A, place, ONLY_A, is_new=True)
        assert saved[A] != saved[B]
        daemon.kill()
        daemon.wait()
    with node_daemon(config, place / "s" / "data.sock"):
        for uid in (A, B):
            assert trained(uid, place, SAME, is_new=False) == {"restored": saved[uid]}
        said = everstep(B, place, "ls", "--json")
        assert said.returncode == 0, said.stderr
        assert SAME in said.stdout
        for command in (["status"], ["runs"], ["device", "ls"]):
            said = everstep(B, place, *command)
            assert said.returncode == 0, (command, said.stderr)
            assert ONLY_A not in said.stdout + said.stderr, command
            assert str(A) not in said.stdout + said.stderr, command
        for command in ("show", "rm"):
            foreign, absent = (everstep(B, place, command, f"{name}@1.1") for name in (ONLY_A, "alpha-of-x"))
            assert foreign.returncode == absent.returncode != 0, (command, foreign)
            assert foreign.stderr.replace(ONLY_A, "alpha-of-x") == absent.stderr
        for uid in (A, B):  # the files are the service's: the daemon lends them
            target = place / f"of-{uid}"
            target.mkdir()
            os.chown(target, uid, uid)
            done = everstep(uid, place, "export", SAME, target / "out", "--to", "torch")
            assert done.returncode == 0, done.stderr
            assert digest_of(target / "out") == saved[uid]
        refused = everstep(A, place, "ls", "--storage", place / "d0", "--storage", place / "d1")
        assert refused.returncode != 0
        assert "ask the daemon that has it" in refused.stderr
        assert "Traceback" not in refused.stderr

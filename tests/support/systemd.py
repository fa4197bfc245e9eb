"""A systemd of a test's own: the init of new namespaces, with a unit path that holds what the test puts there.

Nothing of this machine's systemd is started: its unit path is not looked at. /run, /var and /mnt are the test's own.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pausing import wait_until

SYSTEMD = Path("/lib/systemd/systemd")
PYTHON_HOME = Path(sys.executable).resolve().parents[1]
DEADLINE_S = 60.0
TARGETS = ("sysinit", "basic", "sockets", "local-fs", "multi-user", "shutdown")
"""What services depend on by themselves."""
_INIT = """
for each in /run /var; do mount -t tmpfs tmpfs $each; done
mkdir -p /var/tmp /run/lock
mount --bind "$DRIVES" /mnt
export container=test SYSTEMD_UNIT_PATH="$UNITS" SYSTEMD_GENERATOR_PATH="$UNITS/none"
exec "$0" --system --unit=basic.target --log-target=kmsg --show-status=no
"""


def reason_against() -> str:
    """Return why there can be none here; empty: there can."""
    if os.geteuid():
        return "a systemd of one's own needs root"
    if not SYSTEMD.exists() or shutil.which("unshare") is None:
        return "needs systemd and unshare (Debian: apt-get install systemd)"
    if Path("/run/systemd/system").exists():
        return "a systemd runs this machine: its control groups are its own"
    return ""


@dataclass(frozen=True, slots=True)
class Systemd:
    """It runs; `units` is where it looks for units, `drives` is what its processes see as /mnt."""

    pid: int
    units: Path
    drives: Path

    def run(self, *command: object, code: int | None = 0) -> str:
        """Run a command beside its services; return what it says."""
        done = subprocess.run(
            [*self._inside, *map(str, command)],
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    @contextmanager
    def start(self, *command: str) -> Generator["subprocess.Popen[bytes]"]:
        """Run a command beside its services, and meanwhile the block."""
        process = subprocess.Popen([*self._inside, *command], stderr=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--ipc", "--uts"]

    def ctl(self, *arguments: object) -> str:
        """Call systemctl."""
        return self.run("systemctl", "--no-pager", *arguments)

    def shows(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.ctl("show", "--value", "--property", name, unit).strip()

    def put(self, name: str, text: str) -> None:
        """Write a unit or a drop-in, and let systemd read it."""
        path = self.units / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        self.ctl("daemon-reload")


@contextmanager
def systemd(folder: Path) -> Generator[Systemd]:
    """Run one, with its units and drives in a folder; everything in it ends with the block."""
    units, drives = folder / "units", folder / "drives"
    units.mkdir()
    drives.mkdir()
    for name in TARGETS:
        (units / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    environment = {**os.environ, "UNITS": str(units), "DRIVES": str(drives)}
    namespaces = ["--fork", "--pid", "--mount", "--uts", "--ipc", "--cgroup", "--mount-proc"]
    starter = subprocess.Popen(
        ["unshare", *namespaces, "--propagation", "private", "sh", "-ec", _INIT, SYSTEMD],
        env=environment,
        stderr=subprocess.DEVNULL,  # unshare complains of an init that was killed
    )
    children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
    pid = 0
    try:
        wait_until(lambda: bool(children.read_text().split()))
        pid = int(children.read_text().split()[0])
        found = Systemd(pid, units, drives)
        wait_until(lambda: "active" in found.run("systemctl", "is-active", "basic.target", code=None).split())
        yield found
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)  # with it ends whatever runs in its namespace
        starter.wait(DEADLINE_S)
        _remove_control_groups()


def _remove_control_groups() -> None:
    """Remove what it has made; no systemd runs this machine, so that nobody else's have these names."""
    root = Path("/sys/fs/cgroup")
    for name in ("init.scope", "system.slice"):
        for made in [*root.glob(name), *root.glob(f"*/{name}")]:
            for each in sorted((path for path in [made, *made.rglob("*")] if path.is_dir()), reverse=True):
                each.rmdir()

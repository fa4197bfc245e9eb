"""The units as they are shipped: what systemd says of them, and that they fit what the daemon does."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from everstep.checkpoint.engine_process import STALL_TIMEOUT_S
from everstep.daemon.config import DaemonConfig
from everstep.daemon.fd_store.inherited_plan import DATA_SOCKET
from everstep.daemon.watchdog import PATIENCE

UNITS = Path(__file__).resolve().parents[2] / "deploy/systemd"
SERVICES = ("everstep.service", "everstep@.service")
EXPOSURE_MAX = 2.0


class _Unit(configparser.ConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr


def unit(name: str) -> _Unit:
    parser = _Unit(strict=False, interpolation=None)
    parser.read(UNITS / name)
    return parser


@pytest.mark.parametrize("name", SERVICES)
def test_little_is_exposed(name: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (Debian: apt-get install systemd)")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", UNITS / name],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) <= EXPOSURE_MAX, done.stdout


def test_systemd_reads_every_line() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (Debian: apt-get install systemd)")
    units = [UNITS / name for name in ("everstep.service", "everstep.socket", "everstep@.socket")]
    said = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False
    ).stderr
    not_here = ("/usr/bin/everstep is not executable", "man everstep", "FileDescriptorStorePreserve")
    assert [
        line
        for line in said.splitlines()
        if "everstep" in line and not any(each in line for each in not_here)
    ] == []


@pytest.mark.parametrize("name", SERVICES)
def test_the_times_fit_those_of_the_daemon(name: str) -> None:
    service = unit(name)["Service"]
    assert int(service["WatchdogSec"]) * PATIENCE > STALL_TIMEOUT_S
    assert int(service["TimeoutStopSec"]) > DaemonConfig().daemon.drain_s
    assert int(service["FileDescriptorStoreMax"]) > 0
    assert (service["Type"], service["Restart"]) == ("notify", "always")


@pytest.mark.parametrize("name", SERVICES)
def test_the_socket_is_in_the_directory_that_stays(name: str) -> None:
    service = unit(name)["Service"]
    listening = unit(name.replace("service", "socket"))["Socket"]
    assert listening["ListenStream"] == f"/run/{service['RuntimeDirectory']}/data.sock"
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert listening["FileDescriptorName"] == DATA_SOCKET
    assert listening["SocketUser"] == service["User"]


def test_both_services_are_in_the_same_sandbox() -> None:
    own = {"ExecStart", "User", "Group", "RuntimeDirectory", "StateDirectory"}
    one, other = (
        {key: value for key, value in unit(name)["Service"].items() if key not in own} for name in SERVICES
    )
    assert one == other

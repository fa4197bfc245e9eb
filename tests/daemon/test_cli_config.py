"""`everstep config check` and `show`, of files and of a real daemon."""

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from scraping import scrape

from everstep.daemon.access.certificate_format import expiry_unix_s
from everstep.daemon.configuration.fit_plan import MachineFacts, Misfit, NamedFile, Port, misfits
from everstep.daemon.control.client import connected
from everstep.daemon.nodes.testing import free_port
from everstep.daemon.testing import node_daemon

EVERSTEP = Path(sys.executable).with_name("everstep")
GIB = 2**30
FACTS = MachineFacts(
    total_bytes=64 * GIB, available_bytes=32 * GIB, config_path="/etc/node.toml", config_mode=0o644
)


def config(*arguments: str | Path, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [EVERSTEP, "config", *arguments],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == code, done
    return done.stdout + done.stderr


def check(path: Path, code: int = 0, **environment: str) -> Any:
    return json.loads(config("check", "--json", path, code=code, **environment))


def test_a_right_file_is_right_and_what_the_machine_warns_of_is_no_failure(
    node_config: Path, devices: list[Path]
) -> None:
    found = check(node_config)
    assert found["verdict"] == "warn"  # both directories lie on one drive
    assert {each["key"] for each in found["machine"]} <= {"devices.nvme0", "devices.nvme1"}
    assert found["machine"][0]["place"] == f"{node_config}:2"
    assert config("check", "--no-machine", node_config) == f"ok    {node_config}: nothing is wrong\n"
    assert list(devices[0].iterdir()) == []


def test_what_is_wrong_is_named_with_line_key_and_what_to_do(node_config: Path) -> None:
    node_config.write_text(node_config.read_text() + "[io]\nengin = 'aio'\n[scrub]\nevery = 3\n")
    text = config("check", node_config, code=1)
    assert f"fail  {node_config}:7: there is no key io.engin\n      -> did you mean engine?" in text
    assert f"fail  {node_config}:9: scrub.every is 3, expected a text in quotes" in text
    config("check", node_config.with_name("absent.toml"), code=3)


def test_what_the_machine_cannot_give_is_named(node_config: Path, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("x" * 40)
    secret.chmod(0o644)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        node_config.write_text(
            f'[devices]\ngone = "{tmp_path / "gone"}"\n[metrics]\nport = {port}\n[memory]\n'
            f'reserve_bytes = {1 << 50}\n[cache]\nlisten = "127.0.0.1:{port}"\ntoken_file = "{secret}"\n'
        )
        found = check(node_config, code=1)
    fatal = {each["key"]: each for each in found["machine"] if each["is_fatal"]}
    assert set(fatal) == {
        "devices.gone",
        "metrics.port",
        "memory.reserve_bytes",
        "cache.listen",
        "cache.token_file",
    }
    assert fatal["devices.gone"]["place"] == f"{node_config}:2"
    assert "no such directory" in fatal["devices.gone"]["found"]
    assert "Address already in use" in fatal["metrics.port"]["found"]
    assert fatal["cache.token_file"]["advice"] == f"chmod 0600 {secret}"


def test_the_port_of_the_running_daemon_is_its_own(node_config: Path, socket_path: Path) -> None:
    port = free_port("127.0.0.1")
    node_config.write_text(node_config.read_text() + f"[metrics]\nport = {port}\n")
    with node_daemon(node_config, socket_path):
        assert "metrics.port" not in config("check", node_config)
        assert "metrics.port" not in config("check")  # the daemon's own file


def test_what_is_shown_can_be_read_again(node_config: Path, tmp_path: Path) -> None:
    text = config("show", "--defaults", "--origin", node_config, "--set", "io.queue_depth=64")
    again = tmp_path / "again.toml"
    again.write_text(text)
    lines = text.splitlines()
    assert [each.split("#")[1].strip() for each in lines if each.startswith("queue_depth")] == [
        "--set io.queue_depth"
    ]
    assert [each.split("#")[1].strip() for each in lines if each.startswith("nvme0")] == [f"{node_config}:2"]
    assert tomllib.loads(config("show", "--defaults", again)) == tomllib.loads(text)
    assert "socket_mode = 0o666 " in text, "as a person writes a mode"
    assert set(tomllib.loads(config("show", node_config))) == {"daemon", "devices"}


def test_a_table_of_clients_is_shown_by_file_and_by_the_daemon(
    node_config: Path, socket_path: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("node", "IP:127.0.0.1")
    node_config.write_text(
        f"{node_config.read_text()}[control]\nlisten = '127.0.0.1:0'\ncertificate_file = '{pair.certificate}'\n"
        f"key_file = '{pair.key}'\nauthority_file = '{authority.certificate}'\n[control.clients]\n"
        '"grafana.example.org" = {role = "viewer"}\n'
    )
    with node_daemon(node_config, socket_path):
        for text in (config("show", node_config), config("show")):
            clients = tomllib.loads(text)["control"]["clients"]
            assert clients == {"grafana.example.org": {"role": "viewer", "user": "*"}}
        with connected(socket_path) as client:
            samples = scrape(client.status().daemon.metrics_port)
        assert samples["everstep_certificate_expiry_timestamp_seconds{control}"] == expiry_unix_s(
            pair.certificate.read_bytes()
        )
        assert not any(name.endswith(("{cache}", "{metrics}")) for name in samples)
        assert config("reload", "--dry-run") == f"{node_config}: nothing would change\n"


def test_the_environment_is_part_of_what_is_shown(node_config: Path) -> None:
    text = config("show", "--origin", node_config, EVERSTEP_RETENTION__KEEP_LAST="9")
    assert "EVERSTEP_RETENTION__KEEP_LAST" in text
    assert "did you mean EVERSTEP_IO__ENGINE" in config("show", node_config, code=2, EVERSTEP_IO__ENGIN="aio")


def test_without_a_daemon_or_a_file_there_is_nothing_to_show() -> None:
    assert "no daemon answers" in config("show", code=3)
    assert "--set needs a file" in config("show", "--set", "io.queue_depth=3", code=2)


def found(facts: MachineFacts, **bounds: int) -> list[Misfit]:
    wanted = {"reserve_bytes": GIB, "arena_max_bytes": 1 << 60, "cache_max_bytes": 1 << 60} | bounds
    return misfits(facts, **wanted)


def test_a_machine_that_gives_all_has_no_misfit() -> None:
    assert found(FACTS) == []
    assert found(FACTS, arena_max_bytes=64 * GIB, cache_max_bytes=1) == []


@pytest.mark.parametrize(
    ("facts", "bounds", "key", "is_fatal"),
    [
        ({}, {"reserve_bytes": 64 * GIB}, "memory.reserve_bytes", True),
        ({}, {"arena_max_bytes": 65 * GIB}, "memory.arena_max_bytes", False),
        ({}, {"cache_max_bytes": 65 * GIB}, "memory.cache_max_bytes", False),
        ({"config_mode": 0o664}, {}, "", False),
        ({"files": [NamedFile(key="a.x_file", path="/x", problem="No such file")]}, {}, "a.x_file", True),
        ({"files": [NamedFile(key="cache.key_file", path="/x", mode=0o640)]}, {}, "cache.key_file", True),
        ({"ports": [Port(key="metrics.port", place="a:1", problem="taken")]}, {}, "metrics.port", True),
    ],
)
def test_each_misfit(facts: dict[str, Any], bounds: dict[str, int], key: str, is_fatal: bool) -> None:
    import dataclasses

    (misfit,) = found(dataclasses.replace(FACTS, **facts), **bounds)
    assert (misfit.key, misfit.is_fatal) == (key, is_fatal)
    assert misfit.advice


def test_what_is_ours_or_public_is_no_misfit() -> None:
    import dataclasses

    ours = Port(key="metrics.port", place="a:1", problem="taken", is_ours=True)
    public = NamedFile(key="cache.certificate_file", path="/x", mode=0o644)
    assert found(dataclasses.replace(FACTS, ports=[ours], files=[public])) == []

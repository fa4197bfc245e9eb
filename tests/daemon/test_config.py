"""The daemon's configuration: strict keys and types, each error with the key and the file."""

from pathlib import Path

import pytest

from everstep.checkpoint.keep import Keep
from everstep.core.errors import ConfigError
from everstep.daemon.config import GIB, DaemonConfig, load_config, private_config

DEVICES = '[devices]\nnvme0 = "/nvme0/everstep"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.toml"


def test_devices_alone_are_enough(path: Path) -> None:
    path.write_text(DEVICES)
    config = load_config(path)
    assert config.devices == {"nvme0": "/nvme0/everstep"}
    assert (config.daemon.linger_s, config.memory.reserve_bytes, config.retention.keep_last) == (
        600.0,
        GIB,
        3,
    )
    assert config.metrics.enabled


def test_every_key_is_taken(path: Path) -> None:
    path.write_text(
        '[daemon]\nsocket = "/run/x/data.sock"\nlinger_s = 1\ndrain_s = 2.5\n'
        "[memory]\narena_max_bytes = 4096\nreserve_bytes = 0\n"
        "[metrics]\nenabled = false\nport = 9400\n"
        '[io]\nengine = "uring"\nprocess = true\nregister_arenas = true\n'
        '[scrub]\nevery = "30d"\nbandwidth_share = 0.05\n'
        '[retention]\nkeep_last = 2\nevery_steps = 1000\nevery = "6h"\n' + DEVICES
    )
    config = load_config(path)
    assert config.socket_path() == Path("/run/x/data.sock")
    assert (config.daemon.linger_s, config.daemon.drain_s) == (1.0, 2.5)
    assert (config.memory.arena_max_bytes, config.memory.reserve_bytes) == (4096, 0)
    assert (config.metrics.enabled, config.metrics.port) == (False, 9400)
    assert (config.io.engine, config.io.process, config.io.register_arenas) == ("uring", True, True)
    assert (config.scrub.every_s, config.scrub.bandwidth_share) == (30 * 86400, 0.05)
    assert config.retention.keep() == Keep(last=2, every_steps=1000, every="6h")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[daemon]\nlinger = 3\n", r"node\.toml.*linger.*did you mean linger_s\?"),
        ("[daemons]\nlinger_s = 3\n", r"daemons.*did you mean daemon\?"),
        ("[retention]\nkeep_lst = 3\n", r"keep_lst.*did you mean keep_last\?"),
        ("[retention]\ncolour = 3\n", r"colour.*see docs/configuration\.md"),
        ('[retire]\nmissing_after = "soon"\n', r"retire\.missing_after.*'soon'"),
        ('[retire]\nmissing_after = "0d"\n', r"retire\.missing_after"),
        ('[daemon]\nlinger_s = "long"\n', r"daemon\.linger_s"),
        ("[daemon]\nsocket = 7\n", r"daemon\.socket"),
        ("[memory]\nreserve_bytes = 1.5\n", r"memory\.reserve_bytes"),
        ("[metrics]\nenabled = 1\n", r"metrics\.enabled"),
        ("[metrics]\nport = 70000\n", r"metrics\.port is 70000.*0 to 65535"),
        ("[io]\nengine = 'mmap'\n", r"io\.engine is 'mmap'.*auto, aio, uring, plain"),
        ("[retention]\nkeep_last = 1\n", r"retention\.keep_last is 1.*at least 2"),
        ("[retention]\nevery_steps = 0\n", "every_steps is 0"),
        ('[retention]\nevery = "daily"\n', "every is 'daily'.*such as '6h'"),
        ('[scrub]\nevery = "weekly"\n', r"scrub\.every is 'weekly'.*or 'never'"),
        ("[scrub]\nbandwidth_share = 0\n", r"scrub\.bandwidth_share is 0.*above 0"),
        ("[scrub]\nbandwidth_share = 1.5\n", r"scrub\.bandwidth_share is 1\.5"),
        ("[scrub]\nbandwidth_share = nan\n", r"scrub\.bandwidth_share is nan"),
        ("[memory]\nreserve_bytes = -1\n", r"node\.toml:2: memory\.reserve_bytes is -1"),
        ("[daemon]\ndrain_s = -0.1\n", r"daemon\.drain_s is -0\.1.*0 or more"),
        ("[daemon]\nlinger_s = nan\n", r"daemon\.linger_s is nan"),
        ("[[[", "node.toml"),
    ],
)
def test_what_is_wrong_is_named(path: Path, text: str, words: str) -> None:
    path.write_text(text + DEVICES)
    with pytest.raises(ConfigError, match=words):
        load_config(path)


@pytest.mark.parametrize("value", ['"nvme0/everstep"', '""', "7"])
def test_a_device_is_an_absolute_directory(path: Path, value: str) -> None:
    path.write_text(f"[devices]\nnvme0 = {value}\n")
    with pytest.raises(ConfigError, match=r"nvme0|devices"):
        load_config(path)


def test_bytes_that_are_no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe" + DEVICES.encode())
    with pytest.raises(ConfigError, match=r"node\.toml"):
        load_config(path)


def test_a_node_without_devices_is_of_no_use(path: Path) -> None:
    path.write_text("[daemon]\nlinger_s = 3\n")
    with pytest.raises(ConfigError, match=r"node\.toml names no devices.*\[devices\]"):
        load_config(path)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*node\.toml: No such file.*--config"):
        load_config(path)


class TestPrivate:
    def test_the_environment_changes_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EVERSTEP_LINGER_S", "2.5")
        monkeypatch.setenv("EVERSTEP_METRICS_PORT", "9400")
        config = private_config()
        assert config.daemon.linger_s == 2.5
        assert (config.metrics.enabled, config.metrics.port) == (True, 9400)

    def test_port_0_is_any_free_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EVERSTEP_METRICS_PORT", "0")
        assert (private_config().metrics.enabled, private_config().metrics.port) == (True, 0)

    def test_by_default_it_lingers_ten_minutes_and_opens_no_port(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("EVERSTEP_LINGER_S", raising=False)
        monkeypatch.delenv("EVERSTEP_METRICS_PORT", raising=False)
        config = private_config()
        assert config == DaemonConfig(metrics=config.metrics)
        assert config.daemon.linger_s == 600
        assert not config.metrics.enabled

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("EVERSTEP_LINGER_S", "long"),
            ("EVERSTEP_LINGER_S", "-1"),
            ("EVERSTEP_METRICS_PORT", "http"),
            ("EVERSTEP_METRICS_PORT", "65536"),
        ],
    )
    def test_values_that_make_no_sense_are_shown(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"{value}|negative"):
            private_config()

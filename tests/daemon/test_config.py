"""The daemon's configuration is strict: a wrong key or value names itself."""

from pathlib import Path

import pytest

from everstep.core.errors import ConfigError
from everstep.daemon.config import load_config, private_config

DEVICES = '[devices]\nnvme0 = "/nvme0/everstep"\n'


def load(tmp_path: Path, text: str) -> object:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return load_config(path)


def test_defaults_and_devices(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(DEVICES + "[retention]\nkeep_last = 5\n")
    config = load_config(path)
    assert config.devices == {"nvme0": "/nvme0/everstep"}
    assert config.retention.keep_last == 5
    assert config.daemon.linger_s == 600.0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "names no devices"),
        (DEVICES + "[memory]\narena_max = 5\n", "arena_max"),
        (DEVICES + "[nonsense]\n", "nonsense"),
        (DEVICES + '[daemon]\nlinger_s = "long"\n', "linger_s"),
        (DEVICES + '[io]\nengine = "rocket"\n', "rocket"),
        (DEVICES + "[retention]\nkeep_last = 1\n", "keep_last is 1"),
        (DEVICES + "[metrics]\nport = 70000\n", "70000"),
        (DEVICES + "[memory]\nreserve_bytes = -1\n", "reserve_bytes"),
        ('[devices]\nnvme0 = "relative/path"\n', "relative/path"),
        ("[devices\n", "node.toml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")


def test_a_private_daemon_takes_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_LINGER_S", "5")
    monkeypatch.setenv("EVERSTEP_METRICS_PORT", "0")
    config = private_config()
    assert config.daemon.linger_s == 5.0
    assert config.metrics.enabled


def test_a_wrong_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_LINGER_S", "soon")
    with pytest.raises(ConfigError, match="soon"):
        private_config()

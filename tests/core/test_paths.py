"""Where a daemon listens, and whom its directory belongs to."""

import os
from pathlib import Path

import pytest

from everstep.core.errors import ConfigError
from everstep.core.paths import control_socket_path, data_socket_path, ensure_private_directory


def test_the_variable_names_the_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVERSTEP_SOCKET", str(tmp_path / "x.sock"))
    assert data_socket_path() == tmp_path / "x.sock"


def test_a_relative_one_is_of_the_present_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_SOCKET", "x.sock")
    assert data_socket_path() == tmp_path / "x.sock"


def test_without_it_the_uid_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERSTEP_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert data_socket_path(12345) == Path("/tmp/everstep-12345/data.sock")
    assert str(os.getuid()) in str(data_socket_path())


def test_the_control_socket_lies_beside() -> None:
    assert control_socket_path(Path("/a/data.sock")) == Path("/a/control.sock")
    assert control_socket_path(Path("/a/x")) == Path("/a/x.control")


class TestPrivateDirectory:
    def test_it_is_made_for_this_user_alone(self, tmp_path: Path) -> None:
        ensure_private_directory(tmp_path / "a")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
        ensure_private_directory(tmp_path / "a")

    @pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
    def test_open_to_others(self, tmp_path: Path, mode: int) -> None:
        path = tmp_path / "a"
        path.mkdir()
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 700 {path}"):
            ensure_private_directory(path)

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir(mode=0o700)
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(ConfigError, match=r"link is not a directory.*EVERSTEP_SOCKET"):
            ensure_private_directory(tmp_path / "link")

    @pytest.mark.root
    def test_of_somebody_else(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir(mode=0o700)
        os.chown(tmp_path / "a", 65534, 65534)
        with pytest.raises(ConfigError, match="belongs to uid 65534"):
            ensure_private_directory(tmp_path / "a")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("")
        with pytest.raises((ConfigError, FileExistsError)):
            ensure_private_directory(tmp_path / "a")

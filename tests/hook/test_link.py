"""Whose daemon a trainer speaks to: never a private one of its own in the place of the node's."""

from pathlib import Path

import pytest
from pausing import wait_until

from everstep.core.errors import DaemonUnavailableError
from everstep.core.paths import data_socket_path
from everstep.daemon.testing import node_daemon
from everstep.hook.link import Link, RunAddress
from everstep.proto.frames import Reply


def address(*storage: str) -> RunAddress:
    return RunAddress(name="r", rank=0, world_size=1, storage=storage, takeover=False)


class Ending(Link):
    """A link whose thread that looks for a daemon ends between any two looks at it."""

    def __init__(self) -> None:
        self.joined = 0
        self.looked = 0
        self.client = self  # pyright: ignore[reportIncompatibleVariableOverride, reportAttributeAccessIssue]

    @property
    def _reconnecting(self) -> "Ending | None":  # pyright: ignore[reportIncompatibleVariableOverride]
        self.looked += 1
        return self if self.looked == 1 else None

    def join(self) -> None:
        self.joined += 1

    def close(self) -> None:
        """Of the link at first, then of its client."""
        if not self.looked:
            super().close()


def ignored(event: Reply) -> None:
    pass


def test_a_link_that_is_closed_as_its_search_ends_is_closed() -> None:
    link = Ending()
    link.close()
    assert link.joined == 1


def test_device_names_start_no_private_daemon() -> None:
    with pytest.raises(DaemonUnavailableError) as caught:
        Link(address("d0", "d1"), ignored)
    assert "'d0'" in caught.value.message
    assert str(data_socket_path()) in caught.value.message
    assert "everstep daemon" in caught.value.hint
    assert not data_socket_path().exists()


def test_a_nodes_daemon_that_died_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device, config = tmp_path / "d0", tmp_path / "node.toml"
    device.mkdir()
    config.write_text(f'[devices]\nd0 = "{device}"\n[daemon]\nsocket = "{data_socket_path()}"\n')
    with node_daemon(config, data_socket_path()) as process:
        link = Link(address("d0"), ignored)
        link.begin_attempt(1, fresh=False)
        process.kill()
        wait_until(lambda: link.broken)
        link.keep_up(lambda: None)
        link.close()  # waits for the try to end
    assert "daemon_unavailable" in caplog.text
    assert "the node's" in caplog.text
    with pytest.raises(DaemonUnavailableError):
        Link(address("d0"), ignored)  # nobody listens there

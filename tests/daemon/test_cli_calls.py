"""The command line is complete: each rpc of node.proto has a command that makes this call, of a real daemon."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from everstep.core.ids import CheckpointId
from everstep.daemon.cli.command_tree import read_commands
from everstep.daemon.cli.main import main, make_parser
from everstep.daemon.control import link
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames, node_pb2_grpc
from everstep.proto import node_pb2 as pb

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Node"].methods]
COMMANDS: dict[str, str] = {
    "GetStatus": "status",
    "ListCheckpoints": "ls",
    "GetCheckpoint": "show RUN",
    "VerifyCheckpoint": "verify RUN",
    "StartScrub": "scrub",
    "InspectStores": "fsck",
    "TagCheckpoint": "tag NAME RUN",
    "UntagCheckpoint": "untag NAME RUN",
    "PinCheckpoint": "pin NAME RUN",
    "UnpinCheckpoint": "unpin NAME RUN",
    "ExportCheckpoint": "export RUN OUT --to safetensors",
    "ListRuns": "runs",
    "GetRun": "runs RUN",
    "ListSlots": "slots",
    "ListCaches": "cache list",
    "DropCache": "cache drop 1",
    "ListMembers": "cache members",
    "ListGroups": "shared list",
    "ListDevices": "device ls",
    "DrainDevice": "device drain nvme9",
    "RetireDevice": "device retire nvme9",
    "ReadmitDevice": "device readmit OUT",
    "WatchEvents": "events",
    "OpenWebSession": "web",
    "GetController": "controller show",
    "SetBudget": "controller budget RUN 2%",
    "ForceCheckpoint": "controller force RUN",
    "PauseCheckpoints": "controller pause RUN --ttl 1s",
    "ResumeCheckpoints": "controller resume RUN",
    "Drain": "drain",
    "IssueToken": "token --ttl 1h --stdout",
    "ListTokens": "token list",
    "RevokeToken": "token revoke 00000000",
    "GetQuotas": "quota",
    "ReloadConfig": "config reload",
    "RemoveCheckpoint": "rm RUN@1.1",
    "RemoveRun": "rm RUN --all",
    "Shutdown": "stop",
}
"""What is typed after `everstep`; the last ones take away what others look at."""


class Recorded(node_pb2_grpc.NodeStub):
    """A stub that notes what is called by it."""

    called: set[str]

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__(channel)
        Recorded.called = set()

    def __getattribute__(self, name: str) -> Any:
        if name in METHODS:
            Recorded.called.add(name)
        return super().__getattribute__(name)


@pytest.fixture
def saved(node_config: Path, socket_path: Path) -> Iterator[None]:
    """A node's daemon that has a checkpoint."""
    with node_daemon(node_config, socket_path):
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([Path("nvme0"), Path("nvme1")], name="RUN")
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 1), seed=1)
            trainer.event(frames.Persisted)
            arena.close()
        yield


def test_every_rpc_is_in_the_table_and_every_command_in_the_parser() -> None:
    assert sorted(COMMANDS) == sorted(METHODS), "a new rpc needs a command"
    ends = {each.path for each in read_commands(make_parser()).all() if not each.parts}
    for rpc, typed in COMMANDS.items():
        words = tuple(typed.split())
        assert words[:1] in ends or words[:2] in ends, rpc


@pytest.mark.usefixtures("saved")
def test_each_command_makes_its_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link.node_pb2_grpc, "NodeStub", Recorded)
    for rpc, typed in COMMANDS.items():
        Recorded.called = set()
        main([word.replace("OUT", str(tmp_path / "out")) for word in typed.split()])
        assert rpc in Recorded.called, (rpc, typed, capsys.readouterr())

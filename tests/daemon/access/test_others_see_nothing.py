"""Every call of the control API by another user of the node, by its real uid: "not yours" answers as "not there"."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pausing import wait_until
from users import begun, open_the_way, save, trainer_of

from everstep.core.ids import CheckpointId
from everstep.core.paths import control_socket_path
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

pytestmark = pytest.mark.root

OTHER_UID = 65534
MINE, NOBODYS = "run-of-root", "run-of-nobo"
THEIRS = "run-of-them"
"""As long as each other, so that messages differ in nothing else."""

CHILD = f"""
import json, os, sys
from pathlib import Path
import grpc
import everstep.daemon.control.service  # nothing is imported once this user may read nothing
from everstep.daemon.control.link import _greeted
from everstep.proto import node_pb2 as pb
from google.protobuf import message_factory

os.setgroups([])
os.setresgid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
os.setresuid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
CHECKPOINT, TOKEN = "1.1", sys.argv[2]
ALIKE = ("IssueToken", "WatchEvents", "OpenWebSession")  # about nobody's run

def filled(descriptor, run, token, number):
    '''A request about this run: every text and number in it is what one who knows of the run would say.'''
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.message_type is not None:
            if not field.message_type.GetOptions().map_entry and not field.is_repeated:
                getattr(message, field.name).CopyFrom(filled(field.message_type, run, token, number))
            continue
        if field.is_repeated or field.enum_type is not None:
            continue
        if field.type == field.TYPE_STRING:
            value = {{"checkpoint": CHECKPOINT, "token_id": token}}.get(field.name, run)
            setattr(message, field.name, value)
        elif field.type == field.TYPE_BOOL:
            pass
        elif field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            setattr(message, field.name, 1.0)
        elif field.type != field.TYPE_BYTES:
            setattr(message, field.name, number)
    return message

def answer(channel, metadata, method, request):
    path = f"/everstep.node.v1.Node/{{method.name}}"
    reply = message_factory.GetMessageClass(method.output_type).FromString
    kind = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = kind(path, request_serializer=type(request).SerializeToString, response_deserializer=reply)
    try:
        said = call(request, timeout=20, metadata=metadata)
        return ["OK", [str(each) for each in said] if method.server_streaming else str(said)]
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ["OK", "goes on"]
        hints = [str(value) for key, value in error.trailing_metadata() or () if key.startswith("everstep")]
        return [error.code().name, error.details(), hints]

found = {{}}
with _greeted(Path(sys.argv[1]), "") as hold:
    metadata = (("authorization", "Bearer " + hold.welcome.token),)
    with grpc.insecure_channel("unix:" + hold.welcome.control_socket) as channel:
        for method in pb.DESCRIPTOR.services_by_name["Node"].methods:
            if not method.input_type.fields or method.name in ALIKE:
                continue
            pair = []
            for run, token in (("{MINE}", TOKEN), ("{NOBODYS}", "0" * 8)):
                said = answer(channel, metadata, method, filled(method.input_type, run, token, 1))
                pair.append(json.dumps(said).replace(run, "RUN").replace(token, "TOKEN"))
            found[method.name] = pair
        lists = [
            answer(channel, metadata, method, message_factory.GetMessageClass(method.input_type)())
            for method in pb.DESCRIPTOR.services_by_name["Node"].methods
            if method.name.startswith(("Get", "List"))
        ]
print(json.dumps({{"pairs": found, "lists": json.dumps(lists)}}))
"""


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """In a folder that others can be let into, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="es-users-", dir="/tmp"))
    (folder / "s").mkdir(mode=0o700)
    yield folder / "s" / "data.sock"
    shutil.rmtree(folder)


@pytest.mark.parametrize("is_let_in", [False, True], ids=["caches only", "with runs of its own"])
def test_what_is_anothers_answers_as_if_it_did_not_exist(
    node_config: Path, socket_path: Path, is_let_in: bool
) -> None:
    if is_let_in:
        open_the_way(socket_path)
        with node_config.open("a") as file:
            file.write(f'users = ["{OTHER_UID}"]\n')
    with node_config.open("a") as file:
        file.write("[verify]\nafter_s = 0\n")
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run([Path("nvme0"), Path("nvme1")], name=MINE)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 1), seed=1)
        trainer.event(frames.Persisted)
        arena.close()
        if is_let_in:
            with trainer_of(OTHER_UID, socket_path) as other:
                theirs = begun(other, THEIRS)
                save(other, theirs, CheckpointId(1, 1), seed=2)
                theirs.close()
    with node_daemon(node_config, socket_path):  # which verifies what it finds, and says so
        with connected(socket_path) as client:
            wait_until(lambda: MINE in str(client.status().stores))  # what was verified is told, to its owner
            token = client.issue_token(ttl_s=600, is_read_only=True, name="of root").info.token_id
            for path, mode in (
                (socket_path.parents[1], 0o711),
                (socket_path.parent, 0o711),
                (socket_path, 0o666),
                (control_socket_path(socket_path), 0o666),
            ):
                path.chmod(mode)
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(socket_path), token],
                capture_output=True,
                text=True,
                check=False,
                timeout=100,
            )
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            assert len(found["pairs"]) >= 12
            assert {name: pair for name, pair in found["pairs"].items() if pair[0] != pair[1]} == {}
            assert [said for said in json.loads(found["lists"]) if MINE in json.dumps(said)] == []
            assert "of root" not in found["lists"]
            assert (THEIRS in found["lists"]) is is_let_in
            assert [each.token_id for each in client.tokens()] == [token]
            assert [view.checkpoint for view in client.checkpoints(MINE)] == [CheckpointId(1, 1)]
        assert os.getuid() == 0

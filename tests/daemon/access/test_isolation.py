"""Any sequence of calls of one user: it reads, changes and learns nothing of what is another's.

What it names exists, and is another's, or does not exist: it is told the same. What it does not name stands in nothing
that it hears. What the other has is afterwards as it was. `EVERSTEP_SEQUENCES=10000` is the long form;
`EVERSTEP_SEQUENCE_SEED` repeats one that failed.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from cached import HostileReader
from intruder import NOBODYS, THEIRS

from everstep.core.ids import CheckpointId, run_id_of
from everstep.core.paths import control_socket_path
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames, share_frames

pytestmark = pytest.mark.root

COUNT = int(os.environ.get("EVERSTEP_SEQUENCES", "200"))
SEED = int(os.environ.get("EVERSTEP_SEQUENCE_SEED", str(random.randrange(1 << 32))))
LOOK_EVERY = 50
SECRET = "canary-of-root"
"""Names what nobody else ever names."""
SUPPORT = Path(__file__).resolve().parents[2] / "support"
CHECKPOINT = CheckpointId(1, 1)


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """In a folder that others can be let into, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="es-users-", dir="/tmp"))
    (folder / "s").mkdir(mode=0o700)
    yield folder / "s" / "data.sock"
    shutil.rmtree(folder)


@contextlib.contextmanager
def things(socket_path: Path, name: str) -> Generator[HostileReader]:
    """Have a run with a checkpoint, its tag and pin, a cache and a group, all of this name, while the block runs."""
    with FakeTrainer(socket_path) as trainer, HostileReader(socket_path) as reader:
        trainer.open_run([Path("nvme0"), Path("nvme1")], name=name)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CHECKPOINT, seed=1)
        trainer.event(frames.Persisted)
        reader.open_cache(7, fingerprint=name)
        reader.stage()
        reader.fill({0: name.encode()})
        key = share_frames.ShareKey(
            dataset=name, samples=8, order="o", seed=1, batch_size=2, drop_last=False, augment_seed=False
        )
        joined = reader.ask(
            share_frames.JoinShare(
                request_id=reader.number(), group=name, key=key, first_batch=[("a", "t", "d")],
                first_batch_size_bytes=8, budget_bytes=1 << 20, lease_s=60, position=0,
            )
        )  # fmt: skip
        assert isinstance(joined, share_frames.ShareJoined), joined
        with connected(socket_path) as client:
            client.tag(name, CHECKPOINT, name)
            client.pin(name, CHECKPOINT, name, ttl_s=0)
        yield reader
        arena.close()


def state(client: ControlClient) -> dict[str, object]:
    """Return all that root has, as far as it stays the same where nobody does anything."""
    return {
        "runs": [(each.status.name, each.checkpoint_count, each.size_bytes) for each in client.runs()],
        "checkpoints": {name: client.checkpoints(name) for name in (THEIRS, SECRET)},
        "slots": [slot for slot in client.slots() if slot.owner_uid == 0],
        "controllers": client.controllers(),
        "caches": [(each.number, each.published_count) for each in client.caches() if each.uid == 0],
        "groups": [each for each in client.groups() if each.uid == 0],
        "tokens": [(each.token_id, each.name) for each in client.tokens()],
    }


def begun(socket_path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", str(SUPPORT / "intruder.py"), str(socket_path)]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def test_no_sequence_of_calls_reads_changes_or_learns_of_anothers_things(
    node_config: Path, socket_path: Path
) -> None:
    with node_config.open("a") as file:
        file.write("[quota]\ncalls_per_s = 1e6\nframes_per_s = 1e6\n")
    with (
        node_daemon(node_config, socket_path),
        things(socket_path, SECRET) as secret,
        things(socket_path, THEIRS) as theirs,
        connected(socket_path) as client,
    ):
        token = client.issue_token(ttl_s=86_400, is_read_only=True, name=SECRET)
        (cache,) = (each for each in client.caches() if each.fingerprint == THEIRS)
        for path, mode in (
            (socket_path.parents[1], 0o711),
            (socket_path.parent, 0o711),
            (socket_path, 0o666),
            (control_socket_path(socket_path), 0o666),
        ):
            path.chmod(mode)
        canaries = [SECRET, run_id_of(SECRET), token.token, token.info.token_id]
        before, chosen = state(client), random.Random(SEED)
        with begun(socket_path) as intruder:
            assert intruder.stdin
            assert intruder.stdout
            for number in range(COUNT):
                asked = {"seed": chosen.getrandbits(48), "number": cache.number, "canaries": canaries}
                intruder.stdin.write(json.dumps(asked) + "\n")
                intruder.stdin.flush()
                said = json.loads(intruder.stdout.readline())
                where = f"EVERSTEP_SEQUENCE_SEED={SEED}, sequence {number}, about {THEIRS} and {NOBODYS}"
                assert said["told"][0] == said["told"][1], where
                assert said["leaks"] == [], f"{where}: {said}"
                if number % LOOK_EVERY == LOOK_EVERY - 1 or number == COUNT - 1:
                    assert state(client) == before, where
            intruder.stdin.close()
        assert intruder.returncode == 0
        assert (secret.found(0), theirs.found(0)) == (SECRET.encode(), THEIRS.encode())

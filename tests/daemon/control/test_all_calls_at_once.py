"""Many clients make all calls at random while a run saves: each is answered or refused in words, and nothing is harmed.

`EVERSTEP_STORM_S` says for how long; the seed of a failure is printed.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from everstep.core.errors import EverstepError, InternalError
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.events.event_types import EventQuery
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.proto import frames

RUN = "storm"
STORM_S = float(os.environ.get("EVERSTEP_STORM_S", "4"))
CLIENTS = 8
ODD_NUMBERS = (0.0, -1.0, 1e12, float("nan"))


@pytest.fixture
def saving(socket_path: Path, devices: list[Path]) -> Iterator[None]:
    """A run that saves again and again, and keeps the newest three."""
    ends = threading.Event()

    def save() -> None:
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices, name=RUN, keep=frames.KeepRules(last=3))
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            step = 0
            while not ends.is_set() or step < 3:
                step += 1
                arena.save(CheckpointId(1, step), seed=step, slot=step % 2)
                trainer.event(frames.Persisted)
                trainer.send(frames.SealedEverywhere(attempt=1, step=step))
                begun.set()
            arena.close()

    with daemon_process(socket_path), ThreadPoolExecutor(1) as threads:
        begun = threading.Event()
        saved = threads.submit(save)
        assert begun.wait(60)
        yield
        ends.set()
        saved.result()


class Storm:
    """One client's calls."""

    def __init__(self, client: ControlClient, devices: list[Path], seed: int) -> None:
        self.client, self.devices, self.random = client, [str(path) for path in devices], random.Random(seed)

    def calls(self) -> list[Callable[[], object]]:
        client, draw = self.client, self.random
        device, checkpoint = draw.choice([*self.devices, "none"]), self.checkpoint()
        run, name, odd = draw.choice([RUN, RUN, "", "other"]), draw.choice("xy"), draw.choice(ODD_NUMBERS)
        return [
            client.status, client.runs, client.caches, client.members, client.groups, client.devices,
            client.tokens, client.quotas, client.inspect_stores, client.open_web_session, self.export,
            lambda: client.run(run),
            lambda: client.slots(run),
            lambda: client.checkpoints(run),
            lambda: client.controllers(run),
            lambda: client.detail(run, checkpoint, leaf_count_max=draw.randrange(3)),
            lambda: client.verify(run, checkpoint),
            lambda: client.remove(RUN, checkpoint, force=draw.random() < 0.7),
            lambda: client.remove_run(RUN, force=True),
            lambda: [client.tag(RUN, checkpoint, name) for _ in range(2)],  # again is nothing
            lambda: client.untag(RUN, name),
            lambda: client.pin(RUN, checkpoint, name, ttl_s=draw.choice([0.2, 60.0, odd])),
            lambda: client.unpin(RUN, name),
            lambda: client.start_scrub(run, []),
            lambda: client.drain(cancel=draw.random() < 0.5, deadline_s=1.0),
            lambda: client.drain_device(device, cancel=draw.random() < 0.3),
            lambda: client.retire_device(device, force=False, dry_run=True),
            lambda: client.readmit_device(device),
            lambda: client.drop_cache(draw.choice([1, -1])),
            lambda: client.issue_token(ttl_s=draw.choice([1.0, odd]), is_read_only=True),
            lambda: client.revoke_token("00000000"),
            lambda: client.reload_config(dry_run=True),
            lambda: client.set_budget(run, odd),
            lambda: client.pause_checkpoints(run, odd),
            lambda: client.force_checkpoint(run, deadline_s=0.6),
            lambda: list(client.events(EventQuery(run=run, since=draw.choice([None, 0, 10**9])))),
        ]  # fmt: skip

    def checkpoint(self) -> CheckpointId:
        found = self.client.checkpoints(RUN)
        return self.random.choice(found).checkpoint if found else CheckpointId(1, 1)

    def export(self) -> None:
        with self.client.exporting(RUN, self.checkpoint(), deadline_s=30.0) as held:
            time.sleep(0.1)
            here = {each.checkpoint for each in self.client.checkpoints(RUN)}
            assert held.summary.checkpoint in here, "somebody reads it"


def test_all_calls_at_once(saving: None, socket_path: Path, devices: list[Path]) -> None:
    del saving
    first_seed = random.randrange(1 << 32)
    print(f"seed {first_seed}")
    until_s = time.monotonic() + STORM_S
    refusals: list[EverstepError] = []

    def blow(seed: int) -> int:
        count = 0
        while time.monotonic() < until_s:
            with connected(socket_path) as client:
                storm = Storm(client, devices, seed + count)
                for _ in range(20):
                    count += 1
                    try:
                        storm.random.choice(storm.calls())()
                    except EverstepError as error:
                        refusals.append(error)
        return count

    with ThreadPoolExecutor(CLIENTS) as threads:
        blown = [threads.submit(blow, first_seed + 1000 * number) for number in range(CLIENTS)]
        counts = [each.result() for each in blown]
    assert min(counts) > 0
    assert not [each for each in refusals if type(each) in (EverstepError, InternalError)]
    with connected(socket_path) as client:
        client.drain(cancel=True)
        (store,) = client.status().stores
        assert {each.state.value for each in store.devices} <= {"ok", "slow", "draining"}
    log = socket_path.with_name("daemon.log").read_text()
    assert "Traceback" not in log
    assert "internal_error" not in log

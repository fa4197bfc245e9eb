"""Three hosts in network namespaces: one is cut off in mid-epoch, one is killed, and every job gets its samples."""

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
from cached import Blocks
from pausing import wait_until
from torch.utils.data import Dataset

from everstep.daemon.nodes.testing import RunningNode, node_environment, running_nodes, write_token
from everstep.daemon.testing import daemon_process
from everstep.dataloader import CachedDataset, DataLoader
from everstep.dataloader.cache.arena_format import budget_for
from everstep.dataloader.cache.reader import PEER_SLACK_S

pytestmark = pytest.mark.root

COUNT = 450
BATCH = 30
DEADLINE_S, NEARLY, MARGIN_S = 5.0, 0.9, 3.0
"""A batch that waits for a lost host takes the first; no batch waits twice, so that all together are below two."""
BATCH_BOUND_S = 20.0
"""What no batch may take: a connection that waits for TCP to give up takes minutes."""


@pytest.fixture
def hosts() -> Iterator[list[namespaces.Host]]:
    reason = namespaces.reason_against()
    if reason:
        pytest.skip(reason)
    with namespaces.network(3) as made:
        yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="es-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def source(tmp_path: Path) -> Blocks:
    lengths = [random.Random(number).randrange(1000, 3000) for number in range(COUNT)]
    return Blocks(lengths, tmp_path / "reads", name=os.environ["PYTEST_CURRENT_TEST"].split()[0][-100:])


class Job:
    """One host's training job: epochs of the same seed as its reference, which reads the source alone."""

    def __init__(self, node: RunningNode, source: Blocks, seed: int) -> None:
        self.node, self.source = node, source
        before = os.environ.get("EVERSTEP_SOCKET")
        os.environ["EVERSTEP_SOCKET"] = str(node.socket)
        try:
            self.dataset = CachedDataset[bytes](source, budget=int(budget_for(source.lengths) * 0.5))
        finally:
            if before is None:
                del os.environ["EVERSTEP_SOCKET"]
            else:
                os.environ["EVERSTEP_SOCKET"] = before
        settings = {"batch_size": BATCH, "shuffle": True, "seed": seed, "collate_fn": list}
        self.loader = DataLoader(self.dataset, **settings)  # pyright: ignore[reportArgumentType]
        self.reference = DataLoader(Items(source), **settings)  # pyright: ignore[reportArgumentType]
        self.took_s: list[float] = []
        """Of each batch of the newest epoch."""

    def epoch(self) -> Iterator[int]:
        """Yield after each batch, which was compared."""
        wanted = iter(self.reference)
        batches = iter(self.loader)
        self.took_s.clear()
        for number in range(len(self.reference)):
            begun_s = time.monotonic()
            batch = next(batches)
            self.took_s.append(time.monotonic() - begun_s)
            assert batch == next(wanted), f"batch {number}"
            yield number
        assert next(batches, None) is None
        assert next(wanted, None) is None


class Items(Dataset[bytes]):
    """The source as a dataset, without a cache and without counting."""

    def __init__(self, source: Blocks) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> bytes:
        return self._source.content(index)


def run_together(jobs: list[Job], *events: tuple[int, object]) -> None:
    """Run an epoch of all jobs side by side; an event is called after so many rounds."""
    for number, _ in enumerate(zip(*(job.epoch() for job in jobs), strict=True)):
        for when, event in events:
            if when == number:
                assert callable(event)
                event()


def test_one_host_is_cut_off_and_one_killed_in_mid_epoch(
    hosts: list[namespaces.Host], folder: Path, source: Blocks
) -> None:
    with running_nodes(
        folder,
        3,
        hosts=[host.ip for host in hosts],
        prefixes=[host.prefix for host in hosts],
        settings={"deadline_s": f"{DEADLINE_S:g}"},
    ) as nodes:
        jobs = [Job(node, source, seed) for seed, node in enumerate(nodes)]
        run_together(jobs)
        assert all(job.dataset.flush() for job in jobs)
        source.reads()
        run_together(jobs)
        assert source.reads() == [], "3 x 50 % hold everything"
        run_together(jobs, (5, hosts[2].cut), (12, nodes[1].kill))
        assert source.reads(), "what the lost hosts own comes from storage"
        for number, other in ((0, 2), (2, 0)):
            assert f"cache_peer_left_alone peer={nodes[other].address} reason=deadline" in nodes[number].log
        for job in jobs:
            waited = [f"{each:.1f}" for each in job.took_s if each > NEARLY * DEADLINE_S]
            assert len(waited) <= 2, f"one batch waits for each lost host: {waited}"
            assert max(job.took_s) < DEADLINE_S + PEER_SLACK_S + MARGIN_S, "and no longer than once"
        hosts[2].join()
        for number, other in ((0, 2), (2, 0)):
            answers = f"cache_peer_answers peer={nodes[other].address}"
            wait_until(lambda number=number, answers=answers: answers in nodes[number].log)
        before = jobs[2].dataset.cache_info().peer_count
        run_together(jobs)
        assert jobs[2].dataset.cache_info().peer_count > before
        for job in jobs:
            job.dataset.close()


def test_members_of_a_name_that_changes_in_mid_epoch(
    hosts: list[namespaces.Host], folder: Path, source: Blocks
) -> None:
    """As a headless service does it: a name with an address for every host, of which one goes and comes back."""

    def publish(*some: namespaces.Host) -> None:
        for host in hosts:
            host.write_hosts("127.0.0.1 localhost\n" + "".join(f"{each.ip} cache.test\n" for each in some))

    publish(*hosts)
    port = 7077
    environment = node_environment(
        f"0.0.0.0:{port}",
        [],
        write_token(folder),
        {"address": "", "dns": f"cache.test:{port}", "resolve_s": "0.1"},
    )
    sockets = [folder / f"n{number}" / "data.sock" for number in range(3)]
    with (
        daemon_process(sockets[0], environment=environment, prefix=hosts[0].prefix) as first,
        daemon_process(sockets[1], environment=environment, prefix=hosts[1].prefix) as second,
        daemon_process(sockets[2], environment=environment, prefix=hosts[2].prefix) as third,
    ):
        nodes = [
            RunningNode(f"{host.ip}:{port}", path, environment, host.prefix, process)
            for host, path, process in zip(hosts, sockets, (first, second, third), strict=True)
        ]

        def all_know(count: int) -> None:
            for node in nodes:
                wait_until(lambda node=node: members_known(node) == count)

        all_know(3)
        jobs = [Job(node, source, seed) for seed, node in enumerate(nodes)]
        run_together(jobs)
        assert all(job.dataset.flush() for job in jobs)
        source.reads()

        def leave() -> None:
            publish(*hosts[:2])
            all_know(2)

        run_together(jobs, (7, leave))
        slowest_s = [max(job.took_s) for job in jobs]
        run_together(jobs)
        slowest_s += [max(job.took_s) for job in jobs]
        publish(*hosts)
        all_know(3)
        run_together(jobs)
        slowest_s += [max(job.took_s) for job in jobs]
        assert max(slowest_s) < BATCH_BOUND_S
        for node, host in zip(nodes, hosts, strict=True):
            assert f"me={host.ip}:{port}" in node.log
            assert "cache_peer_left_alone" not in node.log
        for job in jobs:
            assert job.dataset.cache_info().peer_count > 0
            job.dataset.close()


def members_known(node: RunningNode) -> int:
    """Return how many members a daemon said that it knows, last."""
    said = [line for line in node.log.splitlines() if "cache_members count=" in line]
    return int(said[-1].split("count=")[1].split()[0]) if said else 0

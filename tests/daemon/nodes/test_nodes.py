"""Several daemons that share their caches: who reads storage, what peers may ask, and what bad ones can do."""

import multiprocessing
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch.distributed as dist
import xxhash
from cached import Blocks
from pausing import wait_until
from store_rank import run_rank
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import Dataset, Subset

from everstep.core.errors import DeadlineError, UsageError
from everstep.daemon.cli.main import main
from everstep.daemon.control.client import connected
from everstep.daemon.nodes.testing import RunningNode, free_port, node_environment, running_nodes, write_token
from everstep.daemon.testing import daemon_process
from everstep.dataloader import CachedDataset, DataLoader, Mixture, members_from_store
from everstep.dataloader.analysis.work_meter import begin_meter, end_meter, timed
from everstep.dataloader.analysis.worker_counters import Counters
from everstep.dataloader.cache.arena_format import budget_for
from everstep.dataloader.cache.owner_plan import Owners, members_of
from everstep.dataloader.sources import SourceDataset
from everstep.proto import peer_pb2 as pb
from everstep.proto import peer_pb2_grpc

COUNT = 400
_Servicer: Any = peer_pb2_grpc.PeerServicer
"""Blocking here; its types are the daemon's, for asyncio."""


@pytest.fixture(scope="module", autouse=True)
def _background() -> None:  # pyright: ignore[reportUnusedFunction]
    """Spawning starts a process for good, and libuv, which serves the Store, makes a pipe: before the first look."""
    resource_tracker.ensure_running()
    agents_store()


def agents_store() -> TCPStore:
    """A Store that none of the ranks serves."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="es-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def source(tmp_path: Path) -> Blocks:
    lengths = [random.Random(number).randrange(2000, 6000) for number in range(COUNT)]
    return Blocks(lengths, tmp_path / "reads", name=os.environ["PYTEST_CURRENT_TEST"].split()[0][-100:])


On = Callable[..., CachedDataset[bytes]]


@pytest.fixture
def on(source: Blocks, monkeypatch: pytest.MonkeyPatch) -> Iterator[On]:
    """Make a dataset that reads through one node's daemon."""
    made: list[CachedDataset[bytes]] = []

    def dataset(
        node: RunningNode, share: float = 1.1, members: Sequence[str] = (), *, prepared: bool = False
    ) -> CachedDataset[bytes]:
        monkeypatch.setenv("EVERSTEP_SOCKET", str(node.socket))
        budget = int(budget_for(source.lengths) * share)
        if prepared:
            items = Items(source)
            made.append(
                CachedDataset[bytes](items, prepared=True, fingerprint=source.name, budget=budget)  # pyright: ignore[reportArgumentType]
            )
        else:
            made.append(CachedDataset[bytes](source, budget=budget, members=members))
        return made[-1]

    yield dataset
    for each in made:
        each.close()


def check(dataset: CachedDataset[bytes], source: Blocks, indices: Sequence[int], batch: int = 32) -> None:
    """Read in batches, as torch's DataLoader does, and compare every byte."""
    for begin in range(0, len(indices), batch):
        ids = list(indices[begin : begin + batch])
        assert dataset.__getitems__(ids) == [source.content(each) for each in ids]


def shuffled(seed: int, count: int = COUNT) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def test_after_the_first_epoch_nobody_reads_storage(folder: Path, source: Blocks, on: On) -> None:
    """Each node reads another half in each epoch; 65 % of the dataset on each of two is all of it and more."""
    with running_nodes(folder, 2) as nodes:
        datasets = [on(node, 0.65) for node in nodes]
        order = shuffled(0)
        for place, dataset in enumerate(datasets):
            check(dataset, source, order[place::2])
        assert all(dataset.flush() for dataset in datasets)
        assert sorted(source.reads()) == list(range(COUNT)), "each sample once, by one of the nodes"
        for epoch in (1, 2):
            order = shuffled(epoch)
            for place, dataset in enumerate(datasets):
                check(dataset, source, order[place::2])
        for dataset in datasets:
            check(dataset, source, shuffled(9))
        assert source.reads() == []
        infos = [dataset.cache_info() for dataset in datasets]
        owners = Owners(source.name, members_of(node.address for node in nodes))
        for node, info in zip(nodes, infos, strict=True):
            assert info.peer_count > 0
            owned = sum(owners.owner(each) == node.address for each in range(COUNT))
            assert info.cached_count >= owned
            assert info.used_bytes <= info.budget_bytes
        for node, dataset in zip(nodes, datasets, strict=True):
            assert all(
                dataset.peek(each) is not None for each in range(COUNT) if owners.owner(each) == node.address
            ), "no copy keeps out what a node owns"
        first, second = [on(node, prepared=True) for node in nodes]
        check(first, source, range(COUNT))
        assert first.flush()
        check(second, source, shuffled(3))
        assert second.cache_info().miss_count == 0
        assert second.cache_info().peer_count > 0


def of_source(data: Any) -> Any:
    """The recipe of the README; what is no source is the reference, read as it is."""
    return SourceDataset[bytes](data) if isinstance(data, CachedDataset) else data


WRAPS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda data: data,
    "SourceDataset": of_source,
    "Mixture": lambda data: Mixture({"all": of_source(data)}),
    "Subset": lambda data: Subset(data, range(COUNT)[::-1]),
    "Subset of SourceDataset": lambda data: Subset(of_source(data), range(COUNT)[::-1]),
}


@pytest.mark.parametrize(("wrapped", "augment_seed"), [*((each, True) for each in WRAPS), ("Subset", False)])
def test_the_loader_asks_for_a_batch_at_once_and_its_order_stays(
    folder: Path, source: Blocks, on: On, wrapped: str, augment_seed: bool
) -> None:
    wrap = WRAPS[wrapped]
    with running_nodes(folder, 2) as nodes:
        first, second = [on(node, 0.65) for node in nodes]
        check(first, source, range(COUNT))
        assert first.flush()
        source.reads()
        keywords: dict[str, Any] = {
            "batch_size": 32,
            "seed": 5,
            "collate_fn": list,
            "augment_seed": augment_seed,
        }
        keywords |= {} if wrapped == "Mixture" else {"shuffle": True}
        loader = DataLoader(wrap(second), num_workers=0, **keywords)
        assert list(loader) == list(DataLoader(wrap(Items(source)), **keywords))
        assert second.cache_info().peer_count > COUNT // 3
        assert source.reads() == []
        asked = metric(nodes[1], "cache_peer_fetch_seconds_count")
        assert asked <= COUNT / 32 + 1, "one call for a batch"


class Items(Dataset[bytes]):
    """The source as a dataset, without a cache and without counting."""

    def __init__(self, source: Blocks) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> bytes:
        return self._source.content(index)


def metric(node: RunningNode, name: str) -> float:
    """Return one sample of a node's metrics."""
    import json
    import urllib.request

    port = json.loads(node.socket.with_name("daemon.json").read_text())["metrics_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"everstep_{name}"))


@pytest.fixture(autouse=True)
def metrics_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_METRICS_PORT", "0")


def test_a_dead_peer_means_storage_and_a_new_one_is_found_again(
    folder: Path, source: Blocks, on: On, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_nodes(folder, 2) as nodes:
        second, first = [on(node) for node in reversed(nodes)]  # EVERSTEP_SOCKET is the first one's
        check(second, source, range(COUNT))
        assert second.flush()
        source.reads()
        check(first, source, shuffled(1)[:64])
        assert source.reads() == []
        nodes[1].kill()
        check(first, source, shuffled(2))
        assert "cache_peer_left_alone" in nodes[0].log
        assert main(["cache", "members"]) == 0
        shown = capsys.readouterr().out
        assert f"! {nodes[1].address}: unreachable" in shown
        with connected(nodes[0].socket) as client:
            me, peer = client.status().members
            assert client.members() == [me, peer]
        assert (me.address, me.is_me, me.is_asked, me.problem) == (nodes[0].address, True, True, "")
        assert (peer.is_me, peer.is_asked) == (False, False)
        assert peer.fetched_count > 0
        assert first.cache_info().is_attached
        missed = source.reads()
        assert len(missed) == len(set(missed)) > 0
        with daemon_process(nodes[1].socket, environment=nodes[1].environment):
            wait_until(lambda: "cache_peer_answers" in nodes[0].log)
            third = on(nodes[1])
            check(third, source, shuffled(3))
            assert third.cache_info().peer_count > 0


def test_members_that_a_trainer_found(folder: Path, source: Blocks, on: On) -> None:
    """Through a Store; a later list moves ownership, and every sample stays what it is."""
    settings = {"members": "", "address": ""}
    with running_nodes(folder, 2, settings=settings) as nodes:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        alone = on(nodes[0])
        check(alone, source, range(20))
        assert alone.cache_info().peer_count == 0
        alone.close()
        source.reads()
        with pytest.raises(DeadlineError, match="every rank"):
            members_from_store(store, rank=0, world_size=2, timeout_s=0.1)
        store.set("everstep/cache/members//1", nodes[1].address)
        on(nodes[0]).close()  # EVERSTEP_SOCKET is the first one's
        members = members_from_store(store, rank=0, world_size=2)
        assert members == sorted(node.address for node in nodes)
        first, second = [on(node, members=members) for node in nodes]
        check(first, source, range(COUNT))
        assert first.flush()
        check(second, source, range(COUNT))
        assert second.cache_info().peer_count > 0
        again = on(nodes[1], members=[nodes[1].address])
        check(again, source, shuffled(4))
        check(second, source, shuffled(5))
        with pytest.raises(UsageError, match="host:port"):
            on(nodes[0], members=["nonsense"])


def test_ranks_find_each_others_nodes_through_a_tcp_store(folder: Path, source: Blocks) -> None:
    """Three processes, each on a node of its own: one list, and after the first epoch nobody reads storage."""
    ranks, context = 3, multiprocessing.get_context("spawn")
    store = agents_store()
    jobs: list[tuple[BaseProcess, Connection]] = []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(rank, ranks, source, 0.5, theirs))
        process.start()
        theirs.close()  # so that the death of a rank is the end of its answers
        jobs.append((process, ours))

    def answers() -> list[object]:
        return [pipe.recv() for _, pipe in jobs]

    def go_on() -> None:
        for _, pipe in jobs:
            pipe.send(None)

    assert answers() == ["ready"] * ranks
    with running_nodes(folder, ranks, settings={"members": "", "address": ""}) as nodes:
        for (_, pipe), node in zip(jobs, nodes, strict=True):
            pipe.send((store.port, node.socket))
        assert answers() == [sorted(node.address for node in nodes)] * ranks
        go_on()
        assert answers() == ["filled"] * ranks
        assert sorted(source.reads()) == list(range(COUNT))
        go_on()
        assert all(cast(int, count) > 0 for count in answers())
        assert source.reads() == [], "3 x 50 % hold everything"
        for process, pipe in jobs:
            process.join(60)
            assert process.exitcode == 0
            process.close()
            pipe.close()


# -- who may ask


def stub_of(channel: grpc.Channel) -> Any:
    """Return a blocking stub; the typed one is the daemon's, for asyncio."""
    return cast(Any, peer_pb2_grpc).PeerStub(channel)


def call(node: RunningNode, token: str) -> tuple[grpc.Channel, Any, dict[str, Any]]:
    """Return a connection by hand."""
    channel = grpc.insecure_channel(node.address)
    settings: dict[str, Any] = {"timeout": 20}
    if token:
        settings["metadata"] = (("authorization", f"Bearer {token}"),)
    return channel, stub_of(channel), settings


def code_of(work: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as raised:
        work()
    return raised.value.code()  # pyright: ignore[reportAttributeAccessIssue]


def test_what_a_caller_may_and_may_not(folder: Path, source: Blocks, on: On) -> None:
    """A token that is not the members', another user's cache, samples that cannot be, bytes that are not theirs."""
    with running_nodes(folder, 2) as nodes:
        dataset = on(nodes[0])
        check(dataset, source, range(COUNT))
        assert dataset.flush()
        token = (folder / "token").read_text()
        about = pb.Dataset(uid=os.getuid(), content="raw", fingerprint=source.name, sample_count=COUNT)
        owners = Owners(source.name, members_of(node.address for node in nodes))
        mine = [each for each in range(COUNT) if owners.owner(each) == nodes[0].address]
        request = pb.FetchRequest(dataset=about, samples=mine[:3], size_bytes_max=1 << 20)
        channel, stub, settings = call(nodes[0], token)
        with channel:
            found = [each for message in stub.Fetch(request, **settings) for each in message.samples]
            assert [(each.number, each.data) for each in found] == [
                (number, source.content(number)) for number in mine[:3]
            ]
            small = pb.FetchRequest(dataset=about, samples=mine[:3], size_bytes_max=source.lengths[mine[0]])
            answers = list(stub.Fetch(small, **settings))
            assert [each.number for message in answers for each in message.samples] == mine[:1]
            for change in (
                {"uid": os.getuid() + 1},
                {"fingerprint": "other"},
                {"content": "prepared"},
                {"sample_count": COUNT + 1},
            ):
                other = pb.Dataset()
                other.CopyFrom(about)
                for name, value in change.items():
                    setattr(other, name, value)
                asked = pb.FetchRequest(dataset=other, samples=[0], size_bytes_max=1 << 20)
                assert code_of(lambda asked=asked: list(stub.Fetch(asked, **settings))) is (
                    grpc.StatusCode.NOT_FOUND
                )
                offered = pb.OfferRequest(dataset=other)
                assert code_of(lambda offered=offered: stub.Offer(offered, **settings)) is (
                    grpc.StatusCode.NOT_FOUND
                )
            for bad in (
                pb.FetchRequest(dataset=about, samples=[COUNT], size_bytes_max=1),
                pb.FetchRequest(dataset=about, samples=[0] * 5000, size_bytes_max=1),
                pb.FetchRequest(dataset=pb.Dataset(content="raw"), samples=[0]),
                pb.FetchRequest(dataset=pb.Dataset(content="x", fingerprint="f"), samples=[0]),
            ):
                assert code_of(lambda bad=bad: list(stub.Fetch(bad, **settings))) is (
                    grpc.StatusCode.INVALID_ARGUMENT
                )
            no_deadline = {**settings, "timeout": None}
            assert (
                code_of(lambda: list(stub.Fetch(request, **no_deadline))) is grpc.StatusCode.INVALID_ARGUMENT
            )
            wrong = pb.Sample(number=mine[0], digest=1, data=b"other bytes")
            lied = stub.Offer(pb.OfferRequest(dataset=about, samples=[wrong]), **settings)
            assert lied.held_count == 0
            huge = pb.OfferRequest(dataset=about, samples=[pb.Sample(data=bytes(40 << 20))])
            assert code_of(lambda: stub.Offer(huge, **settings)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for given in ("", "0" * 64, token[:-1]):
            channel, stub, settings = call(nodes[0], given)
            with channel:
                assert code_of(lambda: list(stub.Fetch(request, **settings))) is (  # noqa: B023
                    grpc.StatusCode.UNAUTHENTICATED
                )
                assert code_of(lambda: stub.Probe(pb.ProbeRequest(), **settings)) is (  # noqa: B023
                    grpc.StatusCode.UNAUTHENTICATED
                )
        assert dataset[mine[0]] == source.content(mine[0])


def test_a_node_with_another_token_is_no_member(folder: Path, source: Blocks, on: On) -> None:
    with running_nodes(folder, 1, hosts=["127.0.0.2"]) as (node,):
        other_folder = folder / "other"
        other_folder.mkdir()
        address = f"127.0.0.3:{free_port('127.0.0.3')}"
        members = [node.address, address]
        environment = node_environment(address, members, write_token(other_folder))
        path = folder / "o" / "data.sock"
        with daemon_process(path, environment=environment) as process:
            other = RunningNode(address, path, environment, (), process)
            dataset = on(node)
            check(dataset, source, range(COUNT))
            assert dataset.flush()
            source.reads()
            stranger = on(other)
            check(stranger, source, shuffled(1))
            assert sorted(source.reads()) == list(range(COUNT))
            assert stranger.cache_info().peer_count == 0
            assert "reason=refused" in other.log


# -- certificates


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def authority(folder: Path, name: str) -> None:
    openssl(
        folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem",
    )  # fmt: skip


def certificate(folder: Path, name: str, signer: str, host: str) -> dict[str, str]:
    """Return the settings of a node with a certificate for `host`."""
    openssl(
        folder, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
        "-keyout", f"{name}.key", "-out", f"{name}.csr", "-addext", f"subjectAltName=DNS:{host}",
    )  # fmt: skip
    openssl(
        folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{signer}.pem", "-CAkey", f"{signer}.key", "-days", "2",
        "-copy_extensions", "copyall", "-out", f"{name}.pem",
    )  # fmt: skip
    return {
        "certificate_file": str(folder / f"{name}.pem"),
        "key_file": str(folder / f"{name}.key"),
        "authority_file": str(folder / "ca.pem"),
        "tls_name": "everstep-cache",
    }


def test_certificates_on_both_sides(folder: Path, source: Blocks, on: On) -> None:
    """One authority, one name. Another authority's certificate, and another service's, open nothing."""
    authority(folder, "ca")
    authority(folder, "foreign")
    good = certificate(folder, "node", "ca", "everstep-cache")
    service = certificate(folder, "service", "ca", "other-service")
    foreign = certificate(folder, "stranger", "foreign", "everstep-cache")
    with running_nodes(folder, 2, settings=good, with_token=False) as nodes:
        first, second = [on(node) for node in nodes]
        check(first, source, range(COUNT))
        assert first.flush()
        source.reads()
        check(second, source, shuffled(1))
        assert source.reads() == []
        assert second.cache_info().peer_count > 0
        ca = (folder / "ca.pem").read_bytes()
        about = pb.Dataset(uid=os.getuid(), content="raw", fingerprint=source.name, sample_count=COUNT)
        request = pb.FetchRequest(dataset=about, samples=[0], size_bytes_max=1 << 20)
        expected = {
            None: grpc.StatusCode.UNAVAILABLE,
            "foreign": grpc.StatusCode.UNAVAILABLE,
            "service": grpc.StatusCode.PERMISSION_DENIED,
        }
        for name, settings in ((None, None), ("foreign", foreign), ("service", service)):
            pair = (
                (Path(settings["key_file"]).read_bytes(), Path(settings["certificate_file"]).read_bytes())
                if settings
                else (None, None)
            )
            with grpc.secure_channel(
                nodes[0].address,
                grpc.ssl_channel_credentials(ca, *pair),
                options=[("grpc.ssl_target_name_override", "everstep-cache")],
            ) as channel:
                stub = stub_of(channel)
                assert code_of(lambda: list(stub.Fetch(request, timeout=20))) is expected[name]  # noqa: B023
        with grpc.insecure_channel(nodes[0].address) as channel:
            stub = stub_of(channel)
            assert code_of(lambda: list(stub.Fetch(request, timeout=20))) is grpc.StatusCode.UNAVAILABLE


# -- peers that do what no honest one does


class BadPeer(_Servicer):
    """Answers as a test wants."""

    def __init__(self, source: Blocks, kind: str) -> None:
        self._source, self._kind = source, kind
        self.fetches: list[int] = []
        self.ending = futures.Future[None]()

    def _sample(self, number: int) -> pb.Sample:
        data = self._source.content(number)
        return pb.Sample(number=number, digest=xxhash.xxh3_64_intdigest(data), data=data)

    def Fetch(  # noqa: N802
        self, request: pb.FetchRequest, context: Any
    ) -> Iterator[pb.FetchResponse]:
        self.fetches.append(len(request.samples))
        numbers = list(request.samples)
        match self._kind:
            case "hangs":
                self.ending.result()
            case "hangs in the middle":
                yield pb.FetchResponse(samples=[self._sample(numbers[0])])
                self.ending.result()
            case "wrong digest":
                yield pb.FetchResponse(samples=[pb.Sample(number=numbers[0], digest=1, data=b"x")])
            case "cut short":
                made = self._sample(numbers[0])
                yield pb.FetchResponse(
                    samples=[pb.Sample(number=made.number, digest=made.digest, data=made.data[:-1])]
                )
            case "not asked for":
                yield pb.FetchResponse(
                    samples=[self._sample(next(iter({0, 1, 2} - set(numbers)), COUNT - 1))]
                )
                yield pb.FetchResponse(samples=[self._sample(each) for each in [*numbers, numbers[0]]])
            case "too much":
                data = bytes(11 << 20)
                digest = xxhash.xxh3_64_intdigest(data)
                yield pb.FetchResponse(
                    samples=[pb.Sample(number=each, digest=digest, data=data) for each in numbers[:3]]
                )
            case "a message too large":
                yield pb.FetchResponse(samples=[pb.Sample(number=numbers[0], data=bytes(48 << 20))])
            case _:
                context.abort(grpc.StatusCode.INTERNAL, "no")

    def Offer(self, request: pb.OfferRequest, context: Any) -> pb.OfferResponse:  # noqa: N802
        return pb.OfferResponse(held_count=1 << 31, room_bytes=1 << 62)

    def Probe(self, request: pb.ProbeRequest, context: Any) -> pb.ProbeResponse:  # noqa: N802
        context.abort(grpc.StatusCode.INTERNAL, "no")
        raise AssertionError


@contextmanager
def bad_peer(source: Blocks, kind: str) -> Generator[tuple[BadPeer, str]]:
    """Serve one, and yield it with its address."""
    threads = futures.ThreadPoolExecutor(8)
    server = grpc.server(threads, options=[("grpc.max_send_message_length", 64 << 20)])
    bad = BadPeer(source, kind)
    cast(Any, peer_pb2_grpc).add_PeerServicer_to_server(bad, server)
    address = f"127.0.0.9:{server.add_insecure_port('127.0.0.9:0')}"
    server.start()
    try:
        yield bad, address
    finally:
        bad.ending.set_result(None)
        server.stop(0).wait()
        threads.shutdown()


BAD = [
    "hangs", "hangs in the middle", "wrong digest", "cut short", "not asked for", "too much", "a message too large",
    "fails",
]  # fmt: skip


LONE_DEADLINE_S = 3.0


def times_of_batches(dataset: CachedDataset[bytes], source: Blocks, indices: Sequence[int]) -> list[float]:
    """Read and compare as `check` does; return how long each batch took."""
    took_s: list[float] = []
    for begin in range(0, len(indices), 32):
        begun_s = time.monotonic()
        check(dataset, source, indices[begin : begin + 32])
        took_s.append(time.monotonic() - begun_s)
    return took_s


@pytest.fixture(scope="module")
def lone_node() -> Iterator[RunningNode]:
    """One daemon for all bad peers, which are members by their datasets."""
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    with running_nodes(folder, 1, settings={"members": "", "deadline_s": f"{LONE_DEADLINE_S:g}"}) as (node,):
        yield node
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_peer_costs_one_call_and_changes_nothing(
    lone_node: RunningNode, source: Blocks, on: On, kind: str
) -> None:
    """Every sample is what it is, whatever the peer sends; after the first failure it is left alone."""
    with bad_peer(source, kind) as (bad, address):
        dataset = on(lone_node, members=[lone_node.address, address])
        took_s = times_of_batches(dataset, source, shuffled(1))
        assert dataset.flush()
        assert len(bad.fetches) == 1, f"a dead or slow peer costs one deadline: {lone_node.log}"
        assert max(took_s) < 2 * LONE_DEADLINE_S, "and not two"
        if kind == "hangs":
            assert sum(each > 0.9 * LONE_DEADLINE_S for each in took_s) == 1, "the others go on at once"
        assert f"cache_peer_left_alone peer={address}" in lone_node.log
        assert "internal_error" not in lone_node.log
        info = dataset.cache_info()
        assert info.is_attached
        assert info.peer_count == 0 or kind == "hangs in the middle"
        assert len(source.reads()) == COUNT - info.peer_count


def test_waiting_for_a_peer_is_fetch(lone_node: RunningNode, source: Blocks, on: On) -> None:
    """To `everstep analyze` and StallMeter: it is no time of preparing."""
    counters = Counters()
    with bad_peer(source, "hangs") as (_, address):
        dataset = on(lone_node, members=[lone_node.address, address])
        meter = begin_meter(counters.path, None, counts_bytes=False)
        assert meter is not None
        restore = timed(SourceDataset[bytes](dataset), meter)
        check(dataset, source, range(32))
        meter.batch_done(32)
        restore()
        end_meter(counters.path)
    totals = counters.totals()
    counters.close()
    assert meter.has_source
    assert totals.busy_s > 0.9 * LONE_DEADLINE_S, "it waited for one deadline"
    assert totals.fetch_s > 0.9 * LONE_DEADLINE_S

"""The four golden signals of the cache, from a scrape of a daemon whose cache is used (docs/metrics.md)."""

from pathlib import Path

from cached import Blocks, HostileReader
from pausing import wait_until
from scraping import scrape

from everstep.daemon.control.client import connected
from everstep.daemon.testing import node_daemon
from everstep.dataloader import CachedDataset
from everstep.dataloader.cache.arena_format import base_bytes, budget_for, record_bytes
from everstep.proto import frames

LENGTHS = [1000, 2000, 3000, 4000]
OPENED = "everstep_request_duration_seconds_count{OpenCache}"


def test_traffic_latency_errors_and_saturation(node_config: Path, socket_path: Path, tmp_path: Path) -> None:
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        before = scrape(port)
        assert OPENED not in before, "nobody has opened a cache"
        source = Blocks(LENGTHS, tmp_path / "reads", name="photographs")
        dataset = CachedDataset[bytes](source, budget=budget_for(LENGTHS))
        for _ in range(3):
            assert [len(dataset[index]) for index in range(4)] == LENGTHS
            assert dataset.flush()
        wait_until(lambda: scrape(port)["everstep_cache_reads_total{memory}"] == 8)
        with HostileReader(socket_path) as reader:  # refused: damaged on its way, other bytes, no room
            opened = reader.open_cache(
                4, fingerprint="sounds", budget_bytes=base_bytes(4) + record_bytes(100)
            )
            assert isinstance(opened, frames.CacheOpened)
            reader.stage()
            reader.fill({0: b"abcd"}, change=lambda staging: staging.__setitem__(2, ord("X")))
            reader.fill({1: b"a" * 100})
            reader.fill({1: b"b" * 100})
            reader.fill({2: b"c" * 100})
            refused = reader.open_cache(4)  # one cache for a connection
            assert isinstance(refused, frames.Failure)
            wait_until(lambda: scrape(port)[OPENED] == 3)  # a moment after its answer
            found = scrape(port)
        dataset.close()

    # traffic
    assert found["everstep_cache_reads_total{dataset}"] == 4
    assert found["everstep_cache_read_bytes_total{memory}"] == 2 * sum(LENGTHS)
    assert found["everstep_cache_read_bytes_total{dataset}"] == sum(LENGTHS)
    assert found["everstep_cache_filled_samples_total"] == 5
    assert found["everstep_cache_clients"] == 2
    # latency: a hit asks nobody, so what a reader waits for is the opening
    assert found[OPENED] == 3
    assert found["everstep_request_duration_seconds_sum{OpenCache}"] > 0
    assert found["everstep_cache_peer_fetch_seconds_count"] == 0  # no other node shares a cache
    # errors
    assert [
        found[f"everstep_cache_refused_samples_total{{{reason}}}"]
        for reason in ("corrupt", "differs", "full", "memory", "oversized")
    ] == [1, 1, 1, 0, 0]
    assert found[f"everstep_requests_refused_total{{{refused.code}}}"] == 1
    # saturation
    used = budget_for(LENGTHS) + base_bytes(4) + record_bytes(100)
    assert found["everstep_cache_bytes"] == used
    assert found["everstep_cache_budget_bytes"] == used, "both are full"
    assert found["everstep_cache_allocated_bytes"] >= used
    assert found["everstep_caches_short"] == 0

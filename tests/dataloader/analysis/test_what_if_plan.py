"""The model is plain arithmetic: by hand, and in the directions in which it can only go."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.analysis.what_if_plan import (
    ENOUGH,
    WORKERS_MAX,
    Costs,
    Limit,
    Peers,
    Setting,
    attainable,
    cache_needed,
    limits,
    predict,
    worker_rates,
    workers_needed,
)  # fmt: skip

COSTS = Costs(
    compute_s=0.001,
    handover_s=0.0,
    preparation_s=0.004,
    cpu_s=0.002,
    latency_s=0.001,
    sample_bytes=100_000,
    storage_bytes_per_s=50e6,
)
"""1,000 samples/s computed, 250 prepared by a worker, 500 read; 3 ms to fetch one."""

WAIT_S = 0.5 * 0.002 * 0.5 * (0.5 * 0.002 / 0.0055) / 2
"""Of a second worker: at half of the samples, of which half come at random, for half of a transfer of the first one."""

positive = st.floats(1e-6, 1.0)


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    return Costs(
        compute_s=draw(positive),
        handover_s=draw(st.floats(0.0, 0.01)),
        preparation_s=draw(positive),
        cpu_s=draw(positive),
        latency_s=draw(st.floats(0.0, 0.1)),
        sample_bytes=draw(st.floats(0.0, 1e7)),
        storage_bytes_per_s=draw(st.one_of(st.just(math.inf), st.floats(1e5, 1e10))),
    )


@st.composite
def settings(draw: st.DrawFn) -> Setting:
    peers = st.builds(
        Peers, count=st.integers(0, 8), cached=st.floats(0.0, 1.0), bytes_per_s=st.floats(1e6, 1e10)
    )
    return Setting(
        cached=draw(st.floats(0.0, 1.0)),
        workers=draw(st.integers(0, 32)),
        cores=float(draw(st.integers(1, 64))),
        peers=draw(st.none() | peers),
    )


@pytest.mark.parametrize(
    ("setting", "samples_per_s", "limit"),
    [
        (Setting(cached=1.0, workers=2, cores=8), 2 / 0.004, Limit.WORKERS),
        (Setting(cached=1.0, workers=8, cores=8), 1000.0, Limit.COMPUTE),
        (Setting(cached=1.0, workers=8, cores=1), 500.0, Limit.CORES),
        (Setting(cached=0.0, workers=8, cores=8), 500.0, Limit.STORAGE),
        (Setting(cached=0.0, workers=2, cores=8), 2 / 0.007, Limit.WORKERS),
        (Setting(cached=0.5, workers=2, cores=8), 2 / (0.0055 + WAIT_S), Limit.WORKERS),
        (Setting(cached=0.0, workers=0, cores=8), 1 / 0.008, Limit.SERIAL),
        (Setting(cached=0.0, workers=8, cores=8, storage_bytes_per_s=25e6), 250.0, Limit.STORAGE),
    ],
)
def test_each_limit_by_hand(setting: Setting, samples_per_s: float, limit: Limit) -> None:
    found = predict(COSTS, setting)
    assert (found.samples_per_s, found.limit) == (pytest.approx(samples_per_s, rel=1e-4), limit)


def test_peers_by_hand() -> None:
    """Two peers with a quarter each leave half of what is not cached here to storage."""
    peers = Peers(count=2, cached=0.25, bytes_per_s=10e6, latency_s=0.0)
    found = limits(COSTS, Setting(cached=0.0, workers=16, cores=8, peers=peers))
    assert found[Limit.STORAGE] == pytest.approx(1000.0)
    assert found[Limit.NETWORK] == pytest.approx(200.0)
    alone = 16 / (0.004 + 0.5 * 0.003 + 0.5 * 0.01)
    assert 0.95 * alone < found[Limit.WORKERS] < alone, "they meet at storage"


@given(costs(), settings(), st.floats(0.0, 1.0))
def test_more_in_the_cache_is_never_slower(costs: Costs, setting: Setting, cached: float) -> None:
    """Against storage: a slow network may make asking a peer worse than the disk."""
    low, high = sorted((cached, setting.cached))
    alone = dataclasses.replace(setting, peers=None)
    slower = predict(costs, dataclasses.replace(alone, cached=low)).samples_per_s
    assert predict(costs, dataclasses.replace(alone, cached=high)).samples_per_s >= slower * (1 - 1e-9)


@given(costs(), settings(), st.integers(1, 8))
def test_more_workers_are_never_slower(costs: Costs, setting: Setting, more: int) -> None:
    begin = dataclasses.replace(setting, workers=max(1, setting.workers))
    before = predict(costs, begin).samples_per_s
    assert predict(costs, dataclasses.replace(begin, workers=begin.workers + more)).samples_per_s >= before


@given(costs(), settings())
def test_no_speed_is_above_computing(costs: Costs, setting: Setting) -> None:
    assert predict(costs, setting).samples_per_s <= 1 / costs.compute_s * (1 + 1e-9)


@given(costs(), settings())
def test_the_cache_needed_is_enough_and_a_percent_less_is_not(costs: Costs, setting: Setting) -> None:
    alone = dataclasses.replace(setting, peers=None)
    needed = cache_needed(costs, alone)
    goal = ENOUGH * predict(costs, dataclasses.replace(alone, cached=1.0)).samples_per_s
    assert predict(costs, dataclasses.replace(alone, cached=needed)).samples_per_s >= goal
    if needed > 0.0:
        less = dataclasses.replace(alone, cached=round(100 * needed - 1) / 100)
        assert predict(costs, less).samples_per_s < goal


@given(costs(), st.integers(1, 64))
def test_the_workers_needed_are_enough_and_one_less_is_not(costs: Costs, cores: int) -> None:
    count = workers_needed(costs, cores=float(cores))
    goal = attainable(costs, cores=float(cores))
    setting = Setting(cached=1.0, workers=count, cores=float(cores))
    assert count == WORKERS_MAX or limits(costs, setting)[Limit.WORKERS] >= goal * (1 - 1e-6)
    if count > 1:
        less = dataclasses.replace(setting, workers=count - 1)
        assert limits(costs, less)[Limit.WORKERS] < goal


@given(costs(), settings())
def test_workers_are_at_most_as_fast_together_as_each_alone(costs: Costs, setting: Setting) -> None:
    """And one alone is slowed by nobody, where there is a core for the trainer."""
    setting = dataclasses.replace(setting, workers=max(1, setting.workers), cores=setting.cores + 1)
    rates = list(worker_rates(costs, setting))
    assert len(rates) == setting.workers
    assert all(rate <= (count + 1) * rates[0] * (1 + 1e-9) for count, rate in enumerate(rates))
    assert rates == sorted(rates)
    if setting.cores >= setting.workers + 1 and setting.cached == 1.0:
        assert rates[-1] == pytest.approx(setting.workers / costs.preparation_s)


def test_workers_that_fill_the_cores_are_bounded_by_them() -> None:
    """Four workers that compute half of the time on one core, by hand for two: each finds the other half the time."""
    rates = list(worker_rates(COSTS, Setting(cached=1.0, workers=9, cores=1.0)))
    assert rates[0] == pytest.approx(250.0)
    assert rates[1] == pytest.approx(2 / (0.004 + 0.002 * 0.5))
    assert rates[8] == pytest.approx(500.0, rel=0.001)
    assert predict(COSTS, Setting(cached=1.0, workers=4, cores=1.0)).limit is Limit.CORES

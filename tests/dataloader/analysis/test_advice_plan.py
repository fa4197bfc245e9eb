"""One sentence for each situation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.analysis.advice_plan import Advice, Bound, advise
from everstep.dataloader.analysis.stall_plan import stalls_of
from everstep.dataloader.analysis.what_if_plan import Costs, Setting, predict


def advice_for(
    *, cores: float = 16.0, workers: int = 4, dataset_bytes: float | None = None, **costs: float
) -> Advice:
    """Return what is said of a job with these costs: a sample takes 1 ms to compute, and nothing else."""
    defaults: dict[str, float] = {
        "compute_s": 0.001, "handover_s": 0.0, "preparation_s": 0.0001, "cpu_s": 0.0001, "latency_s": 0.0,
        "sample_bytes": 100_000, "storage_bytes_per_s": 1e9,
    }  # fmt: skip
    made = Costs(**(defaults | costs))
    now = Setting(cached=0.0, workers=workers, cores=cores)
    cached = Setting(cached=1.0, workers=workers, cores=cores)
    stalls = stalls_of(
        synthetic_s=made.compute_s,
        warm_s=1 / predict(made, cached).samples_per_s,
        cold_s=1 / predict(made, now).samples_per_s,
    )
    return advise(stalls, made, now, dataset_bytes=dataset_bytes)


def test_nothing_stalls() -> None:
    said = advice_for()
    assert said.sentence == "Nothing stalls: computing takes 100 % of each step even with no file in memory"
    assert (said.bound, said.cached, said.workers) == (Bound.COMPUTE, None, None)


def test_a_fetch_stall() -> None:
    said = advice_for(storage_bytes_per_s=35e6, dataset_bytes=100 * 2**30)
    assert said.sentence == "65 % of the dataset (65.0 GiB) in the cache removes the fetch stall"
    assert (said.bound, said.workers) == (Bound.FETCH, None)


def test_a_fetch_stall_that_more_workers_remove_as_well() -> None:
    said = advice_for(latency_s=0.006, storage_bytes_per_s=1e9)
    assert said.sentence == (
        "36 % of the dataset in the cache removes the fetch stall, and so do 3 workers more"
    )


def test_a_preparation_stall() -> None:
    said = advice_for(preparation_s=0.007, cpu_s=0.007)
    assert said.sentence == "3 workers more remove the preparation stall"
    assert (said.bound, said.workers, said.cached) == (Bound.PREPARATION, 7, None)


def test_one_worker_more() -> None:
    assert advice_for(preparation_s=0.005).sentence == "1 worker more removes the preparation stall"


def test_no_workers_yet() -> None:
    said = advice_for(workers=0, preparation_s=0.0015)
    assert said.sentence == "2 workers remove the preparation stall"


def test_both_stalls() -> None:
    """Nine workers: at 990 samples/s seven prepare, one fetches what is not cached, and they meet at storage."""
    said = advice_for(preparation_s=0.007, cpu_s=0.007, storage_bytes_per_s=35e6, workers=6)
    assert said.sentence == (
        "65 % of the dataset in the cache removes the fetch stall; 3 workers more remove the preparation stall"
    )
    assert said.bound is Bound.BOTH
    assert said.samples_per_s == pytest.approx(1000.0, rel=0.02)


def test_the_cores_are_the_limit() -> None:
    said = advice_for(preparation_s=0.004, cpu_s=0.004, cores=2.0)
    assert said.sentence == (
        "More workers do not help, since all 2 cores are busy: only cheaper or shared preparation, or more cores,"
        " removes the preparation stall"
    )
    assert said.lacking_cores


def test_some_workers_more_and_then_the_cores_are_the_limit() -> None:
    said = advice_for(preparation_s=0.004, cpu_s=0.002, cores=1.0, workers=1)
    assert said.sentence.startswith(
        "3 workers more make preparation 2.0 times as fast, then the one core is busy:"
    )


def test_a_trainer_that_is_slow_to_take_batches() -> None:
    said = advice_for(handover_s=0.001)
    assert said.sentence.startswith("The trainer is slow to take batches that are ready")
    assert said.workers is None


@given(
    st.tuples(st.floats(0.0001, 0.01), st.floats(0.0001, 0.05), st.floats(0.0, 0.02)),
    st.floats(1e6, 1e9),
    st.integers(0, 16),
    st.integers(1, 32),
)
def test_what_is_advised_is_predicted_to_be_no_slower(
    times_s: tuple[float, float, float], storage: float, workers: int, cores: int
) -> None:
    compute_s, preparation_s, latency_s = times_s
    costs = {
        "compute_s": compute_s, "handover_s": 0.0, "preparation_s": preparation_s, "cpu_s": preparation_s,
        "latency_s": latency_s, "sample_bytes": 100_000, "storage_bytes_per_s": storage,
    }  # fmt: skip
    said = advice_for(workers=workers, cores=float(cores), **costs)
    now = predict(Costs(**costs), Setting(cached=0.0, workers=workers, cores=float(cores))).samples_per_s
    assert said.samples_per_s >= now * (1 - 1e-9)
    assert said.sentence
    assert said.sentence[0].isupper() or said.sentence[0].isdigit()
    assert not said.sentence.endswith(".")

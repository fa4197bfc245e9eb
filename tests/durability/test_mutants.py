"""The check of the checks: every wrong version of the product is found."""

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mutant_process import FOUND, SURVIVED, run_mutant
from mutant_run import CONTROL, SLIPPED
from mutant_search import run_mutants
from mutants import MUTANTS, Mutant, StaleMutantError

COUNT_MIN = 40
SHARE = float(os.environ.get("EVERSTEP_MUTANTS", "0.25"))
"""Of all mutants, drawn anew each time: 1 for all, as after a change of what they are of."""
SEED = random.randrange(1 << 32)
JOBS = max(1, len(os.sched_getaffinity(0)) // 2)
"""The other tests run beside this one."""


def run(mutant: Mutant) -> tuple[Mutant, int, str]:
    return mutant, *run_mutant(mutant)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_mutant_that_is_drawn_is_found(tell: Callable[[str], None]) -> None:
    count = max(COUNT_MIN, round(SHARE * len(MUTANTS)))
    drawn = random.Random(SEED).sample(MUTANTS, count)
    with ThreadPoolExecutor(JOBS) as pool:
        done: Sequence[tuple[Mutant, int, str]] = list(pool.map(run, drawn))
    broken = [
        f"{mutant.name}: {output}" for mutant, status, output in done if status not in (FOUND, SURVIVED)
    ]
    assert not broken, "\n".join(broken)
    survivors = [mutant.name for mutant, status, _ in done if status == SURVIVED]
    tell(f"mutants {len(done)} of {len(MUTANTS)}, found {len(done) - len(survivors)}, seed {SEED}")
    assert survivors == []


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_wrong() -> None:
    _, status, output = run(CONTROL)
    assert status == SURVIVED, output


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SLIPPED, ids=lambda mutant: mutant.name)
def test_a_slip_of_the_mutant_is_no_find(mutant: Mutant) -> None:
    _, status, output = run(mutant)
    assert status not in (FOUND, SURVIVED)
    assert "BrokenMutantError: AttributeError" in output


def test_the_search_of_soak_draws_other_seeds() -> None:
    found = run_mutants(seed=20261122, count=3)
    found.check()
    assert (found.count, found.counted["found"], found.counted["of them different"]) == (3, 3, 3)


def test_there_are_enough_of_them_and_each_can_be_made() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= COUNT_MIN
    for mutant in MUTANTS:
        assert compile(mutant.source(), mutant.file, "exec")
        assert bool(mutant.test) != bool(mutant.workloads)


def test_a_mutant_of_text_that_is_gone_is_an_error() -> None:
    with pytest.raises(StaleMutantError, match="0 times"):
        Mutant(name="stale", file="checkpoint/commit.py", edits=(("no such line", ""),)).source()


def test_the_readme_lists_every_mutant() -> None:
    text = Path(__file__).with_name("README.md").read_text()
    assert [mutant.name for mutant in MUTANTS if mutant.name not in text] == []

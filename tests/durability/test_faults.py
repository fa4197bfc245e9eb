"""EIO and ENOSPC at every n-th call on the devices, for every n: once, and from there on for good."""

import errno
from collections.abc import Generator

import pytest
from fault_operations import CLOSED_OPERATIONS, OPERATIONS
from fault_search import fail_calls
from fault_template import Kind, Template, make_template
from faults import CALLS_MAX, FOREVER, Failing, fail
from places import memory_folder

CLOSED_CALLS_MIN = 60
"""Fewer than these operations make: else they were not what is meant here."""
CLOSED = [
    pytest.param(name, times, id=f"{name}-{'once' if times == 1 else 'forever'}")
    for name in CLOSED_OPERATIONS
    for times in (1, FOREVER)
    if times == 1 or name == "recovery"
]
"""The others fail for good in `make soak`: each is a hundred recoveries."""


@pytest.fixture(scope="module")
def templates() -> Generator[dict[Kind, Template]]:
    with memory_folder() as folder:
        yield {kind: make_template(folder / kind.name, kind) for kind in Kind}


@pytest.mark.parametrize("times", [1, FOREVER], ids=["once", "forever"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_every_call_of_an_operation_may_fail(
    templates: dict[Kind, Template], name: str, number: int, times: int
) -> None:
    operation = OPERATIONS[name]
    failure_count = 0
    for fail_at in range(1, CALLS_MAX):
        outcome = fail(templates[operation.on], operation, Failing(number=number, times=times), fail_at)
        failure_count += not outcome.done
        if not outcome.reached:
            assert outcome.done
            assert (
                failure_count == 0 if number in operation.survives_one and times == 1 else failure_count > 1
            )
            return
    pytest.fail("the call count was never reached")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize(("name", "times"), CLOSED)
def test_every_call_on_a_closed_store_may_fail(
    templates: dict[Kind, Template], name: str, number: int, times: int
) -> None:
    operation = CLOSED_OPERATIONS[name]
    for fail_at in range(1, CALLS_MAX):
        outcome = fail(templates[operation.on], operation, Failing(number=number, times=times), fail_at)
        if not outcome.reached:
            assert outcome.done
            assert fail_at > CLOSED_CALLS_MIN
            return
    pytest.fail("the call count was never reached")


def test_the_search_of_soak_finds_nothing_in_other_stores() -> None:
    found = fail_calls(seed=20261122, count=120)
    found.check()
    assert found.count == 120
    assert found.counted["operations at every call"] > 0

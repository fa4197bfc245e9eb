"""The nonce of a worker group, over a Store that older groups have used: threads stand for the ranks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from everstep.core.errors import DeadlineError
from everstep.hook.group_nonce import agree_nonce


def agreed(store: HashStore, world_size: int) -> list[str]:
    """Every rank's nonce, each agreed in a thread of its own."""
    with ThreadPoolExecutor(world_size) as pool:
        ranks = [pool.submit(agree_nonce, store, rank, world_size, 20.0) for rank in range(world_size)]
        return [rank.result() for rank in ranks]


@given(world_sizes=st.lists(st.integers(2, 4), min_size=1, max_size=3))
def test_ranks_of_a_group_share_one_and_no_two_groups_do(world_sizes: list[int]) -> None:
    store, seen = HashStore(), set[str]()
    for world_size in world_sizes:
        nonces = agreed(store, world_size)
        assert len(nonces) == world_size
        assert len(set(nonces)) == 1
        assert nonces[0] not in seen
        seen |= set(nonces)


def test_one_that_asked_and_died_disturbs_nobody() -> None:
    store = HashStore()
    with pytest.raises(RuntimeError):  # nobody answers
        agree_nonce(store, 1, 2, 0.05)
    assert store.check(["asks/1"])
    first, second = agreed(store, 2)
    assert first == second


def test_rank_0_says_who_did_not_come() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(agree_nonce, store, 1, 4, 20.0)
        with pytest.raises(DeadlineError, match=r"ranks \[2, 3\] did not attach within 0\.2 s"):
            agree_nonce(store, 0, 4, 0.2)
        assert came.result()

"""The global generators: what is drawn after a restore is what would have been drawn."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from everstep.checkpoint.value_format import dump_values
from everstep.core.errors import CorruptDataError
from everstep.hook.capture import capture_state
from everstep.hook.rng_state import RngState, pack_python, unpack_python
from everstep.hook.state_testing import store


@pytest.fixture(autouse=True)
def _keep_generators() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    python, numpy_, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy_)
    torch.set_rng_state(torch_)


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        float(torch.rand(1)),
        float(torch.randn(1)),
    ]


def test_capturing_draws_nothing() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    capture_state([RngState()])
    assert draw() == expected


def test_a_later_capture_has_the_later_state_in_the_same_memory() -> None:
    """So that the addresses of a whole state stay what they were."""
    rng = RngState()
    addresses: list[int] = []
    for _ in range(3):
        torch.rand(1)
        (leaf,) = (each for each in capture_state([rng]).leaves if each.spec.name == "rng.torch_cpu")
        assert torch.equal(leaf.tensor, torch.get_rng_state())
        addresses.append(leaf.tensor.data_ptr())
    assert len(set(addresses)) == 1


def test_all_generators_go_on_from_the_boundary() -> None:
    draw()  # leaves a spare normal number in each generator
    stored = store([RngState()])
    expected = [draw() for _ in range(3)]
    rng = RngState()
    rng.check(stored)
    assert [draw() for _ in range(3)] != expected
    rng.apply(stored)
    assert [draw() for _ in range(3)] == expected


def test_states_can_be_put_back_again_without_the_checkpoint() -> None:
    stored = store([RngState()])
    expected = draw()
    rng = RngState()
    rng.apply(stored)
    stored.close()
    draw()
    rng.apply_again()
    assert draw() == expected


def test_without_a_restore_nothing_is_put_back() -> None:
    random.seed(1)
    expected = random.Random(1).random()
    RngState().apply_again()
    assert random.random() == expected


def test_the_leaf_of_torch_is_the_same_size_every_time() -> None:
    first, second = capture_state([RngState()]), capture_state([RngState()])
    assert [leaf.spec for leaf in first.leaves] == [leaf.spec for leaf in second.leaves]
    assert [leaf.spec.name for leaf in first.leaves] == ["rng.torch_cpu"]


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_what_is_kept_of_the_last_capture_is_what_a_new_one_finds(kind: type[np.random.BitGenerator]) -> None:
    """Of each generator alone: one draw, or a spare normal number, or another kind of generator is another state."""
    numpy_random: Any = np.random  # what its annotations leave out
    draws: list[Callable[[], object]] = [
        lambda: None,
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.gauss(0, 1),
        lambda: numpy_random.set_bit_generator(kind(1)),
        np.random.random_sample,
        np.random.standard_normal,
        np.random.standard_normal,
        lambda: None,
    ]
    rng, before = RngState(), numpy_random.get_bit_generator()
    try:
        seen: list[bytes] = []
        for each in draws:
            each()
            seen.append(dump_values(capture_state([rng]).values))
            assert seen[-1] == dump_values(capture_state([RngState()]).values)
    finally:
        numpy_random.set_bit_generator(before)
    assert len(set(seen)) == len(draws) - 1, "the last one draws nothing"


def test_python_states_are_packed_exactly() -> None:
    state = random.Random(3).getstate()
    assert unpack_python(pack_python(state)) == state


@pytest.mark.parametrize(
    "packed", [None, [], [3, b"", None], [3, b"abc", None], [4, b"\0" * 2500, None], "abc"]
)
def test_malformed_python_states_are_refused(packed: object) -> None:
    with pytest.raises(CorruptDataError, match="Python's generator"):
        unpack_python(packed)


@pytest.mark.gpu
def test_cuda_generators_go_on() -> None:
    torch.rand(1, device="cuda")
    stored = store([RngState()])
    expected = torch.rand(3, device="cuda")
    RngState().apply(stored)
    assert torch.equal(torch.rand(3, device="cuda"), expected)

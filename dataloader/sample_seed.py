"""Random numbers of augmentation as a function of (seed, epoch, sample), whoever prepares the sample.

Before each sample the three global generators that augmentation code draws from (`random`, `numpy.random`, torch's on
the CPU) are seeded with a hash of (seed, epoch, id): 8 µs per sample. So a sample looks the same whatever the number
of ranks and workers, and after any resume. A generator object that the dataset owns is out of reach.

Without workers this happens in the training process, whose generators belong to the trainer: `preserved()` puts them
back, once per batch (80 µs, most of it numpy's). CUDA generators are never touched.

A dataset that reads many samples in one call (`__getitems__`) draws for all of them from the seed at its begin. So it
is asked for one sample at a time, unless `augment_seed` is "batch": then what is drawn depends on who is in the batch.
"""

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, cast

import numpy as np
import torch

from ..core.errors import UsageError
from .hash_format import derive_keys, mix64_twice

AugmentSeed = bool | Literal["batch"]
"""True: a seed for each sample. "batch": for each call of `__getitems__`, where there is one. False: none."""

_INT64_MAX = 2**63 - 1


def parse_augment_seed(value: object) -> AugmentSeed:
    """Return the choice; UsageError where it is none."""
    if isinstance(value, bool):
        return value
    if value == "batch":
        return "batch"
    raise UsageError(
        f"augment_seed={value!r}",
        hint="True (each sample by itself), 'batch' (what __getitems__ reads in one call, together) or False",
    )


def sample_seed(seed: int, epoch: int, sample_id: int) -> int:
    """Return the 64-bit seed of one sample's random augmentation."""
    key_1, key_2 = derive_keys("sample", seed, epoch, 2)
    return mix64_twice(sample_id, key_1, key_2)


def batch_seed(seed: int, epoch: int, first_id: int) -> int:
    """Return the 64-bit seed of what is random in `collate_fn` (mixing samples of a batch, say)."""
    key_1, key_2 = derive_keys("batch", seed, epoch, 2)
    return mix64_twice(first_id, key_1, key_2)


def worker_seed(seed: int, epoch: int, rank: int) -> int:
    """Return the seed of the generator from which torch draws the base seed of its worker processes."""
    key_1, key_2 = derive_keys("workers", seed, epoch, 2)
    return mix64_twice(rank, key_1, key_2)


def sampler_seed(seed: int, epoch: int) -> int:
    """Return the seed of the global generators as a user's own sampler sees them."""
    return derive_keys("sampler", seed, epoch, 1)[0]


def stream_seed(seed: int, epoch: int, shard: int, index: int) -> int:
    """Return the seed of what is random about sample `index` of one shard of a stream."""
    key_1, key_2 = derive_keys(f"stream-{shard}", seed, epoch, 2)
    return mix64_twice(index, key_1, key_2)


def pipe_seed(seed: int, epoch: int) -> int:
    """Return the seed of the shufflers in a datapipe, the same for all its shares."""
    return derive_keys("pipe", seed, epoch, 1)[0]


def seed_generators(value: int) -> None:
    """Seed the global generators of `random`, numpy and torch (CPU only, unlike torch.manual_seed).

    Torch's without the highest bit: what it draws is the same, and `torch.initial_seed()` fits into a tensor.
    """
    random.seed(value)
    np.random.seed(value >> 32)  # the legacy generator is what augmentation code draws from
    torch.default_generator.manual_seed(value & _INT64_MAX)


@contextmanager
def preserved() -> Generator[None]:
    """Put the three global generators back, to the bit, however the block ends."""
    python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


class PrivateGenerators:
    """Generators of one's own, seeded once: inside `in_use()` they are the global ones, and outside untouched."""

    def __init__(self, value: int) -> None:
        self._seed: int | None = value
        self._states: tuple[object, ...] = ()

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Go on where the last block left these generators; the trainer's come back, however the block ends."""
        with preserved():
            if self._seed is not None:
                seed_generators(self._seed)
                self._seed = None
            else:
                python_state, numpy_state, torch_state = self._states
                random.setstate(cast("tuple[object, ...]", python_state))
                np.random.set_state(cast("dict[str, object]", numpy_state))
                torch.default_generator.set_state(cast(torch.Tensor, torch_state))
            try:
                yield
            finally:
                self._states = (
                    random.getstate(),
                    np.random.get_state(legacy=False),
                    torch.default_generator.get_state(),
                )

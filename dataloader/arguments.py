"""What the arguments of a loader mean, checked: tier, order, split between ranks, seed, and the name of the dataset."""

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed
from torch.utils.data import IterableDataset, IterDataPipe, graph_settings

from ..core.errors import UsageError
from .batch_maker import MapDataset
from .block_format import WINDOW_DEFAULT, BlockSpec, equal_blocks, listed_blocks
from .hash_format import SEED_MAX
from .order_format import OrderKind, OrderSpec
from .split_plan import Uneven
from .state_format import short_fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShuffle:
    """`shuffle=` for data that is read fast only in blocks (tar files, Parquet row groups): block_format.py.

        loader = everstep.DataLoader(dataset, batch_size=64, shuffle=BlockShuffle(block=1000, window=16))

    Args:
        block: samples per block, the last one maybe fewer; or the size of each block in the order of the samples;
            None: `dataset.block_sizes()`.
        window: how many blocks are shuffled together. More is closer to a uniform shuffle, and more is in use at once.

    A value that makes no sense is a UsageError of the loader that it is given to.
    """

    block: int | Iterable[int] | None = None
    window: int = WINDOW_DEFAULT


def tier_of(dataset: object, sampler: object, batch_sampler: object) -> OrderKind | None:
    """Return who else decides the order, or None where we do; torch's own checks refuse what excludes each other."""
    if isinstance(dataset, cast(type, IterableDataset)):
        return OrderKind.STREAM
    return None if sampler is None and batch_sampler is None else OrderKind.SAMPLER


STREAM_METHODS = ("state_dict", "set_ranks", "set_epoch")
"""What a stream may have to say where it stands, and to hear of (stream.py)."""


def shuffled_datapipe(dataset: object, shuffle: object) -> object:
    """Return the dataset; of a datapipe one that shuffles, or not, as torch makes it of `shuffle=`.

    Raises:
        UsageError: another kind of shuffling, or a shuffler behind a datapipe would hide what it says of itself.
    """
    if shuffle is None or not isinstance(dataset, IterDataPipe):
        return dataset
    if not isinstance(shuffle, bool):
        raise UsageError(f"shuffle={shuffle!r} with a datapipe", hint="True, False or nothing")
    pipe = cast(object, dataset)
    shuffled = cast(Any, graph_settings).apply_shuffle_settings(pipe, shuffle=shuffle)
    hidden = [name for name in STREAM_METHODS if shuffled is not pipe and hasattr(pipe, name)]
    if hidden:
        raise UsageError(
            f"shuffle=True would put a shuffler behind {type(pipe).__name__}, and hide its {hidden[0]}()",
            hint="leave shuffle= out, and shuffle inside of it",
        )
    return shuffled


def check_arguments(dataset: object, kind: OrderKind | None, in_order: bool) -> None:
    """Return if a loader of this dataset can be resumed exactly; UsageError for what torch would take."""
    if not in_order:
        raise UsageError("in_order=False cannot be resumed exactly", hint="leave it out")
    if kind is None and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(f"{type(dataset).__name__} has no __getitem__ or no __len__", hint=hint_for(dataset))


def count_of(dataset: object, kind: OrderKind | None) -> int:
    """Return the number of samples; 0 for a stream, and for what has no length beside a sampler of the user's."""
    if kind is OrderKind.STREAM or (kind is not None and not hasattr(dataset, "__len__")):
        return 0
    return len(cast(MapDataset, dataset))


def order_of(
    dataset: object,
    kind: OrderKind | None,
    sample_count: int,
    shuffle: "bool | str | BlockShuffle | None",
    seed: int,
) -> OrderSpec:
    """Return the order of a loader, whoever decides it."""
    if kind is not None:
        return OrderSpec(kind=kind, seed=seed)
    return parse_order(dataset, sample_count, shuffle, seed)


def parse_order(
    dataset: object, sample_count: int, shuffle: "bool | str | BlockShuffle | None", seed: int
) -> OrderSpec:
    """Return the order that `shuffle=` asks for."""
    if getattr(dataset, "order_kind", None) is OrderKind.CONTINUED:
        if shuffle:
            raise UsageError(
                f"shuffle={shuffle!r} with a {type(dataset).__name__}, which shuffles its datasets itself",
                hint="say it to the mixture: Mixture(..., shuffle=...)",
            )
        return OrderSpec(kind=OrderKind.CONTINUED, seed=seed)
    if shuffle == "blocks":
        shuffle = BlockShuffle()
    if isinstance(shuffle, BlockShuffle):
        blocks = blocks_of(dataset, sample_count, shuffle)
        return OrderSpec(kind=OrderKind.BLOCKS, seed=seed, blocks=blocks)
    if isinstance(shuffle, str):
        raise UsageError(f"shuffle is True, False, 'blocks' or a BlockShuffle, got {shuffle!r}")
    return OrderSpec(kind=OrderKind.PERMUTED if shuffle else OrderKind.SEQUENTIAL, seed=seed)


def blocks_of(dataset: object, sample_count: int, shuffle: BlockShuffle) -> BlockSpec:
    """Return the blocks of a dataset; UsageError where they are not known or hold another number of samples."""
    block = shuffle.block
    if isinstance(block, int):
        return equal_blocks(sample_count, block, shuffle.window)
    if block is None:
        own = cast(
            "Callable[[], Iterable[int]] | Iterable[int] | None", getattr(dataset, "block_sizes", None)
        )
        block = own() if callable(own) else own
    if block is None:
        raise UsageError(
            f"{type(dataset).__name__} has no block_sizes()",
            hint="shuffle=BlockShuffle(block=samples per block), or give the dataset a block_sizes()",
        )
    blocks = listed_blocks(block, shuffle.window)
    if blocks.sample_count != sample_count:
        raise UsageError(
            f"the blocks of {type(dataset).__name__} hold {blocks.sample_count} samples, the dataset {sample_count}",
            hint="block sizes are those of all blocks, in the order of the samples",
        )
    return blocks


def fingerprint_of(dataset: object) -> str:
    """Return what tells this dataset from others in a state: `dataset.fingerprint()` where there is one.

    Else the name of its class, which with the number of samples is all that is cheap and the same at each start:
    samples may be augmented at random or slow to read. Give a dataset a `fingerprint()` that follows its contents.
    """
    own = getattr(dataset, "fingerprint", None)
    value = cast(object, own() if callable(own) else own)
    if value is None:
        return short_fingerprint(type(dataset).__qualname__)
    if isinstance(value, bytes):
        value = value.hex()
    if not isinstance(value, str):
        raise UsageError(
            f"{type(dataset).__name__}.fingerprint() returned {type(value).__name__}",
            hint="return str or bytes",
        )
    return short_fingerprint(value)


def hint_for(dataset: object) -> str:
    """Return what to give in the place of something that is no map-style dataset."""
    if callable(getattr(dataset, "get_bytes", None)):
        return "a source is read by everstep.dataloader.sources.SourceDataset(source, decode=...): give that"
    return "give a map-style dataset: __getitem__ and __len__"


def parse_uneven(uneven: str) -> Uneven:
    """Return the choice of this name."""
    try:
        return Uneven(uneven)
    except ValueError as exc:
        raise UsageError(f"uneven is 'weight', 'step', 'drop' or 'error', got {uneven!r}") from exc


def parse_rank(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return (rank, world size) where they are given; UsageError for one without the other, or out of range."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise UsageError(
            f"rank={rank}, world_size={world_size}", hint="give both with 0 <= rank < world_size, or none"
        )
    return rank, world_size


def rank_and_size() -> tuple[int, int]:
    """Return (rank, world size) as torch.distributed says now; (0, 1) where it is not initialized."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if os.environ.get("WORLD_SIZE", "1") not in {"", "1"}:
        warnings.warn(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} but torch.distributed is not initialized: this rank gets all the "
            "data; initialize it before the first batch, or pass rank= and world_size=",
            stacklevel=4,
        )
    return 0, 1


def parse_seed(seed: int | None, generator: torch.Generator | None) -> int:
    """Return the seed: as given, else the generator's, else 0."""
    value = seed if seed is not None else 0 if generator is None else generator.initial_seed()
    if not 0 <= value <= SEED_MAX:
        raise UsageError(f"seed is a whole number from 0 to 2^64 - 1, got {value}")
    return value

"""Order, resumable loader, exactly-once ledger and cached datasets.

Names are imported when they are first used, so that the daemon and the command line can import the numpy-free
modules (`ledger_format` and what it needs) without torch.
"""

if __name__ != "everstep.dataloader":
    raise ImportError(
        f"imported as {__name__!r}: the repository root is on sys.path; use everstep.dataloader"
    )

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arguments import BlockShuffle
    from .cache.cached_dataset import CachedDataset
    from .cache.store_members import members_from_store
    from .holes_format import skip
    from .ledger import Ledger
    from .loader import DataLoader
    from .mixture import Mixture
    from .order_batch_sampler import OrderBatchSampler
    from .shard_stream import ShardStream
    from .shared.shared_loader import SharedLoader

__all__ = [
    "BlockShuffle",
    "CachedDataset",
    "DataLoader",
    "Ledger",
    "Mixture",
    "OrderBatchSampler",
    "ShardStream",
    "SharedLoader",
    "members_from_store",
    "skip",
]

_HOME = {
    "BlockShuffle": "arguments",
    "CachedDataset": "cache.cached_dataset",
    "DataLoader": "loader",
    "Ledger": "ledger",
    "Mixture": "mixture",
    "OrderBatchSampler": "order_batch_sampler",
    "ShardStream": "shard_stream",
    "SharedLoader": "shared.shared_loader",
    "members_from_store": "cache.store_members",
    "skip": "holes_format",
}


def __getattr__(name: str) -> object:
    """Return a public name, importing its module at the first use (PEP 562)."""
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

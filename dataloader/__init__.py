"""Order, resumable loader, exactly-once ledger and cached datasets.

Names are imported when they are first used, so that the daemon and the command line can import the numpy-free
modules (`ledger_format` and what it needs) without torch.
"""

if __name__ != "everstep.dataloader":
    raise ImportError(
        f"imported as {__name__!r}: the repository root is on sys.path; use everstep.dataloader"
    )

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cache.cached_dataset import CachedDataset
    from .ledger import Ledger
    from .loader import DataLoader

__all__ = ["CachedDataset", "DataLoader", "Ledger"]


def __getattr__(name: str) -> object:
    """Return a public name, importing its module at the first use (PEP 562)."""
    if name == "CachedDataset":
        from .cache.cached_dataset import CachedDataset  # noqa: PLC0415  needs torch

        return CachedDataset
    if name == "DataLoader":
        from .loader import DataLoader  # noqa: PLC0415  needs torch

        return DataLoader
    if name == "Ledger":
        from .ledger import Ledger  # noqa: PLC0415  needs numpy

        return Ledger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

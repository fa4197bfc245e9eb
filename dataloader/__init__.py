"""Order, resumable loader and exactly-once ledger.

Names are imported when they are first used, so that the daemon and the command line can import the numpy-free
modules (`ledger_format` and what it needs) without torch.
"""

if __name__ != "everstep.dataloader":
    raise ImportError(
        f"imported as {__name__!r}: the repository root is on sys.path; use everstep.dataloader"
    )

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ledger import Ledger
    from .loader import DataLoader
    from .shared.shared_loader import SharedLoader

__all__ = ["DataLoader", "Ledger", "SharedLoader"]


def __getattr__(name: str) -> object:
    """Return a public name, importing its module at the first use (PEP 562)."""
    if name == "DataLoader":
        from .loader import DataLoader  # noqa: PLC0415  needs torch

        return DataLoader
    if name == "SharedLoader":
        from .shared.shared_loader import SharedLoader  # noqa: PLC0415  needs torch

        return SharedLoader
    if name == "Ledger":
        from .ledger import Ledger  # noqa: PLC0415  needs numpy

        return Ledger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

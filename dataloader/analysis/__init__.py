"""Stall analysis: where the time of a training step goes, and what would change it.

Names are imported when they are first used: the command line imports the modules here that need no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .analyzer import StallAnalyzer
    from .live import StallMeter

__all__ = ["StallAnalyzer", "StallMeter"]


def __getattr__(name: str) -> object:
    """Return a public name, importing its module at the first use (PEP 562)."""
    if name == "StallAnalyzer":
        from .analyzer import StallAnalyzer  # noqa: PLC0415  needs torch

        return StallAnalyzer
    if name == "StallMeter":
        from .live import StallMeter  # noqa: PLC0415  needs torch

        return StallMeter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What an inspection of a store finds, as values."""

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How bad a finding is."""

    NOTE = "note"
    """Worth knowing; nothing has to be done, or not by everstep."""
    REPAIRABLE = "repairable"
    """A crash or damage that costs no checkpoint: recovery makes it whole."""
    LOST = "lost"
    """Something committed cannot be had now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as a store should be."""

    severity: Severity
    path: str
    problem: str
    """What it is and means, one sentence."""
    repair: str = ""
    """What recovery or `fsck --repair` does with it; empty: nothing."""

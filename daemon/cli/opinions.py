"""What a check of `everstep doctor` says: how bad it is, what was found, what to do."""

from dataclasses import dataclass
from enum import Enum


class Health(Enum):
    """How bad it is."""

    UNKNOWN = "-"
    """There was nothing to look at."""
    OK = "ok"
    WARN = "warn"
    """It works, slower or with less room than it could."""
    FAIL = "fail"
    """everstep does not work there, or a promise does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What a check says."""

    health: Health
    found: str
    advice: str = ""
    """What to do; empty when all is well."""


def no_opinion(found: str) -> Opinion:
    """It could not be looked at."""
    return Opinion(health=Health.UNKNOWN, found=found)


def ok_opinion(found: str) -> Opinion:
    """All is well."""
    return Opinion(health=Health.OK, found=found)


def warn_opinion(found: str, advice: str) -> Opinion:
    """It works, but could be better."""
    return Opinion(health=Health.WARN, found=found, advice=advice)


def fail_opinion(found: str, advice: str) -> Opinion:
    """It does not work."""
    return Opinion(health=Health.FAIL, found=found, advice=advice)

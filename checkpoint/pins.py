"""Pins: what keeps a checkpoint from being collected for a time, for a tool that copies it or a person who looks at it.

A pin is a tag of a form that no person can give: `pin:<seconds since 1970, or 0>:<label>`. So it is as durable as a
tag, every reader of the format knows that its checkpoint stays, and an older daemon shows it as a tag that can be
taken away.
"""

import contextlib
import re
from dataclasses import dataclass

from ..core.errors import NotFoundError, UsageError
from ..core.ids import CheckpointId
from .run_store import RunStore
from .tags import add_tag, remove_tag

PIN_PREFIX = "pin:"
LABEL_BYTES_MAX = 60
_FORM = re.compile(r"pin:(0|[1-9][0-9]{0,11}):(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Why a checkpoint stays, and how long."""

    label: str
    expires_unix_s: int = 0
    """0: it does not end by itself."""

    def __post_init__(self) -> None:
        if not self.label or len(self.label.encode()) > LABEL_BYTES_MAX or not self.label.isprintable():
            raise UsageError(
                f"a pin's label is 1 to {LABEL_BYTES_MAX} bytes of printable text, got {self.label!r}",
                hint="choose another label",
            )

    @property
    def tag_name(self) -> str:
        """The tag that it is."""
        return f"{PIN_PREFIX}{self.expires_unix_s}:{self.label}"

    def has_expired(self, now_unix_s: float) -> bool:
        """Tell whether its time is over."""
        return 0 < self.expires_unix_s <= now_unix_s


def pin_of(tag_name: str) -> Pin | None:
    """Return the pin that a tag is; None for a tag that a person gave."""
    found = _FORM.fullmatch(tag_name)
    if found is None or len(found[2].encode()) > LABEL_BYTES_MAX:
        return None
    return Pin(label=found[2], expires_unix_s=int(found[1]))


def pins(run: RunStore) -> dict[Pin, CheckpointId]:
    """Return the checkpoint of each pin of a run."""
    found = {pin_of(name): checkpoint for name, checkpoint in run.tags().items()}
    return {pin: checkpoint for pin, checkpoint in found.items() if pin is not None}


def add_pin(run: RunStore, pin: Pin, checkpoint: CheckpointId) -> None:
    """Return when the pin is durable on all present devices; with the same label again its time is set anew.

    Raises:
        UsageError: the label is on another checkpoint.
        NotFoundError: the checkpoint is not here.
        StorageError: a device failed, or one is missing while a pin of this label is to be replaced.
    """
    with run.pinning:
        before = {each: place for each, place in pins(run).items() if each.label == pin.label}
        for place in before.values():
            if place != checkpoint:
                raise UsageError(
                    f"pin {pin.label!r} of run {run.name!r} is on checkpoint {place}",
                    hint="unpin it first, or choose another label",
                )
        add_tag(run, pin.tag_name, checkpoint)
        for each in before:
            if each != pin:
                _drop(run, each)


def remove_pin(run: RunStore, label: str) -> CheckpointId:
    """Return the checkpoint that had the pin, when it is gone durably from all devices.

    Raises:
        NotFoundError: there is no such pin.
        StorageError: a device is missing or failed: what is not removed everywhere would come back.
    """
    with run.pinning:
        found = [each for each in pins(run) if each.label == label]
        if not found:
            raise NotFoundError(f"run {run.name!r} has no pin {label!r}", hint="`everstep ls` shows the pins")
        return [remove_tag(run, each.tag_name) for each in found][-1]


def next_expiry_unix_s(run: RunStore) -> float | None:
    """Return when the first pin of a run ends; None: none does by itself."""
    return min((pin.expires_unix_s for pin in pins(run) if pin.expires_unix_s), default=None)


def remove_expired(run: RunStore, now_unix_s: float) -> list[Pin]:
    """Take away the pins whose time is over; StorageError as `remove_pin`."""
    with run.pinning:
        expired = [pin for pin in pins(run) if pin.has_expired(now_unix_s)]
        for pin in expired:
            _drop(run, pin)
    return expired


def _drop(run: RunStore, pin: Pin) -> None:
    """Take a pin away; nothing where it went meanwhile, with its checkpoint."""
    with contextlib.suppress(NotFoundError):
        remove_tag(run, pin.tag_name)

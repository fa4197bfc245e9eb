"""Identities that travel through every folder: checkpoint ids, run ids, generations."""

import hashlib
import os
import re
from dataclasses import dataclass

RUN_NAME_BYTES_MAX = 200
TAG_NAME_BYTES_MAX = 100
_HEX32 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """(attempt, step), ordered as the design orders checkpoints: newest = largest attempt, then step."""

    attempt: int
    step: int

    def __post_init__(self) -> None:
        if self.attempt < 1 or self.step < 0:
            raise ValueError(
                f"attempt must be >= 1 and step >= 0, got attempt={self.attempt} step={self.step}"
            )

    def __str__(self) -> str:
        return f"{self.attempt}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointId":
        """Return the id written as `<attempt>.<step>`; ValueError on anything else."""
        attempt, dot, step = text.partition(".")
        if not (dot and attempt.isascii() and attempt.isdigit() and step.isascii() and step.isdigit()):
            raise ValueError(f"a checkpoint is named <attempt>.<step>, got {text!r}")
        return cls(int(attempt), int(step))


def run_id_of(name: str) -> str:
    """Return the 32-hex-digit directory-safe id of a run name; equal names give equal ids on every node.

    Raises:
        ValueError: the name is empty, longer than 200 bytes of UTF-8, or holds control characters.
    """
    if not name or len(name.encode()) > RUN_NAME_BYTES_MAX or not name.isprintable():
        raise ValueError(f"a run name is 1 to {RUN_NAME_BYTES_MAX} bytes of printable text, got {name!r}")
    return hashlib.sha256(b"everstep-run\0" + name.encode()).hexdigest()[:32]


def tag_id_of(name: str) -> str:
    """Return the 32-hex-digit directory-safe id of a tag's name.

    Raises:
        ValueError: the name is empty, longer than 100 bytes of UTF-8, or holds control characters.
    """
    if not name or len(name.encode()) > TAG_NAME_BYTES_MAX or not name.isprintable():
        raise ValueError(f"a tag is 1 to {TAG_NAME_BYTES_MAX} bytes of printable text, got {name!r}")
    return hashlib.sha256(b"everstep-tag\0" + name.encode()).hexdigest()[:32]


def random_id() -> str:
    """Return a fresh random 128-bit id as 32 hex digits (generations, devices, stores)."""
    return os.urandom(16).hex()


def is_id(text: str) -> bool:
    """Tell whether `text` is 32 lower-case hex digits, the only form of a generated id that may reach a path."""
    return _HEX32.fullmatch(text) is not None

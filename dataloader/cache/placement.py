"""Who owns a sample: the one question to ask between this node's memory and storage.

One node has one answer. Several nodes will answer by (sample id, members); a reader that misses asks `owner`, and
reads from its own source what is owned here, or by a peer that does not answer.
"""

from typing import Protocol


class Placement(Protocol):
    """A pure function of (sample id, members)."""

    def owner(self, index: int) -> str | None:
        """Return the address of the node that keeps sample `index`; None: this one."""
        ...


class ThisNode:
    """Every sample is owned by the node that reads it."""

    def owner(self, index: int) -> str | None:
        """Return None."""
        return None

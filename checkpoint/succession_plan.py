"""Which of several manifests under one name takes the place of the others. Pure.

A committed shard that lost a device is written again under its own name. Its manifest says in a note which generations
it replaces, so that a device which was away and comes back with an older one is understood. Two contents of which
neither replaces the other come from two writers, and nobody can say which is right.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from .manifest_types import ManifestHead

REPLACES_NOTE = "replaces"
"""Generations, oldest first, separated by spaces. A trainer's own note of this name is dropped."""


def replaced_by(committed: ManifestHead) -> str:
    """Return the note of a manifest that takes the place of `committed`."""
    return " ".join((*replaced_generations(committed), committed.generation))


def newest_first(heads: Iterable[ManifestHead]) -> Sequence[ManifestHead]:
    """Return the manifests of one shard, each before those that it replaces; none where they contradict each other."""
    ordered = sorted(heads, key=lambda head: -len(replaced_generations(head)))
    for newer, older in pairwise(ordered):
        if older.generation not in replaced_generations(newer):
            return ()
    return ordered


def replaced_generations(head: ManifestHead) -> list[str]:
    """Return the generations that a manifest takes the place of, the oldest first."""
    return head.notes.get(REPLACES_NOTE, "").split()

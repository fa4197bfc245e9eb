"""Which of several manifests under one name takes the place of the others. Pure.

A committed shard that lost a device is written again under its own name. Its manifest says in a note which generations
it replaces, so that a device which was away and comes back with an older one is understood. A write whose outcome
nobody learnt, on a device that failed then, may have left a manifest that no other one names; so each says, too, of
which snapshot it is. All that are of one snapshot are right. Two contents of which neither replaces the other, and that
are not known to be of one snapshot, come from two writers, and nobody can say which is right.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from .manifest_types import ManifestHead

REPLACES_NOTE = "replaces"
"""Generations, oldest first, separated by spaces. A trainer's own note of this name is dropped."""

SNAPSHOT_NOTE = "snapshot"
"""32 random hex digits, which the trainer has made for one rank's snapshot and will make for no other."""


def replaced_by(committed: ManifestHead) -> str:
    """Return the note of a manifest that takes the place of `committed`."""
    return " ".join((*replaced_generations(committed), committed.generation))


def newest_first(heads: Iterable[ManifestHead]) -> Sequence[ManifestHead]:
    """Return the manifests of one shard, each before those that it replaces; none where they contradict each other."""
    ordered = sorted(heads, key=_age, reverse=True)
    if all(takes_place_of(newer, older) for newer, older in pairwise(ordered)):
        return ordered
    return ()


def takes_place_of(newer: ManifestHead, older: ManifestHead) -> bool:
    """Tell whether a manifest makes another one needless."""
    if older.generation in replaced_generations(newer):
        return True
    snapshot = newer.notes.get(SNAPSHOT_NOTE, "")
    return snapshot != "" and older.notes.get(SNAPSHOT_NOTE) == snapshot and _age(newer) > _age(older)


def replaced_generations(head: ManifestHead) -> list[str]:
    """Return the generations that a manifest takes the place of, the oldest first."""
    return head.notes.get(REPLACES_NOTE, "").split()


def _age(head: ManifestHead) -> tuple[int, float, str]:
    return len(replaced_generations(head)), head.created_unix_s, head.generation

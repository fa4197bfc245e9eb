"""Whose connections to a socket are too many. Pure."""

from collections.abc import Collection, Mapping

CONNECTIONS_PER_USER_MAX = 64
"""Commands and tools of one user that are connected at the same time; each connection carries many calls."""


def too_many(
    connections: Mapping[int, int], unbounded: Collection[int], count_max: int = CONNECTIONS_PER_USER_MAX
) -> dict[int, int]:
    """Return those that end, with their uids: `connections` are uids by the socket's inode, the oldest first.

    The newest of a user end. Users in `unbounded` keep all of theirs.
    """
    counts: dict[int, int] = {}
    found: dict[int, int] = {}
    for inode, uid in connections.items():
        counts[uid] = counts.get(uid, 0) + 1
        if counts[uid] > count_max and uid not in unbounded:
            found[inode] = uid
    return found

"""The frames of a cache over several nodes: a reader asks its daemon for what peers own (docs/cache.md).

The descriptor of an inbox travels beside `InboxReady`. Bytes of samples never travel here.
"""

from typing import Annotated

import msgspec

ASK_SAMPLES_MAX = 4096
Address = Annotated[str, msgspec.Meta(max_length=300)]
MEMBERS_MAX = 1024


class AskAddress(msgspec.Struct, frozen=True, tag="ask_address"):
    """Ask under which name other nodes reach this daemon."""

    request_id: int


class OpenInbox(msgspec.Struct, frozen=True, tag="open_inbox"):
    """Ask for memory that the daemon puts peers' samples into; it takes the place of what this client had before."""

    request_id: int
    size_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]


class AskPeers(msgspec.Struct, frozen=True, tag="ask_peers"):
    """Fetch samples that other nodes own into the inbox, over what lay there; one at a time."""

    request_id: int
    samples: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=ASK_SAMPLES_MAX)]


class FlushPeers(msgspec.Struct, frozen=True, tag="flush_peers"):
    """Answered when nothing that was read here waits any more to be sent to its owner, sent or given up."""

    request_id: int


PeerRequest = AskAddress | OpenInbox | AskPeers | FlushPeers


class PeerAddress(msgspec.Struct, frozen=True, tag="peer_address"):
    """Host and port; empty: this daemon serves no other node."""

    re: int
    address: str


class InboxReady(msgspec.Struct, frozen=True, tag="inbox_ready"):
    """Memory of this client's own (its descriptor beside this frame)."""

    re: int
    size_bytes: int


class PeersGave(msgspec.Struct, frozen=True, tag="peers_gave"):
    """What peers had of the samples that were asked for; the others are for storage."""

    re: int
    items: list[tuple[int, int, int]]
    """Sample id, offset in the inbox, length; their digests hold."""
    left_out: list[int]
    """Peers have these, too, but the inbox is full: ask again."""


class CacheMembers(msgspec.Struct, frozen=True, tag="cache_members"):
    """Who shares this client's cache now."""

    members: list[str]
    """Empty: this node alone."""
    me: str
    """The member that this node is; empty: it is none."""


PeerReply = PeerAddress | InboxReady | PeersGave | CacheMembers

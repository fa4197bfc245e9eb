"""The frames of shared preparation: jobs of one user that walk the same batches, each prepared once (docs/shared.md).

Batches are numbered g = epoch * batches_per_epoch + b. Descriptors travel beside `ShareStaged` and `ShareReady`, never
to the daemon. Bytes of batches never travel here.
"""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
LEAVES_MAX = 4100
"""Of a first batch."""
Quarantined = Annotated[list[tuple[Count, Count, Word]], msgspec.Meta(max_length=256)]
"""Samples that kill workers: id, deaths, how the last worker ended."""


class ShareKey(msgspec.Struct, frozen=True):
    """What must be equal in all jobs of a group, so that their batches are."""

    dataset: Word
    """Its fingerprint."""
    samples: Count
    order: Word
    seed: Annotated[int, msgspec.Meta(ge=0)]
    batch_size: Count
    """0: samples are not batched."""
    drop_last: bool
    augment_seed: bool


class JoinShare(msgspec.Struct, frozen=True, tag="join_share"):
    """Take part in a group, which is made if this user has none of this name; once for a connection."""

    request_id: int
    group: Word
    key: ShareKey
    first_batch: Annotated[list[tuple[str, str, str]], msgspec.Meta(max_length=LEAVES_MAX)]
    """Path, kind and digest of each leaf of batch 0 of epoch 0, as this job prepares it."""
    first_batch_size_bytes: Count
    budget_bytes: Count
    """Of batches that the daemon keeps for the group; the largest of its jobs' counts."""
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    """How long this job may take to prepare a batch before another does it."""
    position: Count
    """The batch that it wants first."""
    jobs: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    """Nothing is leased before so many have joined, or one of them has waited for `gather_s`."""
    gather_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0
    helps_while_waiting: bool = False
    """Its own process prepares: its offers hold only while it waits for a batch."""


class LeaveShare(msgspec.Struct, frozen=True, tag="leave_share"):
    """The job ends its part in the group; the end of the connection says the same."""


class StageShare(msgspec.Struct, frozen=True, tag="stage_share"):
    """Ask for memory to put prepared batches into; it takes the place of what this job had before."""

    request_id: int
    size_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]


class OfferShare(msgspec.Struct, frozen=True, tag="offer_share"):
    """The job can prepare so many batches more than it was leased until now."""

    count: Annotated[int, msgspec.Meta(ge=0, le=4096)]


class PublishShare(msgspec.Struct, frozen=True, tag="publish_share"):
    """A prepared batch lies in the job's staging: the daemon copies, checks and keeps it for all."""

    request_id: int
    batch: Count
    offset_bytes: Count
    size_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]
    xxh3: Annotated[int, msgspec.Meta(ge=0)]
    left_out: Quarantined = []
    """Samples of the batch that are not in it; from now on the group leaves them out."""


class FailShare(msgspec.Struct, frozen=True, tag="fail_share"):
    """A leased batch cannot be prepared here: each job sees to it itself."""

    batch: Count


class WantShare(msgspec.Struct, frozen=True, tag="want_share"):
    """Ask for a batch; answered by `ShareReady` or `SharePrivate`, when it is known which."""

    request_id: int
    batch: Count


class TookShare(msgspec.Struct, frozen=True, tag="took_share"):
    """The job has this batch and goes on with the next one, which it does not want yet; wanting it says as much."""

    batch: Count


class LocateShare(msgspec.Struct, frozen=True, tag="locate_share"):
    """Ask where the other jobs are."""

    request_id: int


ShareRequest = (
    JoinShare
    | LeaveShare
    | StageShare
    | OfferShare
    | PublishShare
    | FailShare
    | WantShare
    | TookShare
    | LocateShare
)


class ShareJoined(msgspec.Struct, frozen=True, tag="share_joined"):
    """The job takes part."""

    re: int
    jobs: int
    """That take part now, with this one."""
    quarantined: list[tuple[int, int, str]] = []
    """What the group leaves out."""


class ShareStaged(msgspec.Struct, frozen=True, tag="share_staged"):
    """The memory asked for (fd beside this frame)."""

    re: int
    size_bytes: int


class ShareLeased(msgspec.Struct, frozen=True, tag="share_leased"):
    """The job is to prepare these batches now, in this order."""

    batches: list[int]
    quarantined: list[tuple[int, int, str]] = []
    """What the group has come to leave out since the job was told last."""


class ShareReady(msgspec.Struct, frozen=True, tag="share_ready"):
    """The batch asked for lies in a memfd that nobody can change (fd beside this frame).

    Answered by `TookShare` or the next `WantShare`.
    """

    re: int
    batch: int
    size_bytes: int
    left_out: list[tuple[int, int, str]] = []
    """As in `PublishShare`."""


class SharePrivate(msgspec.Struct, frozen=True, tag="share_private"):
    """The job prepares all batches from the one asked for up to `until`, which is not one of them, for itself."""

    re: int
    batch: int
    until: int


class SharePlace(msgspec.Struct, frozen=True, tag="share_place"):
    """Where the others are: the lowest batch that one of those in the window wants next; -1 where there are none."""

    re: int
    batch: int


ShareReply = ShareJoined | ShareStaged | ShareLeased | ShareReady | SharePrivate | SharePlace

SHARE_CARRIES_DESCRIPTOR = ShareStaged | ShareReady

"""The groups of a daemon: who takes part, and what each frame of theirs means."""

import contextlib
import logging
import os
from collections.abc import AsyncGenerator

from ...core.errors import MemoryRefusedError, NotFoundError, UsageError
from ...proto import frames
from ...proto.share_frames import (
    FailShare,
    JoinShare,
    LeaveShare,
    LocateShare,
    OfferShare,
    PublishShare,
    ShareJoined,
    SharePlace,
    ShareStaged,
    StageShare,
    TookShare,
    WantShare,
)
from ..arena_book import ArenaBook
from ..blocking import in_thread
from ..control.views import ShareGroupView
from ..events.event_types import EventKind
from ..events.reporter import Reporter
from .group import Client, Group, Kept, Member, Want
from .metrics import ShareMetrics
from .staging import copy_batch, make_staging

logger = logging.getLogger(__name__)


class ShareBook:
    """Owned by the event loop. A group is known by its user and its name; nobody learns of another user's."""

    def __init__(self, arenas: ArenaBook, metrics: ShareMetrics, reporter: Reporter) -> None:
        self._arenas, self._metrics, self._reporter = arenas, metrics, reporter
        self._groups: dict[tuple[int, str], Group] = {}
        self._members: dict[Client, Member] = {}
        self._numbers = 0

    @property
    def has_jobs(self) -> bool:
        """Tell whether any job takes part in a group."""
        return bool(self._members)

    @property
    def size_bytes(self) -> int:
        """Bytes of kept batches and of stagings."""
        kept = sum(group.size_bytes for group in self._groups.values())
        return kept + sum(member.staged_bytes for member in self._members.values())

    def views(self, uid: int | None) -> tuple[ShareGroupView, ...]:
        """Return the groups of this user (None: all), by name."""
        groups = [each for each in self._groups.values() if uid in (None, each.uid)]
        return tuple(each.view() for each in sorted(groups, key=lambda each: (each.name, each.uid)))

    def join(self, client: Client, frame: JoinShare) -> None:
        """Let a client take part; refused where its batches would be others than the group's.

        Raises:
            UsageError: it takes part already, or a part of the key or a leaf of its first batch differs.
        """
        if client.has_ended:
            return
        if client in self._members:
            raise UsageError("this connection takes part in a group already")
        place = (client.peer.uid, frame.group)
        group = self._groups.get(place)
        if group is None:
            group = self._groups[place] = Group(
                frame, uid=client.peer.uid, metrics=self._metrics, give_back=self._arenas.give_back
            )
        group.check(frame)
        self._numbers += 1
        member = Member(
            group=group,
            number=self._numbers,
            client=client,
            lease_s=frame.lease_s,
            helps_while_waiting=frame.helps_while_waiting,
        )
        self._members[client] = member
        self._metrics.jobs.set(len(self._members))
        logger.info(
            "share_joined group=%s pid=%d jobs=%d", frame.group, client.peer.pid, len(group.members) + 1
        )
        client.send(
            ShareJoined(re=frame.request_id, jobs=len(group.members) + 1, quarantined=group.quarantined)
        )
        group.add(member, frame)
        self._tell(EventKind.GROUP_JOINED, group, client)

    def leave(self, client: Client) -> bool:
        """End a client's part, if it has one, and tell whether it had."""
        member = self._members.pop(client, None)
        if member is None:
            return False
        group = member.group
        self._drop_staging(member)
        group.remove(member)
        if not group.members:
            group.close()
            self._groups = {place: each for place, each in self._groups.items() if each is not group}
        self._metrics.jobs.set(len(self._members))
        self._metrics.bytes.set(self.size_bytes)
        logger.info("share_left group=%s pid=%d jobs=%d", group.name, client.peer.pid, len(group.members))
        self._tell(EventKind.GROUP_LEFT, group, client)
        return True

    def _tell(self, kind: EventKind, group: Group, client: Client) -> None:
        does, count = "joined" if kind is EventKind.GROUP_JOINED else "left", len(group.members)
        text = f"job {client.peer.pid} {does} group {group.name!r}, which has {count} now"
        self._reporter.add(kind, text, owner_uid=group.uid, subject=group.name, count=count)

    def on_frame(
        self,
        client: Client,
        frame: LeaveShare | OfferShare | FailShare | WantShare | TookShare | LocateShare,
    ) -> None:
        """Carry out what needs no waiting."""
        if isinstance(frame, LeaveShare):
            self.leave(client)
            return
        member = self._member(client)
        group = member.group
        match frame:
            case OfferShare():
                is_heard = member.want is not None or not member.helps_while_waiting
                member.offered = frame.count if is_heard else 0
            case FailShare():
                group.machine.failed(frame.batch)
            case WantShare():
                group.wanted(member, Want(request_id=frame.request_id, batch=frame.batch))
            case TookShare():
                group.machine.took(member.number, frame.batch)
            case LocateShare():
                place = group.machine.lowest(besides=member.number)
                client.send(SharePlace(re=frame.request_id, batch=place))
        group.settle()
        self._metrics.bytes.set(self.size_bytes)

    async def stage(self, client: Client, frame: StageShare) -> tuple[frames.Reply, int]:
        """Return memory for a job to put its batches into.

        Raises:
            MemoryRefusedError: a batch of that size could not be kept, or there is no room for the staging.
        """
        member = self._member(client)
        budget_bytes = member.group.machine.budget_bytes
        if frame.size_bytes > budget_bytes:
            raise MemoryRefusedError(
                f"a batch of {frame.size_bytes} bytes is above the group's budget of {budget_bytes}",
                hint="raise budget=, or each job prepares it for itself",
            )
        async with self._claimed(frame.size_bytes, "a staging"):
            fd = await in_thread(make_staging, frame.size_bytes)
            if self._members.get(client) is not member:
                os.close(fd)
                raise NotFoundError("the job has left its group")
        self._drop_staging(member)
        member.staging, member.staged_bytes = fd, frame.size_bytes
        self._metrics.bytes.set(self.size_bytes)
        return ShareStaged(re=frame.request_id, size_bytes=frame.size_bytes), fd

    async def publish(self, client: Client, frame: PublishShare) -> None:
        """Keep a copy of a staged batch for all who have not taken it.

        Raises:
            EverstepError: it does not hold what was said of it, or there is no room; then each job prepares it itself.
        """
        member = self._member(client)
        group = member.group
        if member.staging is None:
            raise UsageError("nothing is staged", hint="send StageShare first")
        if not group.machine.publish(frame.batch, frame.size_bytes):
            group.settle()
            return
        staging = os.dup(member.staging)
        try:
            async with self._claimed(frame.size_bytes, "a batch"):
                fd = await in_thread(copy_batch, staging, frame.offset_bytes, frame.size_bytes, frame.xxh3)
        except BaseException:
            group.machine.failed(frame.batch)
            self._metrics.refused_total.inc()
            group.settle()
            raise
        finally:
            os.close(staging)
        group.keep(frame.batch, Kept(fd=fd, size_bytes=frame.size_bytes, left_out=frame.left_out))
        group.settle()
        self._metrics.bytes.set(self.size_bytes)

    def _member(self, client: Client) -> Member:
        member = self._members.get(client)
        if member is None:
            raise NotFoundError("this connection takes part in no group", hint="send JoinShare first")
        return member

    def _drop_staging(self, member: Member) -> None:
        if member.staging is not None:
            os.close(member.staging)
            self._arenas.give_back(member.staged_bytes)
            member.staging, member.staged_bytes = None, 0

    @contextlib.asynccontextmanager
    async def _claimed(self, size_bytes: int, what: str) -> AsyncGenerator[None]:
        """Allocate in the block, if there is room for so many bytes more; they count until they are given back."""
        claim = await self._arenas.claim(size_bytes)
        try:
            if claim.size_bytes < size_bytes:
                raise MemoryRefusedError(f"no room for {what} of {size_bytes} bytes: {claim.reason}")
            yield
        except BaseException:
            self._arenas.give_back(claim.size_bytes)
            raise
        finally:
            self._arenas.settle(claim)

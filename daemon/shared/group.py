"""One group: its window, its members, and the memory of the batches that are kept for them."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ...core.errors import UsageError
from ...proto.frames import Reply
from ...proto.share_frames import JoinShare, ShareLeased, SharePrivate, ShareReady
from ..control.views import ShareGroupView
from ..peer import Peer
from .metrics import ShareMetrics
from .share_machine import Outcome, ShareMachine


class Client(Protocol):
    """Who is at the other end; a session."""

    peer: Peer

    @property
    def has_ended(self) -> bool:
        """Tell whether it is gone."""
        ...

    def send(self, frame: Reply, fd: int | None = None) -> None:
        """Queue a frame; the descriptor is duplicated."""
        ...


QUARANTINED_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A batch that is ready."""

    fd: int
    size_bytes: int
    left_out: list[tuple[int, int, str]]
    """Samples that are not in it, because they kill workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A question that waits for its answer."""

    request_id: int
    batch: int


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A job in a group."""

    group: "Group"
    number: int
    client: Client
    lease_s: float
    helps_while_waiting: bool
    offered: int = 0
    """Batches that it can prepare now."""
    want: Want | None = None
    wanted_s: float = 0.0
    """When it asked, of the loop's clock."""
    private_from: int | None = None
    """The batch from which on it was told to prepare for itself, until it asks again."""
    told_count: int = 0
    """Quarantined samples that it was told of."""
    staging: int | None = None
    staged_bytes: int = 0


class Group:
    """Owned by the event loop. Whatever happens, `settle` does next what can be done."""

    def __init__(
        self, first: JoinShare, *, uid: int, metrics: ShareMetrics, give_back: Callable[[int], None]
    ) -> None:
        """`give_back` hears of bytes that `keep` took over and that are free again."""
        self.name, self.uid = first.group, uid
        self.members: list[Member] = []
        self.machine = ShareMachine(budget_bytes=first.budget_bytes)
        self._first, self._metrics, self._give_back = first, metrics, give_back
        self._claimed_bytes = 0
        self._prepared_count = self._served_count = self._private_count = 0
        self._kept: dict[int, Kept] = {}
        """The batches that are ready."""
        self._quarantined: dict[int, tuple[int, int, str]] = {}
        self._is_gathering = first.jobs > 1
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._gather_timer = self._loop.call_later(first.gather_s, self._gathered)

    @property
    def size_bytes(self) -> int:
        """Bytes of the batches that are kept."""
        return sum(kept.size_bytes for kept in self._kept.values())

    @property
    def quarantined(self) -> list[tuple[int, int, str]]:
        """Samples that one of its jobs found to kill workers, and that all leave out."""
        return list(self._quarantined.values())

    def check(self, frame: JoinShare) -> None:
        """Raise UsageError naming the first difference, if a job's batches would be others than the group's."""
        said = _key_difference(frame, self._first) or _batch_difference(frame, self._first)
        if said:
            raise UsageError(
                f"this job cannot take part in group {self.name!r}: {said}",
                hint="the jobs of a group have the same data, order and transforms; give this one another group=",
            )

    def add(self, member: Member, frame: JoinShare) -> None:
        """Take a job in."""
        member.told_count = len(self._quarantined)
        self.members.append(member)
        self.machine.budget_bytes = max(self.machine.budget_bytes, frame.budget_bytes)
        self.machine.join(member.number, frame.position, frame.first_batch_size_bytes)
        if len(self.members) >= self._first.jobs:
            self._gathered()
        else:
            self.settle()

    def remove(self, member: Member) -> None:
        """A job left or died: its leases go to others, and nothing is kept for it."""
        self.members.remove(member)
        self.machine.leave(member.number)
        self.settle()

    def keep(self, batch: int, kept: "Kept") -> None:
        """Take over the descriptor of a copied batch."""
        for each in kept.left_out[: QUARANTINED_MAX - len(self._quarantined)]:
            self._quarantined.setdefault(each[0], each)
        self._claimed_bytes += kept.size_bytes
        if self.machine.published(batch):
            self._metrics.published_total.inc()
            self._prepared_count += 1
            self._kept[batch] = kept
        else:
            os.close(kept.fd)
        self._drop()

    def close(self) -> None:
        """Nobody takes part any more."""
        for timer in (self._timer, self._gather_timer):
            if timer is not None:
                timer.cancel()
        self._drop()
        self._give_back(self._claimed_bytes)
        self._claimed_bytes = 0

    def wanted(self, member: Member, want: Want) -> None:
        """A job asks for a batch."""
        if member.private_from is not None:
            self._private_count += max(0, want.batch - member.private_from)
            member.private_from = None
        member.want, member.wanted_s = want, self._loop.time()

    def view(self) -> ShareGroupView:
        """Return what operators see."""
        machine, start = self.machine, self.machine.window[0]
        positions = [(machine.position(each.number), each) for each in self.members]
        fastest = max((position for position, _ in positions), default=start)
        slowest, member = min(positions, key=lambda each: each[0], default=(fastest, None))
        return ShareGroupView(
            name=self.name,
            uid=self.uid,
            job_count=len(self.members),
            outside_count=sum(not machine.is_inside(each.number) for each in self.members),
            window=machine.window,
            ready_count=len(self._kept),
            leased_count=machine.leased_count,
            prepared_count=self._prepared_count,
            served_count=self._served_count,
            private_count=self._private_count,
            used_bytes=self.size_bytes,
            budget_bytes=machine.budget_bytes,
            slowest_pid=member.client.peer.pid if member is not None else 0,
            slowest_behind=fastest - slowest,
            quarantined=tuple(sorted(self._quarantined)),
        )

    def settle(self) -> None:
        """Answer who can be answered, and lease what can be leased."""
        if not self._is_gathering:
            self._answer_wants()
            self._lease()
            self._answer_wants()  # there may be no room to prepare what is waited for
            self._set_timer()
        self._drop()

    def _gathered(self) -> None:
        self._gather_timer.cancel()
        self._is_gathering = False
        self.settle()

    def _answer_wants(self) -> None:
        for member in list(self.members):  # sending may find that one is gone, who then leaves
            want = member.want
            if want is None or member not in self.members:
                continue
            answer = self.machine.want(member.number, want.batch)
            if answer.outcome is Outcome.WAIT:
                continue
            member.want = None
            self._metrics.wait_s.observe(self._loop.time() - member.wanted_s)
            if member.helps_while_waiting:
                member.offered = 0
            if answer.outcome is Outcome.PRIVATE:
                self._metrics.private_total.inc()
                member.private_from = want.batch
                member.client.send(SharePrivate(re=want.request_id, batch=want.batch, until=answer.until))
            else:
                self._metrics.taken_total.inc()
                self._served_count += 1
                kept = self._kept[want.batch]
                ready = ShareReady(
                    re=want.request_id,
                    batch=want.batch,
                    size_bytes=kept.size_bytes,
                    left_out=kept.left_out,
                )
                member.client.send(ready, kept.fd)

    def _lease(self) -> None:
        """Lease one batch to each in turn, first to those that wait, while anybody offers to prepare one."""
        leased: dict[Member, list[int]] = {}
        self.members[:] = [*self.members[1:], *self.members[:1]]
        asking = sorted(self.members, key=lambda member: member.want is None)
        while asking := [each for each in asking if each.offered > 0]:
            for member in list(asking):
                granted = self.machine.lease(member.number, 1, self._loop.time(), member.lease_s)
                if granted:
                    member.offered -= 1
                    leased.setdefault(member, []).extend(granted)
                else:
                    asking.remove(member)
        for member, batches in leased.items():
            told, member.told_count = member.told_count, len(self._quarantined)
            member.client.send(ShareLeased(batches=batches, quarantined=self.quarantined[told:]))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline_s = self.machine.next_deadline_s
        self._timer = None if deadline_s is None else self._loop.call_at(deadline_s, self._expire)

    def _expire(self) -> None:
        late = self.machine.expire(self._loop.time())
        self._metrics.expired_total.inc(len(late))
        for member in self.members:
            if member.number in late:
                member.offered = 0  # it hangs, until it says otherwise
        self.settle()

    def _drop(self) -> None:
        stored = self.machine.stored
        for batch in [batch for batch in self._kept if batch not in stored]:
            os.close(self._kept.pop(batch).fd)
        free_bytes = self._claimed_bytes - self.size_bytes - self.machine.let_go_bytes
        self._claimed_bytes -= free_bytes
        self._give_back(free_bytes)


def _key_difference(mine: JoinShare, theirs: JoinShare) -> str:
    ours, others = msgspec.structs.asdict(mine.key), msgspec.structs.asdict(theirs.key)
    for name, value in ours.items():
        if others[name] != value:
            return f"{name} is {value!r} here and {others[name]!r} in the group"
    return ""


def _batch_difference(mine: JoinShare, theirs: JoinShare) -> str:
    for ours, others in zip(mine.first_batch, theirs.first_batch, strict=False):
        if ours[0] != others[0]:
            return f"its first batch has {ours[0]} where the group's has {others[0]}"
        if ours[1] != others[1]:
            return f"{ours[0]} of the first batch is {ours[1]} here and {others[1]} in the group"
        if ours[2] != others[2]:
            return f"{ours[0]} of the first batch ({ours[1]}) has other contents here than in the group"
    if len(mine.first_batch) != len(theirs.first_batch):
        return f"its first batch has {len(mine.first_batch)} leaves and the group's {len(theirs.first_batch)}"
    return ""

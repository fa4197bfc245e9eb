"""The node service: which trainers hold which ranks, their arenas, and when the daemon may end.

Everything here runs on the event loop and only decides; bytes move in threads (persist.py, restore.py, arena.py).

No exception ends the daemon: one that nobody expected is logged with its traceback, counted, and told to the client
whose work it was (`bug`); others go on (ADR 0017).
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec import structs

from ..checkpoint.keep import Keep
from ..core.errors import (
    ConfigError,
    FencedError,
    InternalError,
    RunBusyError,
    UsageError,
)
from ..core.ids import CheckpointId, run_id_of
from ..proto import frames, share_frames
from .access.access import Access
from .access.quota_plan import QuotaPlan
from .access.refusals import RefusalLog
from .access.served_users import ServedUsers
from .access.usage import limits_of
from .arena_book import ArenaBook
from .arena_desk import ArenaDesk
from .blocking import in_thread
from .cache.book import CacheBook
from .config import DaemonConfig
from .configuration.reloader import Reloader
from .control.metrics import Metrics
from .control.tokens import TokenBook
from .controller.controller_desk import ControllerDesk
from .devices.device_desk import DeviceDesk
from .devices.device_watch import DeviceWatch
from .devices.idle_stores import IdleStores
from .devices.persist import Persister
from .devices.pin_keeper import PinKeeper
from .devices.restore import Restorer
from .devices.scrubber import Scrubber
from .devices.stores import OpenStore, StoreBook
from .devices.verifier import Verifier
from .events.event_book import EventBook
from .events.reporter import Reporter
from .fd_store.fd_store import FdStore
from .lifetime import Lifetime
from .log import begin_logging, with_environment
from .nodes.peer_book import PeerBook
from .registry import Lease, Lessee, RankRecord, Registry, RunRecord
from .session import Session
from .shared.share_book import ShareBook
from .traces import Traces
from .turns import Rests, Turns
from .web.site import Site

logger = logging.getLogger(__name__)

"""How long the closing of a store waits for what is still being written: shorter than a control call may take."""


class Node:
    """One daemon. `private`: started by a user's hook, opens the directories that its user names."""

    def __init__(self, config: DaemonConfig, *, private: bool, version: str, control_socket: Path) -> None:
        self.config, self.private, self.version = config, private, version
        self.metrics = Metrics(version)
        self.takes_runs = True
        """False: the node is being drained."""
        self.metrics_port = 0
        """Where the metrics and the web page are served; 0 when they are not."""
        self.site: Site | None = None
        self.events = EventBook()
        self.reporter = Reporter(self.events)
        self.traces = Traces(config.traces, version)
        self.tokens = TokenBook()
        self.access = Access(config.control, self.tokens)
        self.quotas, self.refusals = QuotaPlan(limits=limits_of(config.quota)), RefusalLog()
        self.served = ServedUsers.of(() if private else config.daemon.users)
        self.turns = Turns()
        self.rests = Rests(self.turns, self._frames_delay_s)
        self.registry = Registry()
        self.sessions: set[Session] = set()
        self.lifetime = Lifetime(self)
        self.stores = StoreBook(config, socket=config.socket_path(), private=private)
        self.fd_store = FdStore(enabled=not private)
        self.arenas = ArenaBook(config.memory, self.metrics, self.spawn, self.fd_store)
        self.arena_desk = ArenaDesk(self)
        self.peers = PeerBook(config.cache, self.metrics.peers, self.spawn)
        self.caches = CacheBook(self.arenas, self.metrics.caches, self.spawn, self.peers, self.reporter)
        self.shares = ShareBook(self.arenas, self.metrics.shares, self.reporter)
        self.verifier = Verifier(self)
        self.scrubber = Scrubber(self)
        self.pins, self.idle_stores = PinKeeper(self), IdleStores(self)
        self.devices = DeviceDesk(self)
        self.controller = ControllerDesk(self)
        self.persister = Persister(self)
        self.restorer = Restorer(self)
        self.device_watch = DeviceWatch(self)
        self.reloader = Reloader(self)
        self._control_socket = control_socket
        self._tasks: asyncio.TaskGroup | None = None
        self._opening = asyncio.Lock()
        self._watched: set[OpenStore] = set()
        self.metrics.show(self)

    def use_tasks(self, tasks: asyncio.TaskGroup) -> None:
        """Run all background work in `tasks`; called once before the first client."""
        self._tasks = tasks
        self.metrics.sockets.watch_loop(asyncio.get_running_loop())

    @property
    def is_started(self) -> bool:
        """Tell whether background work can be begun."""
        return self._tasks is not None

    def apply_config(self, config: DaemonConfig) -> None:
        """Go by another configuration from now on, in one go; what only a start reads is the same in both."""
        before, self.config = self.config, config
        self.arenas.bounds = config.memory
        self.access.use(config.control)
        self.quotas.use(limits_of(config.quota))
        if config.log != before.log:
            begin_logging(with_environment(config.log), private=self.private)
        if config.scrub.every != before.scrub.every:
            self.spawn(self.scrubber.keep_other_schedule(), "scheduling scrubs again")
        if config.retire != before.retire:
            self.spawn(self.devices.go_by_other_policy(), "watching missing devices again")

    def watch(self, opened: OpenStore) -> None:
        """Show what a store is in the metrics, and have its newest checkpoints verified; again is nothing."""
        if opened not in self._watched:
            self._watched.add(opened)
            self.metrics.devices.add_recovery(opened.report)
            self._show_engines(opened)
            self.device_watch.watch(opened)
            self.reporter.devices(opened)
            self.verifier.watch(opened)
            self.scrubber.watch(opened)
            self.pins.watch()
            self.devices.watch(opened)
            self.idle_stores.watch()

    def _show_engines(self, opened: OpenStore) -> None:
        for device in opened.store.devices:
            queue = opened.queues[device.device_id]
            self.metrics.devices.add_engine(
                opened.store,
                device.path,
                queue.name,
                direct=queue.choice.alignment is not None,
                reason=queue.choice.reason,
            )

    @contextlib.asynccontextmanager
    async def opening(self) -> AsyncGenerator[None]:
        """Hold the right to open stores: nobody attaches meanwhile, and nobody thinks the daemon idle."""
        try:
            async with self._opening:
                yield
        finally:
            self.lifetime.changed()

    async def forget_store(self, opened: OpenStore) -> None:
        """Return when nothing of this daemon uses a store that is about to be closed: nobody is attached to it, nothing
        of it is being written or collected.
        """
        mine = {key: run for key, run in self.registry.runs.items() if run.opened is opened}
        for rank in [rank for run in mine.values() for rank in run.ranks.values()]:
            self.arena_desk.drop_memory(rank)
        await self.arenas.all_closed()
        await self.scrubber.forget(opened)
        await self.verifier.forget(opened)
        for key, run in mine.items():
            if self.registry.runs.get(key) is run:  # else one of that name was opened elsewhere meanwhile
                del self.registry.runs[key]
        if opened in self._watched:
            self._watched.discard(opened)
            self.metrics.devices.forget(opened.store)
            self.metrics.devices.forget_recovery(opened.report)

    @property
    def is_draining(self) -> bool:
        """Tell whether the daemon takes nothing new: it ends, or somebody drains the node."""
        return self.lifetime.is_ending or not self.takes_runs

    def is_writing(self) -> bool:
        """Tell whether a shard is being written, or copied to be."""
        return any(rank.persisting for rank in self.registry.ranks())

    def is_storing(self) -> bool:
        """Tell whether a shard is being written now. On any thread."""
        return bool(self.metrics.persists.arenas)

    def rests_beside(self, rank: RankRecord) -> Callable[[], bool]:
        """Return what tells whether what the rank's trainer asks for may wait: while others' shards are written.

        Nobody waits for a trainer that has gone, nor when the node is to come to rest.
        """
        lease = rank.lease

        def may_rest() -> bool:
            is_here = rank.lease is lease and not self.is_draining
            return is_here and not self.metrics.persists.arenas <= rank.arenas.keys()

        return may_rest

    def spawn(self, work: Coroutine[None, None, None], doing: str) -> asyncio.Task[None]:
        """Run `work` in the background; what it does not expect is reported as a bug in `doing`."""
        assert self._tasks is not None
        return self._tasks.create_task(self._contained(work, doing))

    async def _contained(self, work: Coroutine[None, None, None], doing: str) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - logged and counted
            self.bug(doing, error)

    def bug(self, doing: str, error: BaseException | None) -> InternalError:
        """Log and count an exception that nobody expected; return what its victim is told."""
        self.metrics.internal_errors_total.inc()
        logger.error("internal_error doing=%r", doing, exc_info=error)
        return InternalError(
            f"{doing} failed: {type(error).__name__}: {error}",
            hint=f"a bug of everstep: the log of the daemon (pid {os.getpid()}) has the traceback",
        )

    def on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report an exception that escaped from a callback of the event loop."""
        self.bug(str(context.get("message")), context.get("exception"))

    def welcome(self, token: str) -> frames.Welcome:
        """Return the answer to Hello."""
        return frames.Welcome(
            version=self.version,
            protocol=frames.PROTOCOL,
            token=token,
            private=self.private,
            pid=os.getpid(),
            control_socket=str(self._control_socket),
        )

    # -- leases

    def open_site(self) -> Site:
        """Return what answers on the metrics port, begun now where it was not.

        Raises:
            ConfigError: its port or its credentials cannot be had.
        """
        if self.site is None:
            site = Site(self, self.config.metrics)
            self.metrics_port, self.site = site.start(), site
        return self.site

    def close_site(self) -> None:
        """Answer nobody on the metrics port any more."""
        if self.site is not None:
            self.site.close()

    @property
    def is_opening(self) -> bool:
        """Tell whether a run's store is being opened for a trainer."""
        return self._opening.locked()

    async def open_run(self, session: Session, frame: frames.OpenRun) -> frames.RunOpened:
        """Give `session` the lease of (run, rank).

        Raises:
            RunBusyError: a living trainer holds it and `takeover` is not set.
        """
        session.check_may_attach()
        if not self.takes_runs:
            raise RunBusyError(
                "this node is being drained and takes no new runs",
                hint="start the job on another node; `everstep drain --cancel` ends that",
            )
        self.served.check_run(session.peer.uid)
        if not 0 <= frame.rank < frame.world_size:
            raise UsageError(f"rank {frame.rank} is not below world_size {frame.world_size}")
        keep = _keep(frame)
        try:
            async with self._opening:
                run = await self._find_run(session.peer.uid, frame)
                shortages = await in_thread(run.store.store.space.shortages)
            rank = run.rank(frame.rank)
            devices = self.stores.chosen(run.opened, frame.storage)
            self._give_lease(rank, session, frame)
            run.keep, run.is_adopted = keep, False
            rank.device_ids = frozenset(device.device_id for device in devices)
        finally:
            self.lifetime.changed()
        highest_attempt = max(run.attempt, run.store.highest_attempt())
        return frames.RunOpened(
            re=frame.request_id,
            run_id=run.run_id,
            highest_attempt=highest_attempt,
            new_store=run.opened.is_new and not highest_attempt and run.is_only_of_its_user,
            devices=devices,
            notes=[*run.opened.notes, *shortages],
        )

    async def _find_run(self, uid: int, frame: frames.OpenRun) -> RunRecord:
        try:
            run_id = run_id_of(frame.name)
        except ValueError as error:
            raise ConfigError(str(error), hint="choose another name in attach()") from error
        opened = await self.stores.open(frame.storage)
        self.watch(opened)
        known = self.registry.runs.get((uid, run_id))
        if known is not None and known.opened is opened:
            return known
        if known is not None and any(rank.lease or rank.persisting for rank in known.ranks.values()):
            raise ConfigError(
                f"run {frame.name!r} is open on {known.opened.describe()}, not on {opened.describe()}",
                hint="give every rank and restart the same storage",
            )
        for rank in known.ranks.values() if known is not None else ():
            self.arena_desk.drop_memory(rank)
        store = await in_thread(opened.store.run, uid, frame.name, create=True)
        run = RunRecord(uid=uid, name=frame.name, run_id=run_id, opened=opened, store=store)
        self.registry.runs[uid, run_id] = run
        return run

    def _give_lease(self, rank: RankRecord, session: Session, frame: frames.OpenRun) -> None:
        """Grant the lease, in one go: from the first check to the last line nobody can come, leave or die."""
        session.check_may_attach()  # again: opening took a while
        if (dead := rank.lessee) is not None and not dead.alive:
            dead.died()
            dead.end()
        if rank.lessee is not None and not frame.takeover:
            pid = rank.lessee.pid  # 0 in another PID namespace
            is_own = pid == session.pid != 0
            other = f"a living trainer{f' (pid {pid})' if pid else ''}"
            raise RunBusyError(
                f"rank {frame.rank} of run {frame.name!r} is held by {'this very process' if is_own else other}",
                hint=f"{'close() that run' if is_own else 'wait for it to end'}, use another name, or attach(...,"
                " takeover=True)",
            )
        if rank.lessee is not None:
            self._fence(rank, rank.lessee)
        session.lease = rank.grant(session)
        rank.commits.attached(time.monotonic())
        rank.world_size, rank.attempt, rank.gone_back_from = frame.world_size, 0, frozenset()

    def _fence(self, rank: RankRecord, holder: Lessee) -> None:
        rank.lease = None
        rank.share_with_dead()
        self.arena_desk.drop_copies(rank)
        holder.fence(f"run {rank.run.name!r} was taken over by another trainer")

    async def begin_attempt(self, lease: Lease, frame: frames.BeginAttempt) -> None:
        """Make the attempt durable before any byte of it is admitted; ranks of one attempt share one record."""
        rank, run = lease.rank, lease.rank.run
        attempt, fresh = frame.attempt, frame.fresh
        async with run.beginning:
            lease.check()
            highest = run.store.highest_attempt()
            if attempt < highest:
                raise FencedError(
                    f"attempt {attempt} of run {run.name!r} is over: attempt {highest} has started"
                )
            if attempt > highest:
                await in_thread(run.store.begin_attempt, attempt, fresh=fresh)
            is_new, run.attempt = attempt > highest, attempt
            if is_new:
                self._end_older(run, attempt)
                self.reporter.attached(run, rank.world_size)
        lease.check()
        rank.attempt = attempt
        rank.costs_begin(again=frame.again)
        unheard, rank.unheard = rank.unheard, []
        for persisted in unheard:
            if persisted.attempt == attempt:
                lease.holder.send(persisted)
        self.controller.attached(rank)
        logger.info("attempt_begun run=%s rank=%d attempt=%d fresh=%s", run.run_id, rank.rank, attempt, fresh)

    @staticmethod
    def _end_older(run: RunRecord, attempt: int) -> None:
        """Throw out trainers of attempts before this one: ranks that it has not, whose checkpoints nobody completes."""
        for rank in run.ranks.values():
            if rank.lessee is not None and 0 < rank.attempt < attempt:
                rank.share_with_dead()
                rank.lessee.fence(
                    f"attempt {rank.attempt} of run {run.name!r} is over: attempt {attempt} has started"
                )

    async def detach(self, lease: Lease) -> None:
        """Answer when everything that the rank sealed has been committed or has failed; then let its arenas go.

        Memory alone holds a newest snapshot that could not be written: that is kept a while, as a dead trainer's is.
        """
        rank = lease.rank
        self.arena_desk.drop_copies(rank)
        await self.persister.settled(rank)
        lease.check()
        rank.lease = None
        unsaved = rank.in_memory_only
        self.reporter.left(rank)
        if unsaved is None:
            self.arena_desk.drop_memory(rank)
        else:
            rank.kept_until_s = asyncio.get_running_loop().time() + self.config.daemon.linger_s
            facts = rank.run.run_id, rank.rank, unsaved
            logger.warning("trainer_left_unsaved run=%s rank=%d checkpoint=%s", *facts)
            self.reporter.left_unsaved(rank, unsaved, self.config.daemon.linger_s)
        self.lifetime.changed()

    def _frames_delay_s(self, uid: int) -> float:
        return self.quotas.frames_delay_s(uid, 0, asyncio.get_running_loop().time())

    def session_ended(self, session: Session) -> None:
        """A client is gone: a trainer's copies are dropped, what it sealed stays, is persisted and kept a while."""
        self.sessions.discard(session)
        self.quotas.disconnect(session.peer.uid, unread=session.is_unread)
        self.caches.session_ended(session)
        self.leave_share(session)
        if session.lease is not None and session.lease.is_valid:
            rank = session.lease.rank
            rank.lease = None
            rank.kept_until_s = asyncio.get_running_loop().time() + self.config.daemon.linger_s
            self.arena_desk.drop_copies(rank)
            reason = "unknown" if rank.leave is None else rank.leave.reason
            facts = rank.run.run_id, rank.rank, session.peer.pid, reason
            if rank.left:
                logger.info("trainer_left run=%s rank=%d pid=%d reason=%s", *facts)
            else:
                logger.warning("trainer_lost run=%s rank=%d pid=%d reason=%s", *facts)
            self.reporter.gone(rank, self.config.daemon.linger_s)
            if not self.lifetime.is_ending:
                self._tell_gone(rank)
        self.lifetime.changed()

    @staticmethod
    def _tell_gone(gone: RankRecord) -> None:
        """Let the other ranks of its attempt not wait for it; those of a later attempt have nothing to do with it."""
        for rank in gone.run.ranks.values():
            if rank.lessee is not None and rank.attempt == gone.attempt > 0:
                rank.lessee.send(frames.RankGone(rank=gone.rank))

    async def open_cache(self, session: Session, frame: frames.OpenCache) -> tuple[frames.Reply, int]:
        """Let a client read the cache of a dataset; any user may, each its own."""
        try:
            return await self.caches.open(session, frame)
        finally:
            self.lifetime.changed()

    def join_share(self, session: Session, frame: share_frames.JoinShare) -> None:
        """Let a job prepare batches together with others of its user; any user may, each in its own groups."""
        self.shares.join(session, frame)
        self.lifetime.changed()

    def leave_share(self, session: Session) -> None:
        """End a job's part in its group, if it has one."""
        if self.shares.leave(session):
            self.lifetime.changed()

    def hand_over(self) -> None:
        """Another daemon wants the devices: an idle private daemon ends, any other refuses."""
        if not self.private or not self.lifetime.idle:
            raise RunBusyError(
                f"the daemon (pid {os.getpid()}) is in use", hint="use its socket, or stop it first"
            )
        self.lifetime.end("handed over")

    def keep_of(self, run: RunRecord) -> Keep:
        """Return what collection keeps of a run."""
        return run.keep or self.config.retention.keep()

    # -- what ranks tell

    def give_up(self, rank: RankRecord, checkpoint: CheckpointId, *, in_memory: bool) -> None:
        """Some rank has no durable shard of `checkpoint`: this rank's goes, from memory unless all have it there."""
        rank.check_attempt(checkpoint.attempt)
        if not in_memory:
            for number, arena in rank.arenas.items():
                self.arena_desk.free_slots(rank, number, arena.machine.give_up(checkpoint))
            self.arena_desk.drop_outdated(rank)
        self.reporter.given_up(rank.run, checkpoint)
        self.persister.give_up(rank.run, checkpoint)

    def costs_told(self, rank: RankRecord, costs: frames.Costs) -> None:
        """A trainer says what its checkpoints have cost so far."""
        # What a daemon before this one has counted stands in its series; the estimate stands in none but this one's.
        before = rank.counted if not rank.is_told_again else structs.replace(costs, slower_s=0.0)
        self.metrics.costs.add(before, costs)
        self.reporter.costs(rank, costs)
        rank.costs_told(costs)
        self.controller.costs_told(rank, costs)


def _keep(frame: frames.OpenRun) -> Keep | None:
    """Return what a trainer wants kept; ConfigError for values that make no sense."""
    rules = frame.keep
    return None if rules is None else Keep(last=rules.last, every_steps=rules.every_steps, every=rules.every)

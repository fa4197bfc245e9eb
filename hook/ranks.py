"""How the ranks of a run agree: on attempt, restore, checkpoint steps and completeness.

Over `torch.distributed`'s Store on our own clone, always with a deadline; no collective ever runs on the
training group.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import cast

import torch.distributed as dist

from ..checkpoint.frequency_types import BoundKind, Decision, Figures
from ..core.errors import DeadlineError, EverstepError, RanksLostError, UsageError
from ..core.ids import CheckpointId
from .end_machine import Ask, Requests
from .group_nonce import agree_nonce
from .horizon_machine import Horizon, Plan, Planner
from .one_rank import OneRank
from .pace import Pace
from .rank_beats import Beats
from .rank_ends import AFTER_ALL, RankEnds
from .rank_format import (
    PlanMessage,
    RankState,
    dump_error,
    dump_plan,
    dump_state,
    load_error,
    load_plan,
    load_state,
)
from .rank_protocol import Listener, Ranks
from .rank_results import RankResults
from .rank_store import STORE_GONE_HINT, default_store, name_of, own_client, present, under, wait_for
from .silence_machine import Standstill
from .steering_machine import Steering
from .sweep_machine import Mark, Sweep

AGREE_DEADLINE_S = 300.0
"""To attach, and to begin to restore: a rank may come minutes late (imports, data sets), never hours."""

PLAN_DEADLINE_S = 60.0
STORE_DEADLINE_S = 60.0
"""An operation of the Store that takes longer will never end: its server hangs, or the way to it is gone."""
LOOK_S = 1.0
"""A longer pause between two looks was this process's own: it was stopped, which is nobody's silence."""
SILENT_LOOKS = 6
"""Who has only lost its daemon is heard again before."""
RESUMED_S = 5.0
"""So long may an operation still take after this process went on."""
LEAVE_S = 30.0
"""How long rank 0, which may serve the Store, waits for the others to leave it."""
END = "end"
"""Counts the ranks that were told to end."""
NOTICE = "notice"
"""Why the run is to end, whoever was told; never deleted."""
REQUESTS = "requests"
"""Counts the checkpoints that were asked for: no request is lost that comes while others are read."""
FIGURES_S = 2.0
"""How often ranks tell rank 0 what they have measured and how far they are, and old keys go."""

LOST_JOIN_S = 0.2
"""How long closing waits for the thread where the ranks are lost."""
_POLL_S = 0.01
_IDLE_POLL_S = 0.1


class StoreRanks:
    """The ranks of a `torch.distributed` job. One thread talks to the Store once training has begun."""

    def __init__(self, run_id: str, pace: Pace) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._pace, self._decision = pace, pace.decision
        self._coming = deque[tuple[int, Decision]]()
        """Of the plans that begin at a later boundary."""
        self._peers: list[Figures] = []
        """Newest figures of the other ranks that have sent some; on rank 0."""
        self._figures_at_s = 0.0
        """When figures are sent, or fetched, the next time."""
        self._run_id, self._prefix, self._client = run_id, f"everstep/{run_id}", own_client()
        # It may serve the Store: kept, so that destroy_process_group() before the run's end takes it from nobody.
        self._default: object = default_store()
        self._store = under(f"{self._prefix}/join", self._client)
        self._nonce, self._round = "", 0
        self._horizon, self._planner = Horizon(), Planner(due=pace.due)
        # Entered itself: Ctrl-C in the middle of `Condition.__enter__`, which is Python, leaves it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._step = 0
        self._outbox: list[tuple[str, str]] = []
        self._results, self._sweep = RankResults(), Sweep()
        self._closing = self._has_left = False
        self._stays: Callable[[], bool] | None = None
        """While it closes."""
        self._stays_until_s = 0.0
        self._lost: RanksLostError | None = None
        self._turns = Standstill()
        """Of the thread, which may wait for the Store for ever."""
        self._asked_end = ""
        """Why this rank has asked for the run's end."""
        self._requests = Requests()
        """On rank 0: what its next plan answers."""
        self._made: tuple[PlanMessage, Ask | None] | None = None
        """On rank 0: the newest plan, and what it answers; others may have it before this rank's own horizon."""
        self._request_count, self._noticed = 0, False
        """What of the requests rank 0 has heard of."""
        self._confirming: Ask | None = None
        """What this rank asks for if the others say so, too."""
        self._ends, self._beats = RankEnds(self.rank, self.world_size), Beats(self.rank, self.world_size)
        self._gone: list[int] = []
        """Ranks of which the daemon says so, for the thread."""
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None

    # -- before training: on the caller's thread

    def agree_settings(self, settings: Mapping[str, str], error: EverstepError | None) -> None:
        """Meet the other ranks of this group, and compare what all must have been given alike; errors travel too."""
        self._nonce = self._agree_nonce()
        self._store = under(f"{self._prefix}/join/{self._nonce}", self._client)
        said = cast("list[dict[str, str]]", self._gather_or_raise("settings", settings, error))
        for name in settings:
            by_value: dict[str, list[str]] = {}
            for rank, item in enumerate(said):
                by_value.setdefault(item.get(name, "unknown"), []).append(str(rank))
            if len(by_value) > 1:
                given = "; ".join(f"{name}={text} on rank {', '.join(who)}" for text, who in by_value.items())
                raise UsageError(given, hint=f"attach(..., {name}=...) alike on all ranks")

    def agree_attempt(self, known: int, error: EverstepError | None) -> int:
        """Gather what every rank's daemon knows; errors travel too: nobody waits for a rank that was refused."""
        said = self._gather_or_raise("attempt", {"known": known}, error)
        attempt = 1 + max(cast("dict[str, int]", item)["known"] for item in said)
        self._store = under(f"{self._prefix}/{attempt}/{self._nonce}", self._client)
        return attempt

    def agree_begun(self, error: EverstepError | None) -> None:
        """Gather what refused a rank in its attempt."""
        self._gather_or_raise("begun", {}, error)

    def _gather_or_raise(
        self, topic: str, value: Mapping[str, object], error: EverstepError | None
    ) -> list[object]:
        """Gather values, where no rank has an error instead; else raise this rank's own, or another's."""
        said = self.gather(topic, value if error is None else dump_error(error))
        for rank, item in enumerate(said):
            raised = load_error(item, rank)
            if raised is not None:
                raise error if error is not None else raised
        return said

    def gather(self, topic: str, value: object, *, deadline_s: float | None = None) -> list[object]:
        """Publish `value`, wait for every rank's."""
        self._round += 1
        deadline_s = AGREE_DEADLINE_S if deadline_s is None else deadline_s
        keys = [f"{self._round}/{topic}/{rank}" for rank in range(self.world_size)]
        began_s = time.monotonic()
        try:
            self._store.set(keys[self.rank], json.dumps(value))
            wait_for(
                self._store,
                keys,
                deadline_s,
                lambda: self._missing(topic, keys),
                look=lambda: self._look_for_ended(topic, keys),
            )
            return [json.loads(item) for item in self._store.multi_get(keys)]
        except (RuntimeError, ValueError) as error:
            raise self._disagreement(
                f"the ranks could not agree on {self._missing(topic, keys)}", error, began_s, deadline_s
            ) from error

    def _look_for_ended(self, topic: str, keys: list[str]) -> None:
        """Raise if the daemon has told of the end of a rank that has not come."""
        ended = [rank for rank in tuple(self._gone) if not self._store.check([keys[rank]])]
        if ended:
            raise DeadlineError(
                f"rank {ended[0]} has ended before the ranks could agree on {topic}", hint="restart the job"
            )

    def _missing(self, topic: str, keys: list[str]) -> str:
        """Return the topic with the ranks that have not come, if the Store can still tell."""
        with suppress(RuntimeError):
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            return f"{topic} (missing: rank {', '.join(missing)})" if missing else topic
        return topic

    def _agree_nonce(self) -> str:
        began_s = time.monotonic()
        try:
            return agree_nonce(self._store, self.rank, self.world_size, AGREE_DEADLINE_S)
        except RuntimeError as error:
            raise self._disagreement(
                "rank 0 did not attach this run", error, began_s, AGREE_DEADLINE_S
            ) from error

    def _disagreement(self, what: str, error: Exception, began_s: float, deadline_s: float) -> DeadlineError:
        """Return why the ranks did not meet: nobody came in time, or the Store is gone, which takes no time."""
        took_s, store = time.monotonic() - began_s, name_of(self._client)
        if took_s < deadline_s - 1.0:  # a Store's clock may be a little ahead
            text, hint = f"{what}: after {took_s:.1f} s {store} failed: {error}", STORE_GONE_HINT
        else:
            text = f"{what} within {deadline_s:.0f} s, as far as {store} tells: {error}"
            hint = (
                "every rank must attach the run by the same name, restore and close it: look at what they say"
            )
        return DeadlineError(text, hint=hint)

    # -- training

    def start(self, step: int, listener: Listener) -> None:
        """Publish plan 0 (rank 0) and start the thread."""
        self._listener, self._step = listener, step
        self._results.decided(step, due=False)
        if self.rank == 0:
            self._publish(self._message(self._planner.first(step)), None)
        self._turns.turned(time.monotonic())
        self._thread = threading.Thread(target=self._work, name="everstep-ranks", daemon=True)
        self._thread.start()

    def is_due(self, step: int) -> bool:
        """Look into the plans; wait at the horizon, at most a minute (then checkpoints stop, training goes on)."""
        if self.lost is not None:
            return False
        with self._lock:
            self._step = step
            if self.rank == 0:
                self._plan_ahead(step)
            elif self._figures_due():
                self._outbox.append((f"figures/{self.rank}", dump_state(self._state())))
            self._changed.notify_all()
        if not self._hears_plan(step):
            if 0 in self._beats.silent_ranks:
                self._lose(self.silent, is_store=False)
            else:
                self._lose(f"rank 0 published no plan for boundary {step} within {PLAN_DEADLINE_S:.0f} s")
        with self._lock:
            while self._coming and self._coming[0][0] <= step:
                self._decision = self._coming.popleft()[1]
            due = self._lost is None and self._horizon.is_due(step)
            self._results.decided(step, due=due)
            return due

    def passed(self, step: int) -> tuple[int, ...]:
        """Look into the plans: they say so though this rank never asked about such a boundary."""
        with self._lock:
            found = self._horizon.passed(step) if self._lost is None else ()
            self._results.passed(found)
            return found

    def _hears_plan(self, step: int) -> bool:
        """Wait until the plan for this boundary is known, or the ranks are lost; False: nobody makes one any more."""
        return self._hears(lambda: self._horizon.knows(step), PLAN_DEADLINE_S)

    def _hears(self, has_come: Callable[[], bool], deadline_s: float) -> bool:
        """Wait for what rank 0 says, or until the ranks are lost; False: it says nothing more."""
        silent_looks = 0
        for _ in range(math.ceil(deadline_s / LOOK_S)):
            with self._lock:
                if self._changed.wait_for(lambda: has_come() or self._lost, min(LOOK_S, deadline_s)):
                    return True
            silent_looks = silent_looks + 1 if 0 in self._beats.silent_ranks else 0
            if silent_looks >= SILENT_LOOKS:
                break
        return False

    @property
    def lost(self) -> EverstepError | None:
        """Why the ranks cannot agree any more; noticed here, too, where an operation of the Store does not end."""
        if self._lost is None and self._thread is not None:
            hangs_s = self._turns.stands_s(time.monotonic(), deadline_s=STORE_DEADLINE_S, resumed_s=RESUMED_S)
            if hangs_s:
                self._lose(f"it has not answered for {hangs_s:.0f} s")
        return self._lost

    @property
    def silent(self) -> str:
        """By their beats, or by what the daemon has said."""
        return self._beats.silent

    def gone(self, rank: int) -> None:
        """Let the thread look once more for what that rank has said before."""
        with self._lock:
            self._gone.append(rank)
            self._changed.notify_all()

    @property
    def decision(self) -> Decision:
        """Rank 0's, by which the newest boundary was decided: one that comes pauses nothing yet."""
        decision, lost = self._decision, self._lost
        if lost is None:
            return decision
        return replace(
            decision,
            kind=BoundKind.LOST,
            reason=f"no checkpoint is taken: {lost.message}",
            goal_missed="",
            cost_share=None,
            cost_half_width=None,
            steps_undecided=0,
            paused_until_unix_s=0.0,
            pause_asked_unix_s=0.0,  # nobody has ended a pause: the next attempt goes by it
        )

    def ask_for_checkpoint(self, ask: Ask) -> None:
        """Tell rank 0, which lists a boundary of its next plan."""
        if ask.end:
            self._asked_end = ask.end
            self._say(NOTICE, json.dumps(ask.end))
        else:
            self._say(REQUESTS, "+")

    def steer(self, steering: Steering) -> None:
        """Rank 0 takes it at once; of the others it hears with their next figures, which do not wait for their time."""
        self._pace.steer(steering)
        self._figures_at_s = 0.0

    def end_after(self, step: int) -> str:
        """Return what the plans say; without them, what this rank has asked for."""
        with self._lock:
            confirming = self._confirming.end if self._confirming is not None else ""
            alone = (self._asked_end or confirming) if self._lost is not None else ""
            return self._horizon.end_after(step) or alone

    def ends_in(self, left_s: float) -> None:
        """Rank 0 tells all others by its plans, and is told by the thread."""
        self._ends.ends_in(left_s)

    def confirm_end(self, ask: Ask) -> None:
        """Say it, and watch for the others: torchrun ends the survivors of a dead rank, and waits for them."""
        with self._lock:
            self._confirming = ask
        self._say(END, "+")

    def saves_after_all(self, has_time: bool, until_s: float) -> bool:
        """Rank 0 says so over the Store."""
        if self.rank == 0:
            self._say(AFTER_ALL, json.dumps(has_time))
            return has_time
        self._ends.awaits_answer = True
        self._hears(lambda: self._ends.answer is not None, max(0.0, until_s - time.monotonic()))
        return self._ends.answer is True

    def sealed(self, checkpoint: CheckpointId) -> None:
        """Publish, and watch for the others."""
        self._say_of(checkpoint, "sealed", "+")

    def committed(self, checkpoint: CheckpointId) -> None:
        """Publish, and watch for the others."""
        self._say_of(checkpoint, "committed", "+")

    def failed(self, checkpoint: CheckpointId, reason: str) -> None:
        """Publish why this checkpoint will never be complete."""
        self._say_of(checkpoint, "failed", f"rank {self.rank}: {reason}")

    def ends(self) -> None:
        """Say so by this rank's beat."""
        self._beats.ends()

    def close(self, *, stays: Callable[[], bool] | None = None) -> None:
        """Say what is left to say and end the thread; one that the Store holds is left behind."""
        with self._lock:
            self._stays = stays if self.rank == 0 else None
            self._stays_until_s = time.monotonic() + LEAVE_S
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(STORE_DEADLINE_S if self._lost is None else LOST_JOIN_S)
            self._thread = None
        self._default = None

    # -- the thread

    def _say(self, key: str, value: str) -> None:
        with self._lock:
            if self._lost is None:
                self._outbox.append((key, value))
                self._changed.notify_all()

    def _say_of(self, checkpoint: CheckpointId, what: str, value: str) -> None:
        name = self._results.name(checkpoint, what) if self._lost is None else None
        if name is not None:
            self._say(f"{what}/{name}", value)

    def _plan_ahead(self, step: int) -> None:
        """Publish the next plan in time. Who leaves this by an exception (Ctrl-C) goes on with the very same one."""
        while True:
            last, made = self._horizon.newest, self._made
            assert last is not None
            if made is None or made[0].plan.number <= last.number:
                if not self._planner.wants_next(last, step):
                    return
                made = self._made = self._next_plan(last)
            self._publish(*made)

    def _next_plan(self, last: Plan) -> tuple[PlanMessage, Ask | None]:
        """Return the plan that follows, by what was asked for until now, and which that is."""
        assert self._listener is not None
        self._pace.hear(self._peers)
        ask = self._requests.open
        end = ask.end if ask is not None else ""
        requested = self._listener.saves_last_boundary() if end else ask is not None
        plan = self._planner.next(last, requested=requested, end=end, step_s=self._pace.step_s)
        return self._message(plan), ask

    def _message(self, plan: Plan) -> PlanMessage:
        return PlanMessage(
            plan=plan, decision=self._pace.decision, needed_s=self._pace.needed_s, left_s=self._ends.left_s
        )

    def _publish(self, message: PlanMessage, ask: Ask | None) -> None:
        """Rank 0 knows its own plan at once; the others read it from the Store.

        At once, and last: who is interrupted before does all of this again.
        """
        self._outbox.append((f"plan/{message.plan.number}", dump_plan(message)))
        self._sweep.published(message.plan)
        self._requests.answered(ask)
        self._receive(message.plan, message.decision)

    def _receive(self, plan: Plan, decision: Decision) -> None:
        self._coming.append((plan.start, decision))
        self._horizon.receive(plan)

    def _mark(self) -> Mark:
        return Mark(plan=self._horizon.next_number, step=self._results.heard_step)

    def _state(self) -> RankState:
        return RankState(
            figures=self._pace.figures,
            needed_s=self._pace.own_needed_s,
            mark=self._mark(),
            steering=self._pace.steering,
        )

    def _figures_due(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._figures_at_s:
            return False
        self._figures_at_s = now_s + FIGURES_S
        return True

    def _work(self) -> None:
        assert self._listener is not None
        try:
            while self._lost is None:
                self._turns.turned(time.monotonic())
                with self._lock:
                    outbox, self._outbox = self._outbox, []
                    gone, self._gone = self._gone, []
                if self._closing and not outbox and self._may_leave():
                    return
                self._ends.tell(self._store)
                self._send(outbox)
                self._receive_plan()
                ended = self._results.receive(self._store, self._listener)
                with self._lock:
                    self._sweep.ended(ended)
                self._receive_confirmations()
                self._receive_answer()
                if self.rank == 0:
                    self._receive_requests()
                    self._receive_figures()
                self._beats.exchange(self._store, gone, self._step)
                self._pause()
        except (RuntimeError, ValueError) as error:
            if self._results.are_open or not self._closing:  # else who served it may go
                self._lose(f"it does not answer: {error}")
        except EverstepError as error:
            self._lose(str(error))

    def _may_leave(self) -> bool:
        """Leave; rank 0 once all others have, who may still hear in the Store what they wait for."""
        if not self._has_left:
            self._has_left = True
            self._store.set(f"closed/{self.rank}", "1")
            self._beats.close(self._store, self._step)
        if self._stays is None or not self._stays() or time.monotonic() >= self._stays_until_s:
            return True
        others = set(range(1, self.world_size)) - self._beats.silent_ranks
        return len(present(self._store, [f"closed/{rank}" for rank in sorted(others)])) == len(others)

    def _pause(self) -> None:
        with self._lock:
            urgent = (
                self._results.are_open
                or self._closing
                or self._confirming is not None
                or self._ends.awaits_answer
                or not self._horizon.knows(self._step + 1)
            )
            poll_s = _POLL_S if urgent else _IDLE_POLL_S
            self._changed.wait_for(lambda: self._outbox or self._gone or self._closes_now, poll_s)

    @property
    def _closes_now(self) -> bool:
        return self._closing and not self._has_left

    def _send(self, outbox: list[tuple[str, str]]) -> None:
        for key, value in outbox:
            if value != "+":
                self._store.set(key, value)
            elif self._store.add(key, 1) == self.world_size and key != REQUESTS:
                self._store.set(f"all-{key}", "1")

    def _receive_plan(self) -> None:
        assert self._listener is not None
        if self.rank == 0:
            return
        number = self._horizon.next_number
        if self._store.check([f"plan/{number}"]):
            message = load_plan(self._store.get(f"plan/{number}"))
            self._pace.others_need(message.needed_s)
            if message.left_s is not None:
                self._listener.end_heard(message.left_s)
            with self._lock:
                self._receive(message.plan, message.decision)
                self._changed.notify_all()

    def _receive_requests(self) -> None:
        count = self._store.add(REQUESTS, 0)
        noticed = not self._noticed and self._store.check([NOTICE])
        end = cast("str", json.loads(self._store.get(NOTICE))) if noticed else ""
        self._receive_ends()
        with self._lock:
            if count > self._request_count:
                self._request_count = count
                self._requests.add(Ask())
            if noticed:
                self._noticed = True
                self._requests.add(Ask(end=end))

    def _receive_confirmations(self) -> None:
        """End together, not alone."""
        assert self._listener is not None
        with self._lock:
            confirming = self._confirming
        if confirming is None or not self._store.check([f"all-{END}"]):
            return
        if self.rank == 0:
            self._receive_ends()
        with self._lock:
            self._confirming = None
            self._asked_end = confirming.end  # if the Store goes before the plan that says so comes
            self._requests.add(confirming)
        self._listener.end_confirmed()

    def _receive_answer(self) -> None:
        if self._ends.hear_answer(self._store):
            with self._lock:
                self._changed.notify_all()

    def _receive_ends(self) -> None:
        """Rank 0 knows how long others have before it takes what they ask: they have said it first."""
        left_s = self._ends.hear(self._store)
        if left_s is not None and self._listener is not None:
            self._listener.end_heard(left_s)

    def _receive_figures(self) -> None:
        """Rank 0 decides by all ranks' figures, a few seconds old; some ranks may have sent none yet."""
        if not self._figures_due():
            return
        keys = [f"figures/{rank}" for rank in range(1, self.world_size)]
        known = present(self._store, keys)
        said = [load_state(item) for item in self._store.multi_get(known)] if known else []
        marks = [state.mark for state in said]
        for state in said:
            self._pace.steer(state.steering)
        with self._lock:
            self._peers = [state.figures for state in said]
            self._pace.others_need(
                max((state.needed_s for state in said if state.needed_s is not None), default=None)
            )
            if len(known) < len(keys):  # who has said nothing yet has read nothing
                marks.append(Mark(plan=0, step=0))
            is_sent = not self._outbox  # which may hold such a key
            old = self._sweep.old_keys([self._mark(), *marks]) if is_sent else []
        for key in old:
            self._store.delete_key(key)

    def _lose(self, reason: str, *, is_store: bool = True) -> None:
        """Without agreement no checkpoint can be complete: stop them, keep training, say it."""
        with self._lock:
            if self._lost is not None:
                return
            over = f" over {name_of(self._client)}" if is_store else ""
            server = ", and look at the process that served it" if is_store else ""
            error = self._lost = RanksLostError(
                f"the ranks cannot agree any more{over}: {reason}",
                hint=f"training goes on without checkpoints: restart the job{server}",
            )
            self._changed.notify_all()
        assert self._listener is not None
        self._listener.ranks_lost(error)


def make_ranks(run_id: str, pace: Pace) -> Ranks:
    """Return the ranks of the initialised process group, or this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return StoreRanks(run_id, pace)
    return OneRank(pace)

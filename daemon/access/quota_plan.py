"""What each user has taken of the bounds that count events: connections, calls, frames. Pure; time is given."""

from dataclasses import dataclass, field

from ...core.errors import QuotaError

BURST_S = 2.0
"""So much of a rate may come at once after a rest."""
CALLS_CROWDED = 64
"""Half of what the control API answers at once: with so many running, one more is for who has few."""
CALLS_IN_CROWD = 4
"""Few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one user; see QuotaSection."""

    connections: int
    descriptors: int
    calls: int
    calls_per_s: float
    frames_per_s: float
    connects_per_s: float


@dataclass(slots=True, kw_only=True)
class Allowance:
    """A rate that may be saved up for `BURST_S`."""

    per_s: float
    left: float = 0.0
    at_s: float | None = None

    def refill(self, now_s: float) -> None:
        """Count what has come since the last look."""
        most = max(1.0, self.per_s * BURST_S)
        if self.at_s is None:
            self.left = most
        else:
            self.left = min(most, self.left + max(0.0, now_s - self.at_s) * self.per_s)
        self.at_s = now_s

    def try_take(self, now_s: float) -> bool:
        """Take one, if there is one."""
        self.refill(now_s)
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def owe(self, count: int, now_s: float) -> float:
        """Take `count`, which may be more than there is, and return how long to wait until it is paid, in seconds."""
        self.refill(now_s)
        self.left -= count
        return max(0.0, -self.left / self.per_s)


@dataclass(slots=True, kw_only=True)
class Use:
    """What one user has now."""

    calls_allowance: Allowance
    frames_allowance: Allowance
    connects_allowance: Allowance
    connections: int = 0
    calls: int = 0
    refused: int = 0
    """Connections and calls since the daemon started."""


@dataclass(slots=True, kw_only=True)
class QuotaPlan:
    """By uid. Nobody is counted who has nothing and has asked for nothing lately."""

    limits: Limits
    uses: dict[int, Use] = field(default_factory=dict[int, Use])

    def use(self, limits: Limits) -> None:
        """Go by other limits from now on; what users have stays."""
        self.limits = limits
        for use in self.uses.values():
            use.calls_allowance.per_s, use.frames_allowance.per_s = limits.calls_per_s, limits.frames_per_s
            use.connects_allowance.per_s = limits.connects_per_s

    def connect(self, uid: int, now_s: float, *, descriptors: int = 0) -> float:
        """Count a connection more, of a user for whom so many `descriptors` are held beside connections.

        Return for how long it is not read, in seconds: who comes too often is heard later.

        Raises:
            QuotaError: it has as many as it may.
        """
        use, limits = self._use(uid, now_s), self.limits
        if use.connections >= limits.connections:
            use.refused += 1
            raise QuotaError(
                f"uid {uid} has {use.connections} connections to this daemon, as many as it may",
                hint="close some, or raise quota.connections",
            )
        held = 2 * use.connections + descriptors
        if held + 2 > limits.descriptors:
            use.refused += 1
            raise QuotaError(
                f"the daemon holds {held} descriptors for uid {uid}, as many as it may",
                hint="close connections, or raise quota.descriptors",
            )
        use.connections += 1
        return use.connects_allowance.owe(1, now_s)

    def disconnect(self, uid: int, *, unread: bool = False) -> None:
        """Count a connection less; one that went `unread` has cost nothing, and those after it need not pay."""
        use = self.uses[uid]
        if unread:
            use.connects_allowance.left += 1
        assert use.connections > 0
        use.connections -= 1

    def begin_call(self, uid: int, now_s: float, *, is_operator: bool = False) -> None:
        """Count a call that begins; of operators the crowd keeps none out.

        Raises:
            QuotaError: too many run, or too many came lately.
        """
        use, limits = self._use(uid, now_s), self.limits
        if use.calls >= limits.calls:
            use.refused += 1
            raise QuotaError(
                f"uid {uid} has {use.calls} calls running, as many as it may",
                hint="wait for one to end, or raise quota.calls",
            )
        running = sum(each.calls for each in self.uses.values())
        if not is_operator and running >= CALLS_CROWDED and use.calls >= CALLS_IN_CROWD:
            use.refused += 1
            raise QuotaError(
                f"{running} calls run, and uid {uid} has {use.calls} of them: the rest of the room is for others",
                hint="wait for one to end",
            )
        if not use.calls_allowance.try_take(now_s):
            use.refused += 1
            raise QuotaError(
                f"uid {uid} calls more often than {limits.calls_per_s:g} times a second",
                hint="ask less often, or raise quota.calls_per_s",
            )
        use.calls += 1

    def end_call(self, uid: int) -> None:
        """Count a call that has ended."""
        use = self.uses[uid]
        assert use.calls > 0
        use.calls -= 1

    def frames_delay_s(self, uid: int, count: int, now_s: float) -> float:
        """Count frames of a user, and return for how long its connection is not read now, in seconds."""
        return self._use(uid, now_s).frames_allowance.owe(count, now_s)

    def _use(self, uid: int, now_s: float) -> Use:
        found = self.uses.get(uid)
        if found is None:
            self._forget_idle(now_s)
            found = self.uses[uid] = Use(
                calls_allowance=Allowance(per_s=self.limits.calls_per_s),
                frames_allowance=Allowance(per_s=self.limits.frames_per_s),
                connects_allowance=Allowance(per_s=self.limits.connects_per_s),
            )
        return found

    def _forget_idle(self, now_s: float) -> None:
        """Forget users that have nothing and whose allowances are full again."""
        for uid, use in list(self.uses.items()):
            allowances = (use.calls_allowance, use.frames_allowance, use.connects_allowance)
            rested = all(each.at_s is None or now_s - each.at_s > 60 + BURST_S for each in allowances)
            if rested and not use.connections and not use.calls:
                del self.uses[uid]

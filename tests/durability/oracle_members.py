"""Who must belong to a store after a crash, told by the changes that were begun and acknowledged before it."""

from collections.abc import Collection

READMIT = "readmit"
RETIRE = "retire"
DRAIN = "drain"


class OracleMembers:
    """Devices are numbers here, whatever ids the store gives them."""

    def __init__(self) -> None:
        self.out: set[int] = set()
        """Retired, acknowledged or found."""
        self.leaving: set[int] = set()
        """Being retired: either way may be found."""
        self.draining: set[int] = set()
        """For sure, as long as they are members."""
        self._joining: set[int] = set()
        self._unsure: set[int] = set()
        """Whether they drain is open."""

    def changing(self, verb: str, number: int) -> None:
        """Take a change as begun."""
        if verb == READMIT:
            self._joining.add(number)
        elif verb == RETIRE:
            self.leaving.add(number)
            self._unsure.add(number)
        else:
            self.draining.discard(number)
            self._unsure.add(number)

    def changed(self, verb: str, number: int) -> None:
        """Take a change as acknowledged."""
        if verb == READMIT:
            self._joining.discard(number)
            self.out.discard(number)
        elif verb == RETIRE:
            self.leaving.discard(number)
            self._forget_drain(number)
            self.out.add(number)
        else:
            self._unsure.discard(number)
            if verb == DRAIN:
                self.draining.add(number)

    def _forget_drain(self, number: int) -> None:
        self.draining.discard(number)
        self._unsure.discard(number)

    def problems(self, out: Collection[int], draining: Collection[int]) -> list[str]:
        """Return what an opened store says of its members against what was acknowledged."""
        found = [
            f"device {number} was retired and is a member"
            for number in sorted(self.out - self._joining - {*out})
        ]
        found += [f"device {number} is retired" for number in sorted({*out} - self.out - self.leaving)]
        found += [
            f"device {number} was drained and does not drain"
            for number in sorted(self.draining - {*out} - {*draining})
        ]
        found += [f"device {number} drains" for number in sorted({*draining} - self.draining - self._unsure)]
        return found

    def settle(self, out: Collection[int], draining: Collection[int]) -> set[int]:
        """A recovery has decided what was under way; return who has left for good by now."""
        self.out, self.draining = {*out}, {*draining}
        self.leaving, self._joining, self._unsure = set(), set(), set()
        return set(self.out)

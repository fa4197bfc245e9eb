"""In which order the loaders of a process have moved: which of them training was in last."""

import itertools

_numbers = itertools.count(1)


class Moves:
    """Of one loader. Numbers of all loaders of the process are in order; 0: not yet."""

    def __init__(self) -> None:
        self.handed_at = 0
        """When it handed out its last batch."""
        self.ended_at = 0
        """When a loop over it came to the end of an epoch."""

    def hand(self) -> None:
        """A batch is handed out."""
        self.handed_at = next(_numbers)

    def end(self) -> None:
        """A loop has heard that there are no more."""
        self.ended_at = next(_numbers)

    @property
    def has_moved(self) -> bool:
        """Tell whether it has done either."""
        return self.handed_at > 0 or self.ended_at > 0

"""How the structure of a state changes between checkpoints: the room that a new arena gets, and what to say. Pure."""

from ..checkpoint.layout_plan import Layout
from ..checkpoint.leaf import LeafSpec

PAGE_BYTES = 4096
SPARE_SHARE = 4
"""A slot for a state that grows has room for at least a quarter more, so that it is made anew after that."""
CHANGES_MAX = 3
"""Checkpoints in a row of another structure each, after which it is said: phases of training stay below."""
WASTE_FACTOR, WASTE_MAX = 4, 8
"""A slot of more than so many times the size of so many snapshots in a row is given back for a smaller one."""

HINT = (
    "preallocate it at its largest size and keep the count of what is filled beside it; "
    "for histories of numbers use run.log(...)"
)


class StructureMachine:
    """Hears of each layout: when an arena is asked for, and when a snapshot is taken or skipped for want of one."""

    def __init__(self) -> None:
        """Know no layout yet."""
        self._asked: Layout | None = None
        self._skipped: Layout | None = None
        """What the arena was asked for at the newest skipped checkpoint; None: one was taken since."""
        self._why = ""
        self._taken: Layout | None = None
        self._changes = self._small = 0
        self._told = False

    def asking(self, layout: Layout) -> int:
        """An arena is asked for; return the bytes that each slot should have besides, for a state that grows.

        It grows where a leaf of the layout that was asked for last is larger now, or where the checkpoint before found
        its arena too small already; not where leaves come once, as an optimizer's state does. Then as much again as it
        has grown since, at least a quarter, and at most the size of a slot.
        """
        former, self._asked = self._asked or self._taken, layout
        self._small = 0
        if former is None or former.slot_size_bytes >= layout.slot_size_bytes:
            return 0
        if self._skipped is None and not _has_grown_leaf(former, layout):
            return 0
        size_bytes = layout.slot_size_bytes
        wanted_bytes = max(size_bytes // SPARE_SHARE, size_bytes - former.slot_size_bytes)
        return min(wanted_bytes, size_bytes) // PAGE_BYTES * PAGE_BYTES

    def skipped(self) -> str:
        """A checkpoint was skipped as the arena that was asked for is not there; return what to say besides.

        Once a second one in a row found another structure: the leaf that changed, and what to do.
        """
        former, self._skipped = self._skipped, self._asked
        if former is not None and self._asked is not None and former.digest != self._asked.digest:
            self._why = f"{changed_text(former, self._asked)}; {HINT}"
        return self._why

    def taken(self, layout: Layout, slot_size_bytes: int) -> str:
        """A snapshot was begun in a slot of this size; return what to warn of, once: each changes the structure."""
        former, self._taken = self._taken, layout
        self._skipped, self._why = None, ""
        self._small = self._small + 1 if slot_size_bytes > WASTE_FACTOR * layout.slot_size_bytes else 0
        if former is None or former.digest == layout.digest:
            self._changes = 0
            return ""
        self._changes += 1
        if self._changes < CHANGES_MAX or self._told:
            return ""
        self._told = True
        return (
            f"the structure of the state changes at each checkpoint: {changed_text(former, layout)}; {HINT}"
        )

    @property
    def is_wasteful(self) -> bool:
        """Tell whether slots are much larger than snapshots have been for some time."""
        return self._small >= WASTE_MAX


def changed_text(former: Layout, layout: Layout) -> str:
    """Return the leaf that differs between two layouts: what grew most, else what came, else what went."""
    before, after = _by_name(former), _by_name(layout)
    resized = [name for name, leaf in after.items() if name in before and before[name] != leaf]
    if resized:
        name = max(resized, key=lambda each: after[each].size_bytes - before[each].size_bytes)
        return f"{name} is {_look(after[name])} and was {_look(before[name])} before"
    for name in after.keys() - before.keys():
        return f"{name} ({_look(after[name])}) was not there before"
    for name in before.keys() - after.keys():
        return f"{name} ({_look(before[name])}) is gone"
    return "other tensors share memory than before"


def _has_grown_leaf(former: Layout, layout: Layout) -> bool:
    sizes = {leaf.name: leaf.size_bytes for leaf in former.leaves}
    return any(leaf.size_bytes > sizes.get(leaf.name, leaf.size_bytes) for leaf in layout.leaves)


def _by_name(layout: Layout) -> dict[str, LeafSpec]:
    return {leaf.name: leaf for leaf in layout.leaves}


def _look(leaf: LeafSpec) -> str:
    return f"{leaf.dtype} of shape {list(leaf.shape)}"

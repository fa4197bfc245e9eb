"""A map-style dataset of given items; in a module of its own, so that spawned workers can import it."""

from collections.abc import Sequence


class Items:
    """A dataset of whatever it is given; an exception is raised instead of returned."""

    def __init__(self, items: Sequence[object], fingerprint: object = "items-1") -> None:
        self.items = items
        self.print = fingerprint

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        item = self.items[index]
        if isinstance(item, Exception):
            raise item
        return item

    def fingerprint(self) -> object:
        return self.print


def upper(data: bytes | bytearray | memoryview) -> str:
    return bytes(data).decode().upper()

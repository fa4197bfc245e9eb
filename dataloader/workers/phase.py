"""What a worker is at: a place in its ticket from 0, or one of these."""

from enum import IntEnum


class Phase(IntEnum):
    """What a worker does while it reads no single sample; negative, so that it shares a cell with places."""

    READ_ALL = -1
    COLLATE = -2
    SEND = -3
    IDLE = -4
    START = -5

"""Copies to the host in turns of two streams, so that what training reads back itself comes between two of them.

A copy engine works off one stream before it looks at another: beside 2 GiB a loss was read back in 39 ms, beside
turns of 16 MiB in 0.2 ms, and the copies took 2 % longer (ADR 0088).
"""

from collections.abc import Iterable

import torch

from . import cuda_memcpy
from .cuda_memcpy import Copies


class Turns:
    """Two streams of one device. Others see `main`: the first turn begins behind it, and it waits for the last one."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams."""
        self.main, self._other = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy(self, turns: Iterable[Copies]) -> None:
        """Enqueue copies, each turn behind the one before."""
        stream, idle = self.main, self._other
        try:
            for number, copies in enumerate(turns):
                if number:
                    idle.wait_stream(stream)
                    stream, idle = idle, stream
                cuda_memcpy.enqueue(copies, stream)
        finally:
            if stream is not self.main:
                self.main.wait_stream(stream)

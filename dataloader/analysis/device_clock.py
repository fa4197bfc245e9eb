"""Times of steps and copies on a CUDA device, by events on its own time line; nothing at all without one.

A loop on a GPU runs ahead of it, so that the clock of the processor says little about one step. Events cost a few
microseconds and wait for nothing; the device is waited for only where a window of steps begins and ends.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, cast

import torch

_MOVES = ("to", "cuda")
_Event = torch.cuda.Event


def device_in_use() -> bool:
    """Return whether this process uses a CUDA device."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def settle() -> None:
    """Wait until the device, if any, has done everything."""
    if device_in_use():
        torch.cuda.synchronize()


class DeviceMarks:
    """The steps of one loop on the device's time line; empty without a device."""

    def __init__(self) -> None:
        self._windows: list[list[_Event]] = []

    def begin(self) -> None:
        """Mark the begin of the first step of a window."""
        self._windows.append([])
        self.mark()

    def mark(self) -> None:
        """Mark the end of a step and the begin of the next one."""
        if self._windows and device_in_use():
            self._windows[-1].append(_recorded())

    def step_times_s(self) -> list[float]:
        """Return the time of each step. Waits for the device."""
        settle()
        return [_between_s(*pair) for window in self._windows for pair in itertools.pairwise(window)]


class CopyWatch:
    """Copies to the device by `Tensor.to` and `Tensor.cuda`, timed on the device."""

    def __init__(self) -> None:
        self._copies: list[tuple[_Event, _Event]] = []
        self._settled_s = 0.0
        self._originals: dict[str, Any] = {}

    def install(self) -> None:
        """Begin; nothing where there is no device."""
        if not torch.cuda.is_available() or self._originals:
            return
        for name in _MOVES:
            original: Any = getattr(torch.Tensor, name)
            self._originals[name] = original
            setattr(torch.Tensor, name, self._timed(original))

    def remove(self) -> None:
        """Undo install."""
        for name, original in self._originals.items():
            setattr(torch.Tensor, name, original)
        self._originals.clear()

    def total_s(self) -> float:
        """Return the time of all copies that are done so far; waits for nothing."""
        while self._copies and self._copies[0][1].query():
            self._settled_s += _between_s(*self._copies.pop(0))
        return self._settled_s

    def _timed(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def move(tensor: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
            if tensor.is_cuda or not torch.cuda.is_initialized():
                return original(tensor, *arguments, **keywords)
            before = _recorded()
            moved = original(tensor, *arguments, **keywords)
            if moved.is_cuda:
                self._copies.append((before, _recorded()))
            return moved

        return move


def _recorded() -> _Event:
    event = cast(Callable[..., _Event], _Event)(enable_timing=True)
    event.record()
    return event


def _between_s(before: _Event, after: _Event) -> float:
    return before.elapsed_time(after) / 1000.0

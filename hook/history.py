"""Histories: append-only series of numbers that are part of the training state (`run.log`)."""

from collections.abc import Callable, Mapping
from typing import cast

import torch

from ..checkpoint.value_format import is_utf8, not_utf8
from ..core.errors import CorruptDataError, StateTypeError
from .document import Document, read_document
from .state_protocol import Laziness, Sink
from .stored_state import StoredState

KIND = "history"
NAME = "log"
CAPACITY_MIN = 4096
KEY_LENGTH_MAX = 4000
"""So that the names of its leaves are no longer than NAME_LENGTH_MAX."""


class _Series:
    """Steps and values with room for a power of two: the layout of the state changes only when it doubles."""

    def __init__(self, capacity: int = CAPACITY_MIN) -> None:
        with torch.inference_mode(False):  # what an evaluation begins is written to by training
            self.steps = torch.zeros(capacity, dtype=torch.int64, device="cpu")
            self.values = torch.zeros(capacity, dtype=torch.float64, device="cpu")
        self.count = 0

    def append(self, step: int, value: float) -> None:
        if self.count == len(self.steps):
            with torch.inference_mode(False):
                self.steps = torch.cat((self.steps, torch.zeros_like(self.steps)))
                self.values = torch.cat((self.values, torch.zeros_like(self.values)))
        self.steps[self.count] = step
        self.values[self.count] = value
        self.count += 1

    def pairs(self) -> list[tuple[int, float]]:
        steps = cast("list[int]", _numbers(self.steps[: self.count]))
        return list(zip(steps, cast("list[float]", _numbers(self.values[: self.count])), strict=True))


class History:
    """Component `log`: one series of (step, value) per key. Restoring replaces all of them."""

    def __init__(self) -> None:
        """Begin without any series."""
        self.name = NAME
        self._series: dict[str, _Series] = {}

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add one value per key, or none at all.

        Raises:
            StateTypeError: a key is too long, or a value no number (a tensor counts as one when it has one element;
                on a GPU that waits for it).
        """
        for key in values:
            if not is_utf8(key):
                raise not_utf8(key)
            if len(key) > KEY_LENGTH_MAX:
                raise StateTypeError(
                    f"log() was given a key of {len(key)} characters, more than {KEY_LENGTH_MAX}",
                    hint="shorten it",
                )
        numbers = {key: _number(key, value) for key, value in values.items()}
        for key, number in numbers.items():
            self._series.setdefault(key, _Series()).append(step, number)

    def keys(self) -> list[str]:
        """Return the keys in the order in which they first came."""
        return list(self._series)

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return all (step, value) of a key, oldest first; empty for an unknown one."""
        return self._series[key].pairs() if key in self._series else []

    checks_bytes = True

    def capture(self, sink: Sink) -> None:
        """Hand over every series with its spare room."""
        for key, series in self._series.items():
            sink.leaf(f"{self.name}.{key}.steps", series.steps, Laziness.EAGER)
            sink.leaf(f"{self.name}.{key}.values", series.values, Laziness.EAGER)
        counts = [[key, series.count] for key, series in self._series.items()]
        sink.value({"kind": KIND, "counts": counts})

    def check(self, stored: StoredState) -> None:
        """Return if the stored series can be read."""
        self._read(stored)

    def apply(self, stored: StoredState) -> None:
        """Replace all series by the stored ones."""
        self._series = self._read(stored)

    def _read(self, stored: StoredState) -> dict[str, _Series]:
        found: dict[str, _Series] = {}
        document = read_document(stored, self.name, KIND)
        for pair in document.items("counts"):
            if not isinstance(pair, list) or len(cast("list[object]", pair)) != 2:
                raise CorruptDataError(f"the histories of {self.name} are not pairs of key and count")
            entry = Document(self.name, dict(zip(("key", "count"), cast("list[object]", pair), strict=True)))
            key, series = entry.text("key"), _Series()
            series.steps = stored.tensor(f"{self.name}.{key}.steps")
            series.values = stored.tensor(f"{self.name}.{key}.values")
            series.count = entry.count("count")
            if not 0 < len(series.steps) == len(series.values) >= series.count:
                raise CorruptDataError(f"the history of {key!r} has {series.count} values in too little room")
            found[key] = series
        return found


def _numbers(tensor: torch.Tensor) -> object:
    return cast(Callable[[], object], getattr(tensor, "tolist"))()  # noqa: B009  # torch types it as a bare list


def _number(key: str, value: object) -> float:
    try:
        return float(cast(float, value.detach() if isinstance(value, torch.Tensor) else value))
    except OverflowError as error:
        raise StateTypeError(
            f"log({key}=…) was given an integer that no float holds", hint="scale it"
        ) from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateTypeError(
            f"log({key}=…) was given a {type(value).__qualname__}, which is no number",
            hint="log one number per key and step",
        ) from error

"""A storage that dawdles now and then before and after a call: what happens side by side meets in other ways."""

import random
import time
from collections.abc import Callable
from typing import cast

from everstep.checkpoint.storage_ops import StorageOps

SHARE = 0.08
"""Of the calls; twice: before and after."""
MEAN_S = 0.003


class DawdlingStorage:
    """Passes every call on."""

    can_hang = True

    def __init__(self, ops: StorageOps) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = cast("Callable[..., object]", getattr(self._ops, name))

        def dawdled(*arguments: object, **named: object) -> object:
            _dawdle()
            try:
                return call(*arguments, **named)
            finally:
                _dawdle()

        return dawdled

    def as_ops(self) -> StorageOps:
        """Return this as what it stands for."""
        return cast("StorageOps", cast("object", self))


def _dawdle() -> None:
    if random.random() < SHARE:
        time.sleep(random.expovariate(1 / MEAN_S))

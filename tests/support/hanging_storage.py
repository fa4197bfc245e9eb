"""A `StorageOps` over the real one of which calls hang, as on a drive that does not answer."""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import cast

from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.storage_ops import storage_error


class Rule:
    """Calls that hang until a test lets them go, well or with an error."""

    def __init__(self, matches: Callable[[str, Path], bool]) -> None:
        self.matches = matches
        self.error = 0
        self._opens, self._asked = threading.Event(), threading.Event()

    def meet(self, name: str, path: Path) -> None:
        """Hang, and then fail where that was asked for."""
        self._asked.set()
        assert self._opens.wait(60)
        if self.error:
            error = OSError(self.error, os.strerror(self.error))
            raise storage_error(error, path, name) from error

    @property
    def is_asked(self) -> bool:
        """Whether such a call was made."""
        return self._asked.is_set()

    def wait_asked(self) -> None:
        """Return when something hangs."""
        assert self._asked.wait(60)

    def let_go(self, error: int = 0) -> None:
        """Let what hangs end, and what comes later: as it should, or with this error."""
        self.error = error
        self._opens.set()


class HangingStorage:
    """A `StorageOps` of which some calls hang."""

    can_hang = True

    def __init__(self) -> None:
        self._ops = RealStorage()
        self._rules: list[Rule] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        real = cast(Callable[..., object], getattr(self._ops, name))

        def call(*args: object, **kwargs: object) -> object:
            path = args[0] if isinstance(args[0], Path) else Path("/")
            rule = next((rule for rule in self._rules if rule.matches(name, path)), None)
            if rule is not None:
                rule.meet(name, path)
            return real(*args, **kwargs)

        return call

    @contextmanager
    def where(self, matches: Callable[[str, Path], bool]) -> Generator[Rule]:
        """Let calls that match hang while the block runs."""
        rule = Rule(matches)
        self._rules.append(rule)
        try:
            yield rule
        finally:
            self._rules.remove(rule)
            rule.let_go()

    def hanging(self, device: Path, *names: str) -> AbstractContextManager[Rule]:
        """Let these calls below a device's path (none: all) hang while the block runs."""
        return self.where(lambda name, path: path.is_relative_to(device) and (not names or name in names))

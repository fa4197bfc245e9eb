"""A file whose appearing announces the end of a run: asked for by a thread of its own, since a mount may hang."""

import logging
import os
import threading
import time
from collections import Counter
from typing import NamedTuple

from .thinned_lines import is_said

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""So long at most somebody waits for a file system: nearly all answer at once."""


class Answer(NamedTuple):
    """What a look has found."""

    is_there: bool
    late_s: float
    """How long it has been there: no longer than since the look before."""


class NoticeFile:
    """Looks for a file again and again. Used by one thread, which never waits longer than `LOOK_S`."""

    def __init__(self, path: str | os.PathLike[str], *, every_s: float) -> None:
        self._path, self._every_s = path, every_s
        self._look: _Look | None = None
        """One that was begun, and whose answer was not taken."""
        self._looked_s: float | None = None
        """When the newest answer was taken, of the monotonic clock."""
        self._failed = Counter[str]()
        """How often for which reason."""

    @property
    def reason(self) -> str:
        """What its being there means."""
        return f"{os.fspath(self._path)} is there"

    def ask(self) -> "Answer | None":
        """Return whether the file is there; None: nobody knows now, and it is as it was."""
        look = self._look = self._look or self._begin()
        if look is None:
            return None
        if not look.has_ended(LOOK_S):
            self._warn("the file system does not answer")
            return None
        self._look = None
        if look.error is not None:
            self._warn(str(look.error))
            return None
        since_s = self._every_s if self._looked_s is None else time.monotonic() - self._looked_s
        self._looked_s = time.monotonic()
        if look.made_unix_s is None:
            return Answer(is_there=False, late_s=0.0)
        late_s = max(0.0, time.time() - look.made_unix_s)
        return Answer(is_there=True, late_s=min(late_s, max(since_s, self._every_s)))

    def _begin(self) -> "_Look | None":
        try:
            return _Look(self._path)
        except RuntimeError as error:  # no thread is to be had
            self._warn(str(error))
            return None

    def _warn(self, reason: str) -> None:
        """Log it; of each reason the first, the 10th, the 100th and so on."""
        self._failed[reason] += 1
        if is_said(self._failed[reason]):
            logger.warning("notice_file_failed file=%s reason=%s", os.fspath(self._path), reason)


class _Look:
    """One `stat` in a thread, which is left behind if it never returns."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self.made_unix_s: float | None = None
        """None: it is not there."""
        self.error: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="everstep-notice-file", daemon=True)
        self._thread.start()

    def has_ended(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            self.made_unix_s = os.stat(self._path).st_mtime  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:  # ESTALE, EIO
            self.error = error

"""Directories that are about to be opened as devices, asked all at once, so that one that hangs holds nobody up.

A drive hangs when another one has answered `LATE_CALL_S` ago; alone it is waited for. That is the error of its survey
then, by which `plan_store` takes a member for missing (ADR 0101).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from ..core.errors import DeviceLockedError, StorageError
from .device import LOCK_NAME, Survey, lock_directory
from .late_plan import LATE_CALL_S
from .side_by_side import Apart
from .storage_ops import LockHandle, StorageOps
from .store_format import LockHolder

_HINT = "look at its drive (dmesg)"
_being_locked = set[Path]()
"""Directories of which a lock was asked in vain so far, by this process."""


def survey_all(ops: StorageOps, paths: Sequence[Path], survey: Callable[[Path], Survey]) -> list[Survey]:
    """Return what `survey` finds in each of these directories, in their order; it only reads, and may raise."""
    if len(paths) < 2 or not ops.can_hang:
        return [survey(path) for path in paths]
    asked = [Apart("survey").submit(survey, path) for path in paths]
    wait(asked, return_when=FIRST_COMPLETED)
    wait(asked, LATE_CALL_S)
    return [each.result() if each.done() else _hanging(path) for path, each in zip(paths, asked, strict=True)]


def lock_all(
    ops: StorageOps, paths: Sequence[Path], holder: LockHolder, locks: dict[Path, LockHandle]
) -> dict[Path, Survey]:
    """Put the held lock of each directory that answers into `locks`, and return the surveys of the others.

    One after the other, in an order that is the same for everybody: of two processes one gets them all.

    Raises:
        DeviceLockedError: another process has one; the message says which.
        StorageError: a directory cannot be written to, or none answers.
    """
    hanging: dict[Path, Survey] = {}
    for path in sorted(paths):
        try:
            found = _lock(ops, path, holder, may_hang=len(paths) > 1 and ops.can_hang)
        except DeviceLockedError:
            if not ops.is_lock_of_the_dead(path / LOCK_NAME):
                raise
            error = StorageError(
                f"{path} is held by a process that was ended while a call on a drive hangs",
                hint="the kernel lets go of it when that drive answers, or when the node starts again",
            )
            found = Survey(path=path, exists=True, error=error)
        if isinstance(found, Survey):
            hanging[path] = found
        else:
            locks[path] = found
    if not locks and hanging:
        raise next(each.error for each in hanging.values() if each.error)
    return hanging


def _lock(ops: StorageOps, path: Path, holder: LockHolder, *, may_hang: bool) -> LockHandle | Survey:
    if path in _being_locked:
        return _hanging(path)
    if not may_hang:
        return lock_directory(ops, path, holder)
    asked = Apart("lock").submit(lock_directory, ops, path, holder)
    if wait([asked], LATE_CALL_S).done:
        return asked.result()
    _being_locked.add(path)
    asked.add_done_callback(lambda done: _let_go(path, done))
    return _hanging(path)


def _let_go(path: Path, asked: Future[LockHandle]) -> None:
    """Nobody uses a device whose lock came too late."""
    if asked.exception() is None:
        asked.result().release()
    _being_locked.discard(path)


def _hanging(path: Path) -> Survey:
    error = StorageError(
        f"{path} has not answered for {LATE_CALL_S:.0f} s, and another device has", hint=_HINT
    )
    return Survey(path=path, exists=True, error=error)

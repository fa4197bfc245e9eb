"""Directories that are about to be opened as devices, asked all at once, so that one that hangs holds nobody up.

A drive hangs when another one has answered `LATE_CALL_S` ago; alone it is waited for. That is the error of its survey
then, by which `plan_store` takes a member for missing (ADR 0101).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from ..core.errors import StorageError
from .device import Survey, lock_directory
from .late_plan import LATE_CALL_S
from .side_by_side import Apart
from .storage_ops import LockHandle, StorageOps
from .store_format import LockHolder


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
        StorageError: a directory cannot be written to.
    """
    hanging: dict[Path, Survey] = {}
    for path in sorted(paths):
        if len(paths) < 2 or not ops.can_hang:
            locks[path] = lock_directory(ops, path, holder)
            continue
        asked = Apart("lock").submit(lock_directory, ops, path, holder)
        if wait([asked], LATE_CALL_S).done:
            locks[path] = asked.result()
        else:
            asked.add_done_callback(_release)
            hanging[path] = _hanging(path)
    return hanging


def _release(asked: Future[LockHandle]) -> None:
    if asked.exception() is None:
        asked.result().release()


def _hanging(path: Path) -> Survey:
    error = StorageError(
        f"{path} has not answered for {LATE_CALL_S:.0f} s, and another device has",
        hint="look at its drive (dmesg); when it answers again, `everstep device readmit` takes it back",
    )
    return Survey(path=path, exists=True, error=error)

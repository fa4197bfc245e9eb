"""What runs in each worker before its first batch, and then the user's own worker_init_fn. Travels to workers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch.utils.data import get_worker_info

from .open_watch import OpenWatch, watch_opens
from .work_folder import WorkFolder
from .work_meter import begin_meter, timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """What a worker is to see of files; each process of a run has the same."""

    folder: str
    """Where the names go, a file for each process."""
    drops: bool
    """Whether files leave memory when they are opened."""
    work_folder: WorkFolder | None = None
    """What takes the files that are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTap:
    """torch's worker_init_fn: times the dataset, and names the files that are opened."""

    user_function: Callable[[int], None] | None
    path: str
    """Of the counters."""
    watching: Watching | None

    def __call__(self, worker: int) -> None:
        """Run once in each worker process, before any batch."""
        info = get_worker_info()
        assert info is not None
        watch = self._watch()
        meter = begin_meter(self.path, worker, counts_bytes=watch is not None)
        if meter is not None:
            timed(cast(object, info.dataset), meter)  # pyright: ignore[reportUnknownMemberType]
            if watch is not None:
                meter.add_after_batch(watch.look)
        if self.user_function is not None:
            self.user_function(worker)

    def _watch(self) -> OpenWatch | None:
        if self.watching is None:
            return None
        work_folder = self.watching.work_folder
        return watch_opens(
            self.watching.folder,
            drops=self.watching.drops,
            before_change=None if work_folder is None else work_folder.own,
        )

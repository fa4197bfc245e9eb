"""Lets a loader's workers, or the training process where there are none, count what preparing a batch takes.

Nothing of the loader changes for good: while an iterator is made, `worker_init_fn` and `collate_fn` are replaced by
ones that call the user's. So it works for torch's loader, for ours and for whatever is derived from them.
"""

import contextlib
import weakref
from collections.abc import Callable, Generator
from typing import Any, cast

from torch.utils.data import DataLoader as TorchDataLoader

from .declared import declared_files
from .open_watch import OpenWatch
from .work_meter import TimedCollate, begin_meter, end_meter, timed
from .worker_counters import Counters, WorkTotals
from .worker_tap import Watching, WorkerTap

AnyLoader = TorchDataLoader[Any]


class Instrument:
    """The counters of one loader."""

    def __init__(
        self, loader: AnyLoader, *, watching: Watching | None = None, watch: OpenWatch | None = None
    ) -> None:
        self._loader = weakref.ref(loader)  # its script decides how long it lives
        self._watching = watching
        self._watch = watch
        self._counters = Counters()
        self._restore: Callable[[], None] | None = None
        self._has_declared = False
        self.notes: list[str] = []
        """What could not be learnt of the loader."""

    def another(self) -> "Instrument":
        """Return one that counts anew and watches the same.

        Raises:
            RuntimeError: the loader is gone.
        """
        loader = self._loader()
        if loader is None:
            raise RuntimeError("the loader is gone")
        return Instrument(loader, watching=self._watching, watch=self._watch)

    def totals(self) -> WorkTotals:
        """Return what all workers have counted so far."""
        return self._counters.totals()

    @contextlib.contextmanager
    def making(self) -> Generator[None]:
        """Make the loader's iterator within this."""
        loader, path = self._loader(), self._counters.path
        if loader is None:  # `for batch in DataLoader(...)`: gone once its iterator is made
            yield
            return
        self._declare(loader)
        user_init, user_collate = loader.worker_init_fn, cast(Callable[[Any], object], loader.collate_fn)
        is_batched = cast(object, loader.batch_sampler) is not None or loader.batch_size is not None  # pyright: ignore[reportUnknownMemberType]
        if not isinstance(user_collate, TimedCollate):
            loader.collate_fn = TimedCollate(user_collate, path, is_batched=is_batched)
        if loader.num_workers:
            loader.worker_init_fn = WorkerTap(user_function=user_init, path=path, watching=self._watching)
        elif self._restore is None:
            self._begin_here(loader)
        try:
            yield
        finally:
            loader.worker_init_fn, loader.collate_fn = user_init, user_collate

    def ended(self) -> None:
        """Give the dataset its own class back, once no iterator of this process uses it."""
        if self._restore is not None:
            self._restore()
            self._restore = None
            end_meter(self._counters.path)

    def close(self) -> None:
        """End, and let the counters go."""
        self.ended()
        self._counters.close()

    def _declare(self, loader: AnyLoader) -> None:
        """Name the files that the dataset's sources declare: native code may open them unseen."""
        if self._watch is not None and not self._has_declared:
            self._has_declared = True
            declared = declared_files(cast(object, loader.dataset))
            self._watch.declare(declared.paths)
            self.notes += declared.notes

    def _begin_here(self, loader: AnyLoader) -> None:
        meter = begin_meter(self._counters.path, None, counts_bytes=self._watching is not None)
        if meter is not None:
            self._restore = timed(cast(object, loader.dataset), meter)
            if self._watch is not None:
                meter.add_after_batch(self._watch.look)

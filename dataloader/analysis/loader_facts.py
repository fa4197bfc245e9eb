"""What a loader is, in plain words and numbers."""

import multiprocessing
from multiprocessing.context import BaseContext
from typing import cast

from .instrument import AnyLoader
from .measured_format import LoaderFacts


def facts_of(loader: AnyLoader, number: int) -> LoaderFacts:
    """Return what there is to say of a loader before it is iterated; the batch size as it was asked for."""
    dataset = cast(object, loader.dataset)
    try:
        length: int | None = len(dataset)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):  # a stream
        length = None
    return LoaderFacts(
        number=number,
        kind=f"{type(loader).__module__}.{type(loader).__qualname__}",
        dataset=type(dataset).__qualname__,
        dataset_length=length,
        batch_size=float(loader.batch_size or 1),
        workers=loader.num_workers,
        start_method=_start_method(loader) if loader.num_workers else "none",
        pinned=loader.pin_memory,
    )


def _start_method(loader: AnyLoader) -> str:
    context = cast(object, loader.multiprocessing_context)  # pyright: ignore[reportUnknownMemberType]
    if isinstance(context, BaseContext):
        return context.get_start_method()
    return context if isinstance(context, str) else multiprocessing.get_start_method()

"""Puts a conductor between every loader of a script and its loops, by `__iter__` of the loaders' classes.

torch's class is tapped, and whatever class derived from it has an `__iter__` of its own, as soon as one is made. What
one tapped class calls of another belongs to the same iteration: the outermost counts.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

from torch.utils.data import DataLoader as TorchDataLoader

from .conductor import Conductor
from .instrument import AnyLoader

_Iterate = Callable[[AnyLoader], Iterator[object]]


class LoaderTap:
    """While it is installed, loops over loaders go through the conductor."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._originals: dict[type, Any] = {}
        self._depth = 0

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Tap all classes of loaders; undone at the end."""
        torch_loader = cast(type, TorchDataLoader)
        made: Any = cast(Any, torch_loader).__init__

        @functools.wraps(made)
        def make(loader: AnyLoader, *arguments: object, **keywords: object) -> None:
            self._tap(type(loader))
            made(loader, *arguments, **keywords)

        self._tap(torch_loader)
        setattr(torch_loader, "__init__", make)  # noqa: B010
        try:
            yield
        finally:
            setattr(torch_loader, "__init__", made)  # noqa: B010
            for kind, original in self._originals.items():
                setattr(kind, "__iter__", original)  # noqa: B010

    def _tap(self, kind: type) -> None:
        for each in kind.__mro__:
            is_loader = issubclass(each, cast(type, TorchDataLoader))
            if is_loader and "__iter__" in vars(each) and each not in self._originals:
                original = cast(_Iterate, vars(each)["__iter__"])
                self._originals[each] = original
                setattr(each, "__iter__", self._tapped(original))  # noqa: B010

    def _tapped(self, original: _Iterate) -> _Iterate:
        @functools.wraps(original)
        def iterate(loader: AnyLoader) -> Iterator[object]:
            if self._depth:
                return original(loader)
            return self._conductor.iterate(loader, functools.partial(self._made, original))

        return iterate

    def _made(self, original: _Iterate, loader: AnyLoader) -> Iterator[object]:
        with self._inside():
            inner = original(loader)
        return _Inner(inner, self._inside)

    @contextlib.contextmanager
    def _inside(self) -> Generator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


class _Inner:
    """The loader's own iterator, within which no further loader counts."""

    def __init__(
        self, inner: Iterator[object], inside: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._inner = inner
        self._inside = inside

    def __iter__(self) -> "_Inner":
        return self

    def __next__(self) -> object:
        with self._inside():
            return next(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)  # pyright: ignore[reportArgumentType]

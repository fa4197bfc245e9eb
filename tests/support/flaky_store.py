"""A file system of fsspec whose reads fail as often as they are told to; in two kinds, as real stores have them."""

import asyncio
import threading
from typing import ClassVar
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

OBJECTS = {f"bucket/train/{number}.bin": b"%d" % number * 3 for number in range(4)}


class FlakyStore(AbstractFileSystem):
    """Raises `errors` one after the other before a read succeeds. What was tried is in `FlakyStore.tried`."""

    protocol = "flaky"
    cachable = False
    made = 0
    tried: ClassVar[list[str]] = []
    errors: ClassVar[list[Exception]] = []
    list_errors: ClassVar[list[Exception]] = []
    """Raised one after the other by questions for lists and sizes."""
    waits: ClassVar[list[threading.Event]] = []
    """Waited for, one after the other, by reads."""
    objects: ClassVar[dict[str, bytes]] = OBJECTS

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        type(self).made += 1
        self.options = options

    @classmethod
    def counts(cls) -> int:
        """Return how many were made in this process and those before it."""
        return cls.made

    def find(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, path: str, detail: bool = False, **_: object
    ) -> dict[str, dict[str, object]]:
        assert detail
        self._fail_list()
        return {name: self.info(name) for name in reversed(self.objects) if name.startswith(path)}

    def _fail_list(self) -> None:
        if type(self).list_errors:
            raise type(self).list_errors.pop(0)

    def info(self, path: str, **_: object) -> dict[str, object]:
        self._fail_list()
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.objects[path]), "type": "file", "ETag": f"tag-{path[-5]}"}

    def cat_file(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, path: str, **_: object
    ) -> bytes:
        type(self).tried.append(path)
        if type(self).waits:
            type(self).waits.pop(0).wait()
        if type(self).errors:
            raise type(self).errors.pop(0)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]


class HostedStore(FlakyStore):
    """Its URLs name a host, which its paths leave out: as sftp and hdfs have it."""

    protocol = "hosted"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return urlsplit(path).path

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, object]:
        parts = urlsplit(path)
        return {"host": parts.hostname, "username": parts.username}


class SignedStore(FlakyStore):
    """Its names are whole URLs: as HTTP has it."""

    protocol = "signed"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return path


class HangingStore(AsyncFileSystem):
    """Hangs in the first `hangs` reads of this process."""

    protocol = "hanging"
    cachable = False
    hangs = 1
    started = 0

    async def _info(self, path: str, **_: object) -> dict[str, object]:
        return {"name": path, "size": len(OBJECTS[path]), "type": "file"}

    async def _cat_file(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, path: str, **_: object
    ) -> bytes:
        type(self).started += 1
        if type(self).hangs:
            type(self).hangs -= 1
            await asyncio.sleep(3600)
        return OBJECTS[path]


fsspec.register_implementation("flaky", FlakyStore, clobber=True)
fsspec.register_implementation("signed", SignedStore, clobber=True)
fsspec.register_implementation("hosted", HostedStore, clobber=True)
fsspec.register_implementation("hanging", HangingStore, clobber=True)

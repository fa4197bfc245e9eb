"""Objects of a store that fsspec knows (S3, GCS, Azure, HTTP, …): each is a sample."""

import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ...core.errors import SourceChangedError, StorageError, UsageError
from .extras import import_extra
from .in_time import in_time
from .index_file import SUFFIX, IndexHandle, open_or_build
from .index_format import Buffer, Index
from .object_index_format import (
    KIND,
    StoredObject,
    check_object_index,
    encode_object_index,
    object_at,
)
from .per_process import PerProcess
from .protocol import checked_index
from .url_format import public_url, secrets_of, without
from .web_pages import PROTOCOLS as WEB
from .web_pages import linked_objects, reason_of

T = TypeVar("T")

logger = logging.getLogger(__name__)

DEADLINE_S = 120.0
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
ASKERS = 16
"""Objects of a given list that are asked for their size at a time."""

_IN_MEMORY_OR_KERNEL = ("file", "local", "memory")
"""Protocols whose calls need no thread for their deadline: nothing of them can be given up."""

_REFUSED = (401, 403)
_TAGS = ("ETag", "etag", "content_md5", "md5Hash", "crc32c", "generation", "checksum")
_MISTAKES = (AttributeError, KeyError, NotImplementedError, TypeError, ValueError)
_jitter = random.SystemRandom()  # the global generators belong to the training


class ObjectSource:
    """Each object is a sample: those under a prefix, sorted by name, or a list in its order.

        images = ObjectSource("s3://bucket/train/", extensions=(".jpg",), index="/local/indices")

    Each process makes its own file system of fsspec, so nothing of a client crosses a fork. A failed read is tried
    again, with growing pauses, until `deadline_s` has passed, and one that hangs is given up after a third of it. So is
    a question for one object's size; a listing may take as long as it needs, and is tried again where it fails. The
    fingerprint covers names, sizes, and the ETag or checksum where the store has one. Passwords and what signs a URL
    are in no fingerprint, message or log.

    Args:
        urls: a prefix like `s3://bucket/train/`, or a list of URLs of one protocol and one host.
        storage_options: arguments for the file system, such as credentials; they travel to workers.
        extensions: endings of the objects under a prefix that are samples, all by default.
        index: a directory in which the listing is kept, for millions of objects: it is then mapped into memory
            instead of held by each process, and not listed again at the next start.
        refresh: list again although `index` holds a listing.
        deadline_s: seconds to try to read one object; then a StorageError names it.

    Raises:
        UsageError: fsspec is not installed, no object, or URLs of several protocols.
        StorageError: the store did not list them within the deadline.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        storage_options: Mapping[str, object] | None = None,
        extensions: Sequence[str] = (),
        index: str | Path | None = None,
        refresh: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if deadline_s <= 0:
            raise UsageError(f"deadline_s={deadline_s}", hint="give seconds above 0")
        self._protocol, self._places, from_urls = _parsed(urls)
        self._is_prefix = isinstance(urls, str)
        self._options = {**from_urls, **(storage_options or {})}
        self._is_signed = any(public_url(place) != place for place in self._places)
        if self._is_signed and index is not None:
            raise UsageError(
                f"index={str(index)!r} would keep what signs {public_url(self._places[0])}",
                hint="leave index= away: such URLs end soon",
            )
        self._extensions = tuple(extensions)
        self._deadline_s = deadline_s
        self._system: PerProcess[Any] = PerProcess(self._new_system, keep_inherited=True)
        self._handle = self._held() if index is None else self._kept(Path(index).absolute(), refresh)
        self._count = self._handle.count
        if not self._count:
            raise UsageError(
                f"there is no object under {public_url(self._places[0]):.200}",
                hint="check the prefix and extensions=",
            )

    def __len__(self) -> int:
        """Return the number of objects."""
        return self._count

    def get_bytes(self, index: int) -> bytes:
        """Return an object's bytes.

        Raises:
            IndexError: there is no such sample.
            SourceChangedError: the object is gone, or has another size than when it was listed.
            StorageError: it could not be read within the deadline; names the object and the last failure.
            PermissionError: the store refuses it.
        """
        number = checked_index(index, self._count, self)
        stored = object_at(self._handle.get(), number)
        data = self._retried(
            stored.name, "read", lambda limit_s: self._cat(stored.name, limit_s), f" (sample {number})"
        )
        if stored.size_bytes is not None and len(data) != stored.size_bytes:
            raise SourceChangedError(
                f"{self.url(number)} has {len(data)} bytes, {stored.size_bytes} when it was listed (sample {number})",
                hint="make the source anew, with refresh=True where index= is given",
            )
        return data

    def url(self, index: int) -> str:
        """Return the name of an object with its protocol."""
        return self._url(object_at(self._handle.get(), checked_index(index, self._count, self)).name)

    def fingerprint(self) -> str:
        """Return a digest over names, sizes and tags of all objects; names without what signs them."""
        if not self._is_signed:
            return f"objects-1:{self._handle.digest}"
        index = self._handle.get()
        stored = (object_at(index, number) for number in range(self._count))
        public = encode_object_index(each._replace(name=public_url(each.name)) for each in stored)
        return f"objects-1:{Index(b''.join(public), kind=KIND, verify=False).digest}"

    def _url(self, name: str) -> str:
        host = self._options.get("host")
        begin = f"{self._protocol}://{host if isinstance(host, str) else ''}"
        return public_url(name if "://" in name else begin + name)

    def _retried(self, name: str, done: str, call: Callable[[float], T], sample: str = "") -> T:
        """Return `call(seconds that it may take)`, tried again until the deadline where that may help."""
        what = self._url(name) + sample
        until = time.monotonic() + self._deadline_s
        delay = FIRST_DELAY_S
        while True:
            try:
                return call(min(until - time.monotonic(), self._deadline_s / 3))
            except FileNotFoundError as exc:
                raise SourceChangedError(
                    f"{what} is gone", hint="put it back, or make the source anew"
                ) from exc
            except (PermissionError, *_MISTAKES) as exc:
                exc.add_note(f"while {what} was {done}")
                raise
            except Exception as exc:  # each client has errors of its own
                pause = delay * _jitter.uniform(0.5, 1.0)
                error = without(f"{type(exc).__name__}: {exc}", secrets_of(name, self._options))
                if getattr(exc, "status", None) in _REFUSED:  # HTTP's client has no error of its own for it
                    raise PermissionError(f"{what} is refused: {error}") from exc
                if time.monotonic() + pause >= until:
                    raise StorageError(
                        f"{what} could not be {done} within {self._deadline_s:g} s: {error}",
                        hint="look at the store, or give a longer deadline_s",
                    ) from exc
                logger.warning("object_call_failed what=%r error=%r retry_in_s=%.2f", what, error, pause)
            time.sleep(pause)
            delay = min(2 * delay, LONGEST_DELAY_S)

    def _cat(self, name: str, limit_s: float) -> bytes:
        system = self._system.value()
        asyn = import_extra("fsspec.asyn", "objects", "ObjectSource")
        if isinstance(system, asyn.AsyncFileSystem):
            return bytes(asyn.sync(system.loop, system._cat_file, name, timeout=max(limit_s, 0.01)))
        return bytes(self._in_time(lambda: system.cat_file(name), limit_s))

    def _in_time(self, call: Callable[[], T], limit_s: float) -> T:
        return call() if self._protocol in _IN_MEMORY_OR_KERNEL else in_time(call, limit_s)

    def _new_system(self) -> Any:
        fsspec = import_extra("fsspec", "objects", "ObjectSource")
        return fsspec.filesystem(
            self._protocol, skip_instance_cache=True, use_listings_cache=False, **self._options
        )

    def _held(self) -> "_HeldIndex":
        return _HeldIndex(b"".join(self._list()))

    def _kept(self, directory: Path, refresh: bool) -> IndexHandle:
        directory.mkdir(parents=True, exist_ok=True)
        asked = "\0".join([self._protocol, str(self._is_prefix), *self._extensions, "", *self._places])
        name = hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()

        def is_current(index: Index) -> bool:
            check_object_index(index)
            return not refresh

        return open_or_build(
            str(directory / f"objects-{name}{SUFFIX}"), KIND, str(directory), is_current, self._list
        )

    def _list(self) -> list[Buffer]:
        system = self._system.value()
        try:
            if self._is_prefix:
                prefix = self._places[0]
                found = self._retried(prefix, "listed", lambda _: self._find(system, prefix))
                samples = list(self._samples(found))
                if all(each.size_bytes is not None for each in samples):
                    return encode_object_index(samples)
                return encode_object_index(self._asked(system, [each.name for each in samples]))
            return encode_object_index(self._asked(system, self._places))
        except SourceChangedError as exc:
            raise UsageError(f"there is no object: {exc.message}", hint="check the URL") from exc

    def _find(self, system: Any, prefix: str) -> Mapping[str, Mapping[str, object]]:
        return linked_objects(system, prefix) if self._protocol in WEB else system.find(prefix, detail=True)

    def _asked(self, system: Any, names: Sequence[str]) -> list[StoredObject]:
        def described(name: str) -> StoredObject:
            def ask(limit_s: float) -> Mapping[str, object]:
                try:
                    return self._in_time(lambda: system.info(name), limit_s)
                except FileNotFoundError as exc:
                    raise (reason_of(exc) if self._protocol in WEB else exc) from None

            return _described(name, self._retried(name, "asked for its size", ask))

        with ThreadPoolExecutor(ASKERS) as pool:
            return list(pool.map(described, names))

    def _samples(self, found: Mapping[str, Mapping[str, object]]) -> Iterator[StoredObject]:
        for name in sorted(found):
            if name.endswith(self._extensions or "") and not name.endswith("/") and SUFFIX not in name:
                yield _described(name, found[name])

    def __getstate__(self) -> dict[str, object]:
        """Return everything but this process's file system."""
        return {name: value for name, value in self.__dict__.items() if name != "_system"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take what __getstate__ returned."""
        self.__dict__.update(state)
        self._system = PerProcess(self._new_system, keep_inherited=True)


class _HeldIndex:
    """An index in memory, which travels to workers with its bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._index = Index(data, kind=KIND, verify=False)
        self.count = self._index.count
        self.digest = self._index.digest

    def get(self) -> Index:
        return self._index

    def __reduce__(self) -> "tuple[Callable[[bytes], _HeldIndex], tuple[bytes]]":
        return _HeldIndex, (self._data,)


def _described(name: str, info: Mapping[str, object]) -> StoredObject:
    size = info.get("size")
    tags = [str(info[key]) for key in _TAGS if info.get(key)]
    return StoredObject(name, size if isinstance(size, int) and size >= 0 else None, " ".join(tags))


def _parsed(urls: str | Sequence[str]) -> tuple[str, list[str], dict[str, object]]:
    """Return the protocol, the names that the file system understands, and what the URLs say of it (a host)."""
    core = import_extra("fsspec.core", "objects", "ObjectSource")
    given = [urls] if isinstance(urls, str) else list(urls)
    if not given:
        raise UsageError("the list of objects is empty", hint="give URLs, or a prefix")
    protocols = {core.split_protocol(url)[0] or "file" for url in given}
    if len(protocols) != 1:
        raise UsageError(
            f"the objects have several protocols: {', '.join(sorted(protocols))}",
            hint="make a source of each",
        )
    protocol = protocols.pop()
    try:
        system = import_extra("fsspec", "objects", "ObjectSource").get_filesystem_class(protocol)
    except (ValueError, ImportError) as exc:
        raise UsageError(
            f"fsspec cannot read {protocol}://: {exc}",
            hint="install what its message names, or check the URL",
        ) from exc
    strip = system._strip_protocol
    return protocol, [str(strip(url)) for url in given], _options_in(system, given)


def _options_in(system: Any, urls: Iterable[str]) -> dict[str, object]:
    """Return the arguments for a file system that its URLs hold, such as host and user; the same in all of them."""
    found: dict[str, object] = {}
    for url in urls:
        options: dict[str, object] = dict(system._get_kwargs_from_urls(url))
        if any(found.get(name, value) != value for name, value in options.items()):
            raise UsageError(
                f"{public_url(url)} is of another host or user than the URLs before it",
                hint="make a source of each",
            )
        found |= options
    return found

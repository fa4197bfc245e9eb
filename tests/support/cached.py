"""Sources whose reads are counted, and a reader of the cache that does what no honest one does."""

import mmap
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import xxhash

from everstep.daemon.testing import FakeTrainer
from everstep.dataloader.cache.arena_view import ArenaView
from everstep.proto import frames
from everstep.proto.frames import CacheContent


class Blocks:
    """Samples of given lengths, random by their number; each read is one line in a file, whoever reads."""

    def __init__(self, lengths: Sequence[int], log: Path, name: str = "blocks") -> None:
        self.lengths, self.log, self.name = list(lengths), log, name

    def __len__(self) -> int:
        return len(self.lengths)

    def get_bytes(self, index: int) -> bytes:
        fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, b"%d\n" % index)
        os.close(fd)
        return self.content(index)

    def content(self, index: int) -> bytes:
        """What the source holds, without reading it."""
        return random.Random(f"{self.name}-{index}").randbytes(self.lengths[index])

    def fingerprint(self) -> str:
        return self.name

    def reads(self) -> list[int]:
        """Return what was read since this was asked last."""
        if not self.log.exists():
            return []
        found = [int(line) for line in self.log.read_text().splitlines()]
        self.log.unlink()
        return found


class HostileReader(FakeTrainer):
    """Speaks the cache's frames by hand."""

    view: ArenaView
    staging: mmap.mmap
    staging_fd: int
    arena_fd: int

    def __enter__(self) -> Self:
        return self

    def open_cache(
        self,
        count: int,
        *,
        budget_bytes: int = 1 << 20,
        fingerprint: str = "",
        content: CacheContent = CacheContent.RAW,
    ) -> frames.Reply:
        """Open a cache, by default one of this test's own, and map it; its descriptor is kept."""
        reply = self.ask(
            frames.OpenCache(
                request_id=self.number(),
                fingerprint=fingerprint or os.environ["PYTEST_CURRENT_TEST"].split()[0][-128:],
                content=content,
                sample_count=count,
                budget_bytes=budget_bytes,
            )
        )
        if isinstance(reply, frames.CacheOpened):
            self.arena_fd = self.reader.take_fd()
            self.view = ArenaView(os.dup(self.arena_fd), reply.size_bytes, count)
        return reply

    def stage(self, size_bytes: int = 1 << 16) -> frames.Reply:
        """Get a staging and map it; its descriptor is kept."""
        reply = self.ask(frames.StageCache(request_id=self.number(), size_bytes=size_bytes))
        if isinstance(reply, frames.StagingReady):
            self._drop_staging()
            self.staging_fd = self.reader.take_fd()
            self.staging = mmap.mmap(self.staging_fd, reply.size_bytes)
        return reply

    def fill(
        self,
        samples: dict[int, bytes],
        *,
        change: Callable[[mmap.mmap], object] = lambda _: None,
        digests: dict[int, int] | None = None,
    ) -> frames.Reply:
        """Stage samples back to back and send them; `change` is done to the staging before."""
        at, items = 0, list[tuple[int, int, int, int]]()
        for index, data in samples.items():
            self.staging[at : at + len(data)] = data
            digest = (digests or {}).get(index, xxhash.xxh3_64_intdigest(data))
            items.append((index, at, len(data), digest))
            at += len(data)
        change(self.staging)
        return self.send_items(items)

    def send_items(self, items: list[tuple[int, int, int, int]]) -> frames.Reply:
        """Send a fill as it is."""
        return self.ask(frames.FillCache(request_id=self.number(), items=items))

    def found(self, index: int) -> bytes | None:
        """Return a sample as readers see it."""
        place = self.view.places[index]
        if not place:
            return None
        return bytes(self.view.octets[place + 16 : place + 16 + self.view.words[place // 8]])

    def close(self) -> None:
        """Vanish, with everything that it held."""
        super().close()
        self._drop_staging()
        if hasattr(self, "arena_fd"):
            os.close(self.arena_fd)
            del self.arena_fd
        if hasattr(self, "view"):
            del self.view

    def _drop_staging(self) -> None:
        if hasattr(self, "staging_fd"):
            self.staging.close()
            os.close(self.staging_fd)
            del self.staging_fd

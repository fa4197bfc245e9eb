"""A real daemon process and a trainer that is not torch, for tests; nothing of the product imports this."""

import hashlib
import mmap
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.draft_format import encode_draft
from ..checkpoint.layout_plan import Layout, plan_layout, segment_count_for
from ..checkpoint.leaf import LeafSpec
from ..checkpoint.manifest_types import Draft
from ..checkpoint.ring_layout_plan import least_ring_bytes, plan_ring
from ..checkpoint.testing import SMALL_LEAVES
from ..core.ids import CheckpointId
from ..core.version import VERSION
from ..proto import frames
from ..proto.frames import Reply, Request, Role
from ..proto.wire import FrameReader, decode_reply, pack

DEADLINE_S = 60.0
"""Of whatever comes at all: a busy machine may stand still for seconds."""


@contextmanager
def daemon_process(
    socket_path: Path,
    *,
    linger_s: float = 600.0,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Generator[subprocess.Popen[bytes]]:
    """Run a private daemon on `socket_path`; it is ended, and its end checked, when the block is left.

    `environment` is added to this process's; `prefix` goes before the command (`ip netns exec NAME`).
    """
    environment = {**os.environ, **(environment or {}), "EVERSTEP_LINGER_S": str(linger_s)}
    socket_path.parent.mkdir(mode=0o700, exist_ok=True)
    arguments = ["-m", "everstep.daemon", "--private", "--socket", str(socket_path)]
    with _running(arguments, socket_path, environment, prefix) as process:
        yield process


@contextmanager
def node_daemon(
    config: Path,
    socket_path: Path,
    *,
    program: Sequence[str] = ("-m", "everstep.daemon.cli.main"),
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Generator[subprocess.Popen[bytes]]:
    """Run `everstep daemon --config`, which listens on `socket_path`; ended when the block is left.

    `program` is what Python runs as the command line, `environment` all of its variables; this process's unless given.
    `prefix` goes before it all.
    """
    arguments = [*program, "daemon", "--config", str(config)]
    with _running(arguments, socket_path, dict(environment or os.environ), prefix) as process:
        yield process


@contextmanager
def _running(
    arguments: list[str], socket_path: Path, environment: dict[str, str], prefix: Sequence[str] = ()
) -> Generator[subprocess.Popen[bytes]]:
    log = socket_path.with_name("daemon.log")
    with log.open("ab") as output:
        begin = output.tell()  # what a daemon before it has written tells nothing of this one
        process = subprocess.Popen(
            [*prefix, sys.executable, "-P", *arguments], stdout=output, stderr=output, env=environment
        )
    try:
        _wait_for_ready(log, begin, process)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(DEADLINE_S)


def _wait_for_ready(log: Path, begin: int, process: subprocess.Popen[bytes]) -> None:
    """Poll the log: it is the one sign of life that needs no connection."""
    said = ""
    for _ in range(int(DEADLINE_S / 0.02)):
        said = log.read_bytes()[begin:].decode(errors="replace")
        if "daemon_ready" in said:
            return
        if process.poll() is not None:
            raise AssertionError(f"the daemon ended with {process.returncode}:\n{said}")
        threading.Event().wait(0.02)
    raise AssertionError(f"it is not ready:\n{said}")


class FakeTrainer:
    """Speaks the data socket by hand: each method is one exchange, everything received is kept."""

    def __init__(
        self,
        socket_path: Path,
        *,
        protocol: int = frames.PROTOCOL,
        role: Role = Role.TRAINER,
        hello: bool = True,
    ) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(str(socket_path))
        self.reader = FrameReader(size_bytes_max=frames.FRAME_SIZE_BYTES_MAX)
        self.events: list[Reply] = []
        self.devices: list[frames.DeviceInfo] = []
        self._number = 0
        if hello:
            self.send(frames.Hello(protocol=protocol, version=VERSION, role=role))
            self.hello = self.receive()

    def __enter__(self) -> "FakeTrainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Vanish."""
        self.reader.close()
        self.sock.close()

    def send(self, frame: Request) -> None:
        """Send a frame."""
        self.sock.sendall(pack(frame))

    def receive(self) -> Reply:
        """Return the next frame; EOFError when the daemon has closed the connection."""
        while (body := self.reader.next_body()) is None:
            if not self.reader.receive(self.sock):
                raise EOFError
        return decode_reply(body)

    def number(self) -> int:
        """Return a fresh request id."""
        self._number += 1
        return self._number

    def ask(self, frame: Request) -> Reply:
        """Send a request and return its answer; events that come before it are kept."""
        self.send(frame)
        while True:
            reply = self.receive()
            if getattr(reply, "re", None) == getattr(frame, "request_id", 0):
                return reply
            self.events.append(reply)

    def event(self, kind: type[Reply]) -> Reply:
        """Return the oldest event of this kind, waiting for it."""
        while True:
            for event in self.events:
                if isinstance(event, kind):
                    self.events.remove(event)
                    return event
            self.events.append(self.receive())

    def open_run(
        self,
        storage: list[Path],
        *,
        name: str = "test",
        rank: int = 0,
        world_size: int = 1,
        takeover: bool = False,
        keep: frames.KeepRules | None = None,
    ) -> Reply:
        """Take the lease."""
        reply = self.ask(
            frames.OpenRun(
                request_id=self.number(),
                name=name,
                rank=rank,
                world_size=world_size,
                storage=[str(path) for path in storage],
                takeover=takeover,
                keep=keep,
            )
        )
        if isinstance(reply, frames.RunOpened):
            self.devices = reply.devices
        return reply

    def begin_attempt(self, attempt: int, *, fresh: bool = False, again: bool = False) -> Reply:
        """Begin an attempt."""
        return self.ask(
            frames.BeginAttempt(request_id=self.number(), attempt=attempt, fresh=fresh, again=again)
        )

    def offers(self) -> list[frames.Offer]:
        """Return what can be restored."""
        reply = self.ask(frames.ListOffers(request_id=self.number()))
        assert isinstance(reply, frames.Offers), reply
        return reply.items

    def fetch(self, checkpoint: CheckpointId, shard: int = 0, *, from_devices: bool = False) -> Reply:
        """Fetch a shard."""
        return self.ask(
            frames.Fetch(
                request_id=self.number(),
                attempt=checkpoint.attempt,
                step=checkpoint.step,
                rank=shard,
                from_devices=from_devices,
            )
        )

    def stream(
        self, shard: frames.Streaming, ranges: Sequence[tuple[int, int, int]] = ()
    ) -> tuple[dict[int, dict[int, bytes]], frames.StreamEnd]:
        """Read a shard through its ring, whose descriptor has come; return its chunks by segment and offset."""
        fd = self.reader.take_fd()
        try:
            with mmap.mmap(fd, shard.slot_size_bytes * shard.slot_count) as ring:
                self.send(frames.Stream(arena=shard.arena, ranges=list(ranges)))
                return self._receive_chunks(shard, ring)
        finally:
            os.close(fd)

    def _receive_chunks(
        self, shard: frames.Streaming, ring: mmap.mmap
    ) -> tuple[dict[int, dict[int, bytes]], frames.StreamEnd]:
        found: dict[int, dict[int, bytes]] = {}
        while True:
            event = self.receive()
            if isinstance(event, frames.StreamEnd):
                return found, event
            if not isinstance(event, frames.Chunk):
                self.events.append(event)
                continue
            begin = event.slot * shard.slot_size_bytes
            content = ring[begin : begin + event.size_bytes]
            found.setdefault(event.segment, {})[event.file_offset_bytes] = content
            self.send(frames.ChunkTaken(arena=shard.arena, slot=event.slot))

    def make_ring(self, layout: Layout) -> "FakeArena":
        """Get a ring, where not even one slot fits, and map it."""
        reply = self.ask(
            frames.MakeArena(
                request_id=self.number(),
                layout_digest=layout.digest,
                slot_size_bytes=layout.slot_size_bytes,
                slot_count=2,
                ring_size_bytes=least_ring_bytes(layout, 0),
            )
        )
        assert isinstance(reply, frames.ArenaReady), reply
        assert reply.is_ring
        devices = len(self.devices)
        ring = plan_ring(layout, slot_size_bytes=reply.slot_size_bytes, staged_bytes=0, device_count=devices)
        return FakeArena(self, reply, ring)

    def make_arena(self, layout: Layout, slot_count: int = 2) -> "FakeArena":
        """Get an arena and map it."""
        reply = self.ask(
            frames.MakeArena(
                request_id=self.number(),
                layout_digest=layout.digest,
                slot_size_bytes=layout.slot_size_bytes,
                slot_count=slot_count,
            )
        )
        assert isinstance(reply, frames.ArenaReady), reply
        return FakeArena(self, reply, layout)

    def layout(self, leaves: tuple[LeafSpec, ...] = SMALL_LEAVES) -> Layout:
        """Return a layout for the run's devices."""
        return plan_layout(leaves, [], segment_count=segment_count_for(leaves, len(self.devices)))


class FakeArena:
    """A mapped arena; `save` does what a hook does at a boundary."""

    def __init__(self, trainer: FakeTrainer, ready: frames.ArenaReady, layout: Layout) -> None:
        self.trainer, self.ready, self.layout = trainer, ready, layout
        fd = trainer.reader.take_fd()
        self.map = mmap.mmap(fd, ready.slot_size_bytes * ready.slot_count)
        os.close(fd)

    def close(self) -> None:
        """Unmap."""
        self.map.close()

    def content(self, seed: int) -> dict[str, bytes]:
        """Return random bytes for every leaf."""
        source = random.Random(seed)
        return {leaf.name: source.randbytes(leaf.size_bytes) for leaf in self.layout.leaves}

    def begin(self, checkpoint: CheckpointId, slot: int = 0) -> None:
        """Say that a copy begins."""
        self.trainer.send(
            frames.BeginSnapshot(
                arena=self.ready.arena, slot=slot, attempt=checkpoint.attempt, step=checkpoint.step
            )
        )

    def fill(self, seed: int, slot: int = 0, segment: int | None = None) -> None:
        """Copy random leaves to their places, in one segment or in all."""
        content = self.content(seed)
        for piece in self.layout.pieces:
            if segment not in (None, piece.segment):
                continue
            plan = self.layout.segments[piece.segment]
            begin = next(entry.begin for entry in plan.entries if entry.key == piece.key)
            place = self._base(slot) + plan.slot_offset_bytes + plan.header_size_bytes + begin
            part = content[piece.leaf][piece.offset_in_leaf_bytes :][: piece.size_bytes]
            self.map[place : place + len(part)] = part

    def seal(
        self,
        checkpoint: CheckpointId,
        slot: int = 0,
        *,
        rank: int = 0,
        world_size: int = 1,
        spoil: bool = False,
    ) -> None:
        """Write the draft and seal; `spoil` changes a byte after its digest was taken."""
        draft = encode_draft(self.draft(checkpoint, rank=rank, world_size=world_size))
        self.seal_draft(checkpoint, draft, slot, spoil=spoil)

    def seal_draft(
        self, checkpoint: CheckpointId, draft: bytes, slot: int = 0, *, spoil: bool = False
    ) -> None:
        """Seal with these bytes as the draft, whatever they say."""
        digest = self._put_draft(draft, slot)
        if spoil:
            self.map[self._base(slot) + self.layout.draft_offset_bytes + 10] ^= 1
        self.trainer.send(
            frames.Seal(
                arena=self.ready.arena,
                slot=slot,
                attempt=checkpoint.attempt,
                step=checkpoint.step,
                draft_offset_bytes=self.layout.draft_offset_bytes,
                draft_size_bytes=len(draft),
                draft_sha256=digest,
            )
        )

    def announce(
        self, checkpoint: CheckpointId, slot: int = 0, *, rank: int = 0, world_size: int = 1
    ) -> None:
        """Write the draft of what is still to be filled in, and say so."""
        draft = encode_draft(self.draft(checkpoint, rank=rank, world_size=world_size))
        digest = self._put_draft(draft, slot)
        self.trainer.send(
            frames.Announce(
                arena=self.ready.arena,
                slot=slot,
                attempt=checkpoint.attempt,
                step=checkpoint.step,
                draft_offset_bytes=self.layout.draft_offset_bytes,
                draft_size_bytes=len(draft),
                draft_sha256=digest,
            )
        )

    def copied(self, segment: int, slot: int = 0) -> None:
        """Say that a segment is whole."""
        self.trainer.send(frames.Copied(arena=self.ready.arena, slot=slot, segment=segment))

    def draft(self, checkpoint: CheckpointId, *, rank: int = 0, world_size: int = 1) -> Draft:
        """Return what describes a snapshot of the arena's layout."""
        return Draft(
            checkpoint=checkpoint,
            rank=rank,
            world_size=world_size,
            parent=None,
            layout_digest=self.layout.digest,
            leaves=self.layout.leaves,
            aliases=self.layout.aliases,
            pieces=self.layout.pieces,
            segments=self.layout.segments,
            values=b"{}",
            notes={},
        )

    def _put_draft(self, draft: bytes, slot: int) -> str:
        """Put a draft into its place; return its digest."""
        begin = self._base(slot) + self.layout.draft_offset_bytes
        self.map[begin : begin + len(draft)] = draft
        return hashlib.sha256(draft).hexdigest()

    def save(
        self, checkpoint: CheckpointId, seed: int, slot: int = 0, *, rank: int = 0, world_size: int = 1
    ) -> None:
        """Begin, fill and seal."""
        self.begin(checkpoint, slot)
        self.fill(seed, slot)
        self.seal(checkpoint, slot, rank=rank, world_size=world_size)

    def _base(self, slot: int) -> int:
        return slot * self.ready.slot_size_bytes

"""Another user of a node that tries any sequence of calls, once at what exists and once at what does not.

    python intruder.py SOCKET    # a program of its own, as root: it becomes OTHER_UID

Reads one JSON line for each sequence, `{"seed": n, "canaries": [...], "number": n}`, and answers with one: what it was
told for each of both, and which canaries stood in any of it.
"""

import json
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
from cached import HostileReader
from google.protobuf import message_factory

import everstep.daemon.control.service
from everstep.core.paths import control_socket_path
from everstep.proto import frames, share_frames
from everstep.proto import node_pb2 as pb
from everstep.proto.wire import pack

OTHER_UID = 65534
STEPS = 8
THEIRS, NOBODYS = "run-of-root", "run-of-nobo"
"""As long as each other, so that messages differ in nothing else. Each is a run, a tag, a pin, a cache, a group."""
NOBODYS_NUMBER = 1 << 20
CHECKPOINT = "1.1"
TIMEOUT_S = 30.0
UNASKED = ("IssueToken", "OpenWebSession", "WatchEvents")
"""They make something at each call, up to a bound; or have no end. `test_others_see_nothing.py` has them."""
METHODS = tuple(each for each in pb.DESCRIPTOR.services_by_name["Node"].methods if each.name not in UNASKED)

assert everstep.daemon.control.service  # imported now: later this user may read nothing
Said = list[str]


class Intruder:
    """One user's connections to a daemon."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(f"unix:{control_socket_path(socket_path)}", options=options)
        self._heard = b""

    def sequence(self, seed: int, name: str, number: int) -> Said:
        """Make the calls of a seed about this name; return what was said to each, without names and numbers."""
        chosen, said = random.Random(seed), Said()
        with HostileReader(self._path) as reader:
            assert isinstance(reader.hello, frames.Welcome)
            metadata = (("authorization", f"Bearer {reader.hello.token}"),)
            for _ in range(STEPS):
                if chosen.random() < 0.5:
                    answer = self._call(chosen, name, number, metadata)
                else:
                    answer = self._frame(chosen, name, reader)
                said.append(_plain(answer, name))
        return said

    def leaks(self, canaries: list[str]) -> list[str]:
        """Return which of these stood in anything heard since this was asked last."""
        heard, self._heard = self._heard, b""
        return [each for each in canaries if each.encode() in heard]

    def _call(self, chosen: random.Random, name: str, number: int, metadata: Any) -> str:
        method = chosen.choice(METHODS)
        request = _filled(method.input_type, chosen, name, number)
        reply = message_factory.GetMessageClass(method.output_type)
        kind = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        call: Any = kind(
            f"/everstep.node.v1.Node/{method.name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=lambda content: (content, reply.FromString(content)),
        )
        try:
            answers = call(request, timeout=TIMEOUT_S, metadata=metadata)
            for content, message in answers if method.server_streaming else [answers]:
                self._heard += content + str(message).encode()
        except grpc.RpcError as error:
            failed: Any = error
            hints = [value for key, value in failed.trailing_metadata() or () if key == "everstep-hint-bin"]
            self._heard += repr((failed.details(), failed.trailing_metadata())).encode()
            return f"{method.name} {failed.code().name} {failed.details()} {hints}"
        return f"{method.name} OK"  # of itself: what it may be told of others is looked for in all that was heard

    def _frame(self, chosen: random.Random, name: str, reader: HostileReader) -> str:
        frame = chosen.choice(FRAMES)(chosen, name, reader.number())
        asked = getattr(frame, "request_id", 0)
        reader.send(frame)
        until = asked or reader.number()
        if not asked:
            reader.send(frames.ListOffers(request_id=until))
        said = list[str]()
        while True:
            reply = reader.receive()
            self._heard += pack(reply)
            if getattr(reply, "re", None) == until:
                return f"{type(frame).__name__} {said} {_told(reply)}"
            if isinstance(reply, frames.Failure):
                said.append(_told(reply))


def _told(reply: frames.Reply) -> str:
    """Return what a reply says that may not differ: its kind, and why something is refused."""
    reason = msgspec.structs.asdict(reply) if isinstance(reply, frames.Failure) else ""
    return f"{type(reply).__name__} {reason}"


def _plain(text: str, name: str) -> str:
    return re.sub(r"[0-9a-f]{8,}|\d+", "N", text.replace(name, "NAME"))


def _filled(descriptor: Any, chosen: random.Random, name: str, number: int) -> Any:
    """Return a request about this name: now and then a field says nothing, or something else."""
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if chosen.random() < 0.1 or field.is_repeated or field.enum_type is not None:
            continue
        if field.message_type is not None:
            if not field.message_type.GetOptions().map_entry:
                getattr(message, field.name).CopyFrom(_filled(field.message_type, chosen, name, number))
        elif field.type == field.TYPE_STRING:
            setattr(message, field.name, CHECKPOINT if field.name == "checkpoint" else name)
        elif field.type == field.TYPE_BOOL:
            setattr(message, field.name, chosen.random() < 0.5)
        elif field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            setattr(message, field.name, chosen.choice((0.0, 1.0, -1.0, 1e300)))
        elif field.type != field.TYPE_BYTES:
            setattr(message, field.name, chosen.choice((0, number)))
    return message


def _cache(chosen: random.Random, name: str, number: int) -> frames.Request:
    content = chosen.choice(list(frames.CacheContent))
    return frames.OpenCache(
        request_id=number, fingerprint=name, content=content, sample_count=7, budget_bytes=1 << 20
    )


def _join(chosen: random.Random, name: str, number: int) -> frames.Request:
    key = share_frames.ShareKey(
        dataset=name, samples=8, order="o", seed=1, batch_size=2, drop_last=False, augment_seed=False
    )
    return share_frames.JoinShare(
        request_id=number, group=name, key=key, first_batch=[("a", "t", chosen.choice("de"))],
        first_batch_size_bytes=8, budget_bytes=1 << 20, lease_s=60, position=chosen.randrange(4),
    )  # fmt: skip


FRAMES: tuple[Callable[[random.Random, str, int], frames.Request], ...] = (
    _cache,
    _cache,
    _join,
    _join,
    lambda _, __, number: frames.StageCache(request_id=number, size_bytes=4096),
    lambda chosen, _, number: frames.FillCache(request_id=number, items=[(chosen.randrange(9), 0, 8, 0)]),
    lambda *_: frames.CacheUse(hit_count=1, hit_bytes=1, miss_count=1, miss_bytes=1, oversized_count=0),
    lambda _, __, number: share_frames.StageShare(request_id=number, size_bytes=4096),
    lambda chosen, *_: share_frames.OfferShare(count=chosen.randrange(4)),
    lambda chosen, *_: share_frames.FailShare(batch=chosen.randrange(4)),
    lambda chosen, *_: share_frames.TookShare(batch=chosen.randrange(4)),
    lambda _, __, number: share_frames.LocateShare(request_id=number),
    lambda chosen, _, number: share_frames.PublishShare(
        request_id=number, batch=chosen.randrange(4), offset_bytes=0, size_bytes=8, xxh3=0
    ),
    lambda *_: share_frames.LeaveShare(),
    lambda _, __, number: frames.BeginAttempt(request_id=number, attempt=2, fresh=False),
    lambda _, __, number: frames.Fetch(request_id=number, attempt=1, step=1, rank=0),
    lambda _, __, number: frames.GetManifest(request_id=number, attempt=1, step=1, rank=0),
    lambda *_: frames.Complete(attempt=1, step=1),
    lambda *_: frames.GiveUp(attempt=1, step=1),
    lambda *_: frames.SealedEverywhere(attempt=1, step=9),
    lambda *_: frames.Abandon(arena=1, slot=0, reason="x"),
    lambda _, __, number: frames.Detach(request_id=number),
    lambda _, __, number: frames.HandOver(request_id=number),
)


def main() -> int:
    """Answer sequences until the input ends."""
    intruder = Intruder(Path(sys.argv[1]))
    os.setgroups([])
    os.setresgid(OTHER_UID, OTHER_UID, OTHER_UID)
    os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
    for line in sys.stdin:
        asked = json.loads(line)
        told = [
            intruder.sequence(asked["seed"], name, number)
            for name, number in ((THEIRS, asked["number"]), (NOBODYS, NOBODYS_NUMBER))
        ]
        print(json.dumps({"told": told, "leaks": intruder.leaks(asked["canaries"])}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

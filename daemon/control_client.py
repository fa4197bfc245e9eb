"""A blocking client of a daemon: the token from the data socket, the questions by gRPC."""

import os
import select
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from ..checkpoint.fsck import FsckReport
from ..core.errors import DaemonUnavailableError, DeadlineError, EverstepError, UsageError, error_from_code
from ..core.ids import CheckpointId
from ..core.version import VERSION
from ..proto import frames, node_pb2_grpc
from ..proto import node_pb2 as pb
from ..proto.frames import FRAME_SIZE_BYTES_MAX, PROTOCOL, Role
from ..proto.wire import FrameError, FrameReader, decode_reply, pack
from .control_messages import (
    cache_from_message,
    detail_from_message,
    finding_from_message,
    id_to_text,
    status_from_message,
    summary_from_message,
    verdict_from_message,
)
from .device_messages import (
    device_from_message,
    devices_from_message,
    readmission_from_message,
    retirement_from_message,
)
from .device_views import DeviceDetail, ReadmitView, RetireView, StoreDevices
from .peer import identify
from .views import (
    CacheView,
    CheckpointDetail,
    CheckpointView,
    Removed,
    ScrubStarted,
    StatusView,
    Stopped,
    Verdict,
)

HELLO_DEADLINE_S = 5.0
CALL_DEADLINE_S = 30.0
DEVICE_DEADLINE_S = 120.0
"""For changes of devices: they wait for other changes and removals, or open the store again."""
LONG_DEADLINE_S = 3500.0
"""For calls that read or drain terabytes; the daemon allows an hour, and gRPC rounds deadlines up on the wire."""
ANSWER_BYTES_MAX = 64 * 1024 * 1024
END_DEADLINE_S = 30.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hold:
    """The data connection that keeps the token valid, and the daemon's life."""

    welcome: frames.Welcome
    pidfd: int


class ControlClient:
    """One connection to a daemon; a Source (views.py). Made by `connected`, used by one thread."""

    def __init__(self, stub: node_pb2_grpc.NodeStub, hold: _Hold, path: Path) -> None:
        self._stub, self._hold, self._path = stub, hold, path
        self._metadata = (("authorization", f"Bearer {hold.welcome.token}"),)

    @property
    def label(self) -> str:
        """What answers."""
        return f"the daemon on {self._path}"

    def status(self) -> StatusView:
        """Return what the daemon holds now."""
        return status_from_message(self._call(self._stub.GetStatus, pb.GetStatusRequest()))

    def drop_cache(self, number: int) -> CacheView:
        """Drop a cache and return it as it was.

        Raises:
            NotFoundError: there is none of this number, or it is another user's.
            RunBusyError: somebody reads it.
        """
        return cache_from_message(
            self._call(self._stub.DropCache, pb.DropCacheRequest(number=number)).dropped
        )

    def checkpoints(self, run: str) -> list[CheckpointView]:
        """See Source."""
        answer = self._call(self._stub.ListCheckpoints, pb.ListCheckpointsRequest(run=run))
        return [summary_from_message(each) for each in answer.checkpoints]

    def problems(self, run: str) -> tuple[str, ...]:
        """See Source; a daemon has put aside what was broken when it opened its stores, and `status` says so."""
        return ()

    def detail(self, run: str, checkpoint: CheckpointId | None, *, leaf_count_max: int) -> CheckpointDetail:
        """See Source."""
        request = pb.GetCheckpointRequest(selector=_selector(run, checkpoint), leaf_count_max=leaf_count_max)
        return detail_from_message(self._call(self._stub.GetCheckpoint, request))

    def verify(self, run: str, checkpoint: CheckpointId) -> Verdict:
        """See Source."""
        request = pb.VerifyCheckpointRequest(selector=_selector(run, checkpoint))
        return verdict_from_message(self._call(self._stub.VerifyCheckpoint, request, LONG_DEADLINE_S))

    def remove(self, run: str, checkpoint: CheckpointId, *, force: bool) -> Removed:
        """See Source."""
        request = pb.RemoveCheckpointRequest(selector=_selector(run, checkpoint), force=force)
        answer = self._call(self._stub.RemoveCheckpoint, request)
        return Removed(checkpoint_count=1, freed_bytes=answer.freed_bytes)

    def remove_run(self, run: str, *, force: bool) -> Removed:
        """See Source."""
        answer = self._call(self._stub.RemoveRun, pb.RemoveRunRequest(run=run, force=force), LONG_DEADLINE_S)
        return Removed(checkpoint_count=answer.removed_count, freed_bytes=answer.freed_bytes)

    def tag(self, run: str, checkpoint: CheckpointId | None, name: str) -> CheckpointView:
        """See Source."""
        request = pb.TagCheckpointRequest(selector=_selector(run, checkpoint), name=name)
        return summary_from_message(self._call(self._stub.TagCheckpoint, request).summary)

    def untag(self, run: str, name: str) -> CheckpointId:
        """See Source."""
        answer = self._call(self._stub.UntagCheckpoint, pb.UntagCheckpointRequest(run=run, name=name))
        return CheckpointId.parse(answer.checkpoint)

    def start_scrub(self, run: str, directories: Sequence[Path]) -> ScrubStarted:
        """Begin to read what a run (empty: any), in the stores of these directories (none: in all), has committed.

        Raises:
            NotFoundError: there is no such run or directory.
            RunBusyError: a scrub goes on.
        """
        request = pb.StartScrubRequest(run=run, directories=[str(path) for path in directories])
        answer = self._call(self._stub.StartScrub, request)
        return ScrubStarted(checkpoint_count=answer.checkpoint_count, size_bytes=answer.size_bytes)

    def inspect_stores(self) -> FsckReport:
        """Return what is not as it should be in the daemon's stores."""
        answer = self._call(self._stub.InspectStores, pb.InspectStoresRequest(), LONG_DEADLINE_S)
        return FsckReport(
            findings=tuple(finding_from_message(each) for each in answer.findings),
            is_repaired=False,
            run_count=answer.run_count,
            shard_count=answer.shard_count,
        )

    def devices(self) -> list[StoreDevices]:
        """See DeviceSource."""
        return devices_from_message(self._call(self._stub.ListDevices, pb.ListDevicesRequest()))

    def drain_device(self, device: str, *, cancel: bool) -> DeviceDetail:
        """See DeviceSource."""
        request = pb.DrainDeviceRequest(device=device, cancel=cancel)
        return device_from_message(self._call(self._stub.DrainDevice, request, DEVICE_DEADLINE_S).device)

    def retire_device(self, device: str, *, force: bool, dry_run: bool) -> RetireView:
        """See DeviceSource."""
        request = pb.RetireDeviceRequest(device=device, force=force, dry_run=dry_run)
        return retirement_from_message(self._call(self._stub.RetireDevice, request, DEVICE_DEADLINE_S))

    def readmit_device(self, directory: str) -> ReadmitView:
        """Take a device of a store back that is idle; RunBusyError while it is not."""
        request = pb.ReadmitDeviceRequest(directory=directory)
        return readmission_from_message(self._call(self._stub.ReadmitDevice, request, DEVICE_DEADLINE_S))

    def stop(self) -> Stopped:
        """Return when everything sealed is settled and the daemon's process has ended.

        Raises:
            DeadlineError: it drained, but its process still lives.
        """
        answer = self._call(self._stub.Shutdown, pb.ShutdownRequest(), LONG_DEADLINE_S)
        if not select.select([self._hold.pidfd], [], [], END_DEADLINE_S)[0]:
            raise DeadlineError(
                f"the daemon (pid {self._hold.welcome.pid}) has drained, but did not end within {END_DEADLINE_S:.0f} s",
                hint="look at its log",
            )
        return Stopped(
            persisted_count=answer.persisted_count,
            lost_count=answer.lost_count,
            attached_count=answer.attached_count,
        )

    def _call(self, method: Callable[..., _T], request: object, deadline_s: float = CALL_DEADLINE_S) -> _T:
        try:
            return method(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(cast(grpc.Call, cast(object, error)), deadline_s) from error

    def _error(self, call: grpc.Call, deadline_s: float) -> EverstepError:
        """Return the error that the daemon raised, or what gRPC's own status means here."""
        trailing: dict[str, Any] = dict(call.trailing_metadata() or ())
        message = call.details() or ""
        code = trailing.get("everstep-code")
        if code is not None:
            hint = trailing.get("everstep-hint-bin", b"")
            return error_from_code(str(code), message, bytes(hint).decode(errors="replace"))
        if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(f"{self.label} did not answer within {deadline_s:.0f} s")
        if call.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.CANCELLED,
        ):
            return DaemonUnavailableError(f"{self.label} ended during the call: {message}")
        return UsageError(f"{self.label} refused the call ({call.code().name}): {message}")


@contextmanager
def connected(path: Path, *, hint: str = "is EVERSTEP_SOCKET right?") -> Generator[ControlClient]:
    """Give a client of the daemon on the data socket `path`, for as long as the block runs.

    `hint` says what else can be done where none answers.

    Raises:
        DaemonUnavailableError: none answers there.
        VersionMismatchError: one of another protocol version does.
    """
    with _greeted(path, hint) as hold:
        options = [("grpc.max_receive_message_length", ANSWER_BYTES_MAX), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"unix:{hold.welcome.control_socket}", options=options) as channel:
            yield ControlClient(node_pb2_grpc.NodeStub(channel), hold, path)


@contextmanager
def _greeted(path: Path, hint: str) -> Generator[_Hold]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(HELLO_DEADLINE_S)
        try:
            sock.connect(str(path))
        except OSError as error:
            raise DaemonUnavailableError(
                f"no daemon answers on {path} ({error.strerror or error})", hint=hint
            ) from error
        pidfd = identify(sock).pidfd
        try:
            yield _Hold(welcome=_hello(sock, path), pidfd=pidfd)
        finally:
            os.close(pidfd)


def _hello(sock: socket.socket, path: Path) -> frames.Welcome:
    reader = FrameReader(size_bytes_max=FRAME_SIZE_BYTES_MAX)
    try:
        sock.sendall(pack(frames.Hello(protocol=PROTOCOL, version=VERSION, role=Role.CONTROL)))
        while (body := reader.next_body()) is None:
            if not reader.receive(sock):
                raise DaemonUnavailableError(f"the daemon on {path} closed the connection")
        answer = decode_reply(body)
    except (OSError, FrameError) as error:
        raise DaemonUnavailableError(f"the daemon on {path} does not answer: {error}") from error
    finally:
        reader.close()
    if isinstance(answer, frames.Failure):
        raise error_from_code(answer.code, answer.message, answer.hint)
    if not isinstance(answer, frames.Welcome):
        raise DaemonUnavailableError(f"the daemon on {path} answered Hello with {type(answer).__name__}")
    return answer


def _selector(run: str, checkpoint: CheckpointId | None) -> pb.Selector:
    return pb.Selector(run=run, checkpoint=id_to_text(checkpoint))

"""A blocking client of a daemon: the token from the data socket, the questions by gRPC."""

import select
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from ...checkpoint.fsck import FsckReport
from ...core.errors import (
    DaemonUnavailableError,
    DeadlineError,
    EverstepError,
    LimitError,
    NotFoundError,
    NotPermittedError,
    UsageError,
    VersionMismatchError,
)
from ...core.ids import CheckpointId
from ...proto import node_pb2 as pb
from ...proto import node_pb2_grpc
from ..access.views import (
    IssuedToken,
    TokenView,
    UserQuotas,
    issued_from_message,
    quotas_from_message,
    token_from_message,
)
from ..configuration.reloader import Reloaded
from ..controller.controller_views import ControllerView, ForcedView
from ..events.event_types import Event, EventQuery
from .config_messages import reload_from_message
from .controller_messages import controller_from_message, forced_from_message
from .device_messages import (
    device_from_message,
    devices_from_message,
    readmission_from_message,
    retirement_from_message,
)
from .device_views import DeviceDetail, ReadmitView, RetireView, StoreDevices
from .event_messages import event_from_message, query_to_message
from .link import Hold, open_client
from .messages import (
    cache_from_message,
    detail_from_message,
    finding_from_message,
    group_from_message,
    id_to_text,
    member_from_message,
    status_from_message,
    summary_from_message,
    verdict_from_message,
)
from .run_messages import run_detail_from_message, slot_from_message
from .run_views import RunDetail, SlotDetail
from .status_codes import error_of
from .views import (
    CacheView,
    CheckpointDetail,
    CheckpointView,
    Drained,
    Exporting,
    MemberView,
    Removed,
    ScrubStarted,
    ShareGroupView,
    StatusView,
    Stopped,
    Verdict,
)

CALL_DEADLINE_S = 30.0
DEVICE_DEADLINE_S = 120.0
"""For changes of devices: they wait for other changes and removals, or open the store again."""
FORCE_DEADLINE_S = 600.0
DRAIN_DEADLINE_S = 330.0
LONG_DEADLINE_S = 3500.0
"""For calls that read or drain terabytes; the daemon allows an hour, and gRPC rounds deadlines up on the wire."""
END_DEADLINE_S = 30.0
_T = TypeVar("_T")


class ControlClient:
    """One connection to a daemon; a Source (views.py). Made by `connected`, used by one thread."""

    def __init__(self, stub: node_pb2_grpc.NodeStub, hold: Hold, path: Path) -> None:
        self._stub, self._hold, self._path = stub, hold, path
        token = hold.welcome.token
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

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
        if not 0 <= number < 1 << 32:  # no message could carry it
            raise NotFoundError(f"there is no cache {number}", hint="`everstep cache list` shows them")
        return cache_from_message(
            self._call(self._stub.DropCache, pb.DropCacheRequest(number=number)).dropped
        )

    def checkpoints(self, run: str) -> list[CheckpointView]:
        """Return the checkpoints of a run (name or id; empty: of all runs), by run, the newest first."""
        answer = self._call(self._stub.ListCheckpoints, pb.ListCheckpointsRequest(run=run))
        return [summary_from_message(each) for each in answer.checkpoints]

    def problems(self, run: str) -> tuple[str, ...]:
        """Return nothing: a daemon has put aside what was broken when it opened its stores, and `status` says so."""
        return ()

    def detail(self, run: str, checkpoint: CheckpointId | None, *, leaf_count_max: int) -> CheckpointDetail:
        """Return one checkpoint with so many leaves; None: the newest complete one, else the newest intact one."""
        request = pb.GetCheckpointRequest(selector=_selector(run, checkpoint), leaf_count_max=leaf_count_max)
        return detail_from_message(self._call(self._stub.GetCheckpoint, request))

    def verify(self, run: str, checkpoint: CheckpointId) -> Verdict:
        """Return what every byte of a checkpoint is worth; the daemon reads all of it."""
        request = pb.VerifyCheckpointRequest(selector=_selector(run, checkpoint))
        return verdict_from_message(self._call(self._stub.VerifyCheckpoint, request, LONG_DEADLINE_S))

    def remove(self, run: str, checkpoint: CheckpointId, *, force: bool) -> Removed:
        """Remove one checkpoint; ProtectedError for one that must stay, unless forced."""
        request = pb.RemoveCheckpointRequest(selector=_selector(run, checkpoint), force=force)
        answer = self._call(self._stub.RemoveCheckpoint, request)
        return Removed(checkpoint_count=1, freed_bytes=answer.freed_bytes)

    def remove_run(self, run: str, *, force: bool) -> Removed:
        """Remove all checkpoints of a run; ProtectedError for tags without `force`, RunBusyError: its trainer lives."""
        answer = self._call(self._stub.RemoveRun, pb.RemoveRunRequest(run=run, force=force), LONG_DEADLINE_S)
        return Removed(checkpoint_count=answer.removed_count, freed_bytes=answer.freed_bytes)

    def tag(self, run: str, checkpoint: CheckpointId | None, name: str) -> CheckpointView:
        """Give a checkpoint a tag, so that it is not collected, and return it; None: the one that `detail` shows."""
        request = pb.TagCheckpointRequest(selector=_selector(run, checkpoint), name=name)
        return summary_from_message(self._call(self._stub.TagCheckpoint, request).summary)

    def untag(self, run: str, name: str) -> CheckpointId:
        """Take a tag away and return the checkpoint that had it."""
        answer = self._call(self._stub.UntagCheckpoint, pb.UntagCheckpointRequest(run=run, name=name))
        return CheckpointId.parse(answer.checkpoint)

    def pin(self, run: str, checkpoint: CheckpointId | None, label: str, *, ttl_s: float) -> CheckpointView:
        """Keep a checkpoint from being collected for so long (0: until it is unpinned); None: that of `detail`."""
        request = pb.PinCheckpointRequest(selector=_selector(run, checkpoint), label=label, ttl_s=ttl_s)
        return summary_from_message(self._call(self._stub.PinCheckpoint, request).summary)

    def unpin(self, run: str, label: str) -> CheckpointId:
        """Take a pin away and return the checkpoint that had it."""
        answer = self._call(self._stub.UnpinCheckpoint, pb.UnpinCheckpointRequest(run=run, label=label))
        return CheckpointId.parse(answer.checkpoint)

    @contextmanager
    def exporting(
        self, run: str, checkpoint: CheckpointId | None = None, *, deadline_s: float = LONG_DEADLINE_S
    ) -> Generator[Exporting]:
        """Give what is needed to read a checkpoint from its devices.

        It is not collected while the block runs, nor removed, for as long as `deadline_s`; pin what takes longer.

        Raises:
            NotFoundError: there is none.
            LimitError: too many exports go on.
        """
        request = pb.ExportCheckpointRequest(selector=_selector(run, checkpoint))
        call = self._stub.ExportCheckpoint(request, timeout=deadline_s, metadata=self._metadata)
        try:
            try:
                answer = next(iter(call))
            except grpc.RpcError as error:
                raise self._error(cast(grpc.Call, cast(object, error)), deadline_s) from error
            yield Exporting(
                summary=summary_from_message(answer.summary),
                directories=tuple(map(Path, answer.directories)),
                store_uid=answer.store_uid,
            )
        finally:
            cast(grpc.Call, cast(object, call)).cancel()

    def runs(self) -> list[RunDetail]:
        """Return the caller's runs by name: those that attached since the daemon started, and those only stored."""
        answer = self._call(self._stub.ListRuns, pb.ListRunsRequest())
        return [run_detail_from_message(each) for each in answer.runs]

    def run(self, run: str) -> RunDetail:
        """Return one run, by name or id; NotFoundError without it."""
        return run_detail_from_message(self._call(self._stub.GetRun, pb.GetRunRequest(run=run)).run)

    def slots(self, run: str = "") -> list[SlotDetail]:
        """Return the slots of the caller's ranks, or of one run, by name or id."""
        answer = self._call(self._stub.ListSlots, pb.ListSlotsRequest(run=run))
        return [slot_from_message(each) for each in answer.slots]

    def caches(self) -> list[CacheView]:
        """Return the caller's caches of samples, by number."""
        answer = self._call(self._stub.ListCaches, pb.ListCachesRequest())
        return [cache_from_message(each) for each in answer.caches]

    def members(self) -> list[MemberView]:
        """Return the nodes that share their caches with this one; none: it is alone."""
        answer = self._call(self._stub.ListMembers, pb.ListMembersRequest())
        return [member_from_message(each) for each in answer.members]

    def groups(self) -> list[ShareGroupView]:
        """Return the caller's groups of jobs that prepare each batch once between them."""
        answer = self._call(self._stub.ListGroups, pb.ListGroupsRequest())
        return [group_from_message(each) for each in answer.groups]

    def drain(self, *, cancel: bool = False, deadline_s: float = DRAIN_DEADLINE_S) -> Drained:
        """Let the node take no new runs, and return once what is sealed is persisted; `cancel`: take runs again."""
        answer = self._call(self._stub.Drain, pb.DrainRequest(cancel=cancel), deadline_s)
        return Drained(
            is_draining=answer.draining,
            unsettled_count=answer.unsettled_count,
            attached_count=answer.attached_count,
        )

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
        """Return the devices of every open store: members, missing and retired ones, with what lies on each."""
        return devices_from_message(self._call(self._stub.ListDevices, pb.ListDevicesRequest()))

    def drain_device(self, device: str, *, cancel: bool) -> DeviceDetail:
        """Let a device get no new segments, or end that. `device`: its id or the beginning of one, path, or name."""
        request = pb.DrainDeviceRequest(device=device, cancel=cancel)
        return device_from_message(self._call(self._stub.DrainDevice, request, DEVICE_DEADLINE_S).device)

    def retire_device(self, device: str, *, force: bool, dry_run: bool) -> RetireView:
        """Take a device out of its store for good; with `dry_run` only say what that would lose."""
        request = pb.RetireDeviceRequest(device=device, force=force, dry_run=dry_run)
        return retirement_from_message(self._call(self._stub.RetireDevice, request, DEVICE_DEADLINE_S))

    def readmit_device(self, directory: str) -> ReadmitView:
        """Take a device of a store back that is idle; RunBusyError while it is not."""
        request = pb.ReadmitDeviceRequest(directory=directory)
        return readmission_from_message(self._call(self._stub.ReadmitDevice, request, DEVICE_DEADLINE_S))

    # -- who may call (daemon/access)

    def issue_token(self, *, ttl_s: float, is_read_only: bool, name: str = "") -> IssuedToken:
        """Return a new token for another tool, valid for so many seconds.

        Raises:
            UsageError: this client is itself known by such a token or by a certificate.
            QuotaError: this user has as many as it may.
        """
        request = pb.IssueTokenRequest(ttl_s=ttl_s, read_only=is_read_only, name=name)
        return issued_from_message(self._call(self._stub.IssueToken, request))

    def tokens(self) -> list[TokenView]:
        """Return this user's tokens that are valid, without what makes them valid."""
        answer = self._call(self._stub.ListTokens, pb.ListTokensRequest())
        return [token_from_message(each) for each in answer.tokens]

    def revoke_token(self, token_id: str) -> None:
        """Make a token invalid; NotFoundError for one that is not this user's."""
        self._call(self._stub.RevokeToken, pb.RevokeTokenRequest(token_id=token_id))

    def quotas(self) -> list[UserQuotas]:
        """Return what this user (root: everybody) has taken of its quotas."""
        return quotas_from_message(self._call(self._stub.GetQuotas, pb.GetQuotasRequest()))

    def reload_config(self, *, dry_run: bool) -> Reloaded:
        """Let the daemon read its file again, or say what that would change, and what it runs with.

        Raises:
            ConfigError: the file is wrong, or changes what needs a restart; nothing has changed. Not for `dry_run`.
        """
        request = pb.ReloadConfigRequest(dry_run=dry_run)
        return reload_from_message(self._call(self._stub.ReloadConfig, request))

    def stop(self) -> Stopped:
        """Return when everything sealed is settled and the daemon's process has ended.

        Raises:
            DeadlineError: it drained, but its process still lives.
        """
        answer = self._call(self._stub.Shutdown, pb.ShutdownRequest(), LONG_DEADLINE_S)
        if self._hold.pidfd >= 0 and not select.select([self._hold.pidfd], [], [], END_DEADLINE_S)[0]:
            raise DeadlineError(
                f"the daemon (pid {self._hold.welcome.pid}) has drained, but did not end within {END_DEADLINE_S:.0f} s",
                hint="look at its log",
            )
        return Stopped(
            persisted_count=answer.persisted_count,
            lost_count=answer.lost_count,
            attached_count=answer.attached_count,
        )

    def controllers(self, run: str = "") -> list[ControllerView]:
        """Return how often the caller's runs (or one, by name or id) take checkpoints, and why.

        Raises:
            NotFoundError: no such run has attached since the daemon started.
        """
        answer = self._call(self._stub.GetController, pb.GetControllerRequest(run=run))
        return [controller_from_message(each) for each in answer.controllers]

    def set_budget(self, run: str, budget: float) -> ControllerView:
        """Let a run's controller keep to another budget, a share of training time, until the attempt ends.

        Raises:
            UsageError: it is no share, or the run's interval is fixed.
            NotFoundError: no trainer of the run is attached.
        """
        request = pb.SetBudgetRequest(run=run, budget=budget)
        return controller_from_message(self._call(self._stub.SetBudget, request).controller)

    def force_checkpoint(self, run: str, *, deadline_s: float = FORCE_DEADLINE_S) -> ForcedView:
        """Return a checkpoint of a boundary after this call once it is complete on all ranks.

        Raises:
            NotFoundError: no trainer of the run is attached.
            DeadlineError: it was not complete in time; it may still become so.
            EverstepError: it failed, and why.
        """
        request = pb.ForceCheckpointRequest(run=run)
        return forced_from_message(self._call(self._stub.ForceCheckpoint, request, deadline_s))

    def pause_checkpoints(self, run: str, ttl_s: float) -> ControllerView:
        """Let a run's controller take no checkpoint for so long; forced ones are taken."""
        request = pb.PauseCheckpointsRequest(run=run, ttl_s=ttl_s)
        return controller_from_message(self._call(self._stub.PauseCheckpoints, request).controller)

    def resume_checkpoints(self, run: str) -> ControllerView:
        """End a pause."""
        request = pb.ResumeCheckpointsRequest(run=run)
        return controller_from_message(self._call(self._stub.ResumeCheckpoints, request).controller)

    def events(self, query: EventQuery = EventQuery()) -> Generator[Event]:  # noqa: B008 - a frozen value
        """Yield what happened, in order; with `follow` until the daemon ends or the generator is closed.

        Raises:
            LimitError: too many follow events.
            DaemonUnavailableError: the daemon ended without saying so.
        """
        request = query_to_message(query)
        call = self._stub.WatchEvents(
            request, timeout=None if query.follow else CALL_DEADLINE_S, metadata=self._metadata
        )
        try:
            for message in call:
                event = event_from_message(message)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise self._error(cast(grpc.Call, cast(object, error)), CALL_DEADLINE_S) from error
        finally:
            cast(grpc.Call, cast(object, call)).cancel()

    def open_web_session(self) -> tuple[str, float]:
        """Return an address that logs a browser in as this user, once, and for how many seconds it can.

        Raises:
            ConfigError: the daemon serves no page.
        """
        answer = self._call(self._stub.OpenWebSession, pb.OpenWebSessionRequest())
        return answer.url, answer.valid_s

    def _call(self, method: Callable[..., _T], request: object, deadline_s: float = CALL_DEADLINE_S) -> _T:
        try:
            return method(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(cast(grpc.Call, cast(object, error)), deadline_s) from error

    def _error(self, call: grpc.Call, deadline_s: float) -> EverstepError:
        """Return the error that the daemon raised, or what gRPC's own status means here."""
        trailing: dict[str, Any] = dict(call.trailing_metadata() or ())
        message = call.details() or ""
        known = error_of(trailing, message)
        if known is not None:
            return known
        if call.code() is grpc.StatusCode.UNIMPLEMENTED:
            return VersionMismatchError(
                f"{self.label} (version {self._hold.welcome.version}) does not know this call",
                hint="restart it with this version of everstep",
            )
        if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return LimitError(
                f"{self.label} has no room for the call: {message}",
                hint="it answers a bounded number of calls at once, with requests of up to 1 MiB and answers of up to"
                " 16 MiB: try again, or ask for less",
            )
        if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(f"{self.label} did not answer within {deadline_s:.0f} s")
        if self._hold.pidfd < 0 and call.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.UNAUTHENTICATED,
        ):
            return DaemonUnavailableError(
                f"{self.label} does not answer this caller: {message}",
                hint="is the token still valid, or the certificate one that the daemon knows?",
            )
        if call.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.CANCELLED,
        ):
            return DaemonUnavailableError(f"{self.label} ended during the call: {message}")
        refused = f"{self.label} refused the call ({call.code().name}): {message}"
        if call.code() is grpc.StatusCode.PERMISSION_DENIED:
            return NotPermittedError(refused)
        return UsageError(refused)


NO_DAEMON = (
    "everstep.attach() in a job starts one, `everstep daemon --config FILE` that of a node;"
    " EVERSTEP_SOCKET names another socket"
)
"""What to do where nobody answers."""


@contextmanager
def connected(path: Path, *, hint: str = NO_DAEMON) -> Generator[ControlClient]:
    """Give a client of the daemon on the data socket `path`, for as long as the block runs.

    `hint` says what else can be done where none answers.

    Raises:
        DaemonUnavailableError: none answers there.
        VersionMismatchError: one of another protocol version does.
    """
    with ExitStack() as stack:
        stub, hold, known_as = open_client(stack, path, hint=hint)
        yield ControlClient(stub, hold, known_as)


def _selector(run: str, checkpoint: CheckpointId | None) -> pb.Selector:
    return pb.Selector(run=run, checkpoint=id_to_text(checkpoint))

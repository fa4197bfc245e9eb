"""How errors travel: which gRPC status a class of core/errors.py becomes (a test holds the table whole), and back."""

import contextlib
from collections.abc import Mapping

import grpc
from google.protobuf.message import DecodeError

from ...core import errors
from ...proto import node_pb2 as pb

STATUS_CODES: dict[type[errors.EverstepError], grpc.StatusCode] = {
    errors.EverstepError: grpc.StatusCode.UNKNOWN,
    errors.UsageError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StateTypeError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StateMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LoaderStateError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RunBusyError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.FencedError: grpc.StatusCode.ABORTED,
    errors.ProtectedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotPermittedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.NodeError: grpc.StatusCode.UNAVAILABLE,
    errors.DaemonUnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.VersionMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.MemoryRefusedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.MemoryBusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.LimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QuotaError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.WorkerError: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerTimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RanksLostError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StorageError: grpc.StatusCode.UNAVAILABLE,
    errors.NoSpaceError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeviceMissingError: grpc.StatusCode.UNAVAILABLE,
    errors.EngineLostError: grpc.StatusCode.UNAVAILABLE,
    errors.DeviceLockedError: grpc.StatusCode.UNAVAILABLE,
    errors.DataError: grpc.StatusCode.DATA_LOSS,
    errors.CorruptDataError: grpc.StatusCode.DATA_LOSS,
    errors.IncompleteError: grpc.StatusCode.DATA_LOSS,
    errors.SourceChangedError: grpc.StatusCode.DATA_LOSS,
    errors.FormatVersionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}


MESSAGE_CHARS_MAX, HINT_CHARS_MAX = 2000, 500
"""Errors travel in trailing metadata, which is bounded."""
CODE_KEY, HINT_KEY, ERROR_KEY = "everstep-code", "everstep-hint-bin", "everstep-error-bin"


def trailing_metadata(error: errors.EverstepError) -> tuple[tuple[str, str | bytes], ...]:
    """Return what a refused call carries: the error's class, and what to do; see ErrorInfo in node.proto."""
    hint = error.hint[:HINT_CHARS_MAX]
    info = pb.ErrorInfo(
        code=error.code,
        message=error.message[:MESSAGE_CHARS_MAX],
        hint=hint,
        retryable=error.retryable,
    )
    return (CODE_KEY, error.code), (HINT_KEY, hint.encode()), (ERROR_KEY, info.SerializeToString())


def error_of(metadata: Mapping[str, str | bytes], message: str) -> errors.EverstepError | None:
    """Return the error that a daemon raised, of a call's trailing metadata; None: it was gRPC's own."""
    info = pb.ErrorInfo()
    given = metadata.get(ERROR_KEY)
    if isinstance(given, bytes):
        with contextlib.suppress(DecodeError):
            info.ParseFromString(given)
    if info.code:
        return errors.error_from_code(info.code, info.message or message, info.hint)
    code = metadata.get(CODE_KEY)  # a daemon from before ErrorInfo
    if code is None:
        return None
    hint = metadata.get(HINT_KEY, b"")
    text = hint.decode(errors="replace") if isinstance(hint, bytes) else hint
    return errors.error_from_code(str(code), message, text)


def status_code(error: errors.EverstepError) -> grpc.StatusCode:
    """Return the status that tells a client of another language what to do about `error`."""
    return next(STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)

"""One table: which gRPC status a class of core/errors.py becomes. A test holds it complete."""

import grpc

from ..core import errors

STATUS_CODES: dict[type[errors.EverstepError], grpc.StatusCode] = {
    errors.EverstepError: grpc.StatusCode.UNKNOWN,
    errors.UsageError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StateTypeError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StateMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LoaderStateError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RunBusyError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.FencedError: grpc.StatusCode.ABORTED,
    errors.ProtectedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.NodeError: grpc.StatusCode.UNAVAILABLE,
    errors.DaemonUnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.VersionMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.MemoryRefusedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.WorkerError: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerTimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RanksLostError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StorageError: grpc.StatusCode.UNAVAILABLE,
    errors.NoSpaceError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeviceMissingError: grpc.StatusCode.UNAVAILABLE,
    errors.DeviceLockedError: grpc.StatusCode.UNAVAILABLE,
    errors.DataError: grpc.StatusCode.DATA_LOSS,
    errors.CorruptDataError: grpc.StatusCode.DATA_LOSS,
    errors.IncompleteError: grpc.StatusCode.DATA_LOSS,
    errors.SourceChangedError: grpc.StatusCode.DATA_LOSS,
    errors.FormatVersionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}


def status_code(error: errors.EverstepError) -> grpc.StatusCode:
    """Return the status that tells a client of another language what to do about `error`."""
    return next(STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)

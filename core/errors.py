"""Every error that everstep raises on purpose.

EverstepError
├── UsageError                 the caller broke a documented rule                     do not retry
│   ├── StateTypeError         an object in the state cannot be checkpointed          change the object
│   ├── StateMismatchError     a checkpoint does not fit the given objects            give matching objects
│   ├── LoaderStateError       a loader state does not fit the loader                 give the right dataset
│   ├── RunBusyError           the run's trainer still lives                          wait or take it over
│   ├── FencedError            a newer attempt of the run has started                 stop this process
│   ├── ProtectedError         a checkpoint that must stay was to be removed          keep it, or force
│   ├── NotPermittedError      the caller is known and may not do this                ask who may
│   ├── ConfigError            a configuration value is not allowed                   correct the file
│   └── NotFoundError          no such run, checkpoint or device (or not yours)       check the name
├── NodeError                  the machine cannot do it now                           retry by policy
│   ├── DaemonUnavailableError no daemon answers, or it went away                     start or reconnect
│   ├── VersionMismatchError   daemon and client speak different protocols            use one version
│   ├── MemoryRefusedError     the arena would not fit in memory                      free or lower
│   │   └── MemoryBusyError    what it waits for is being written, or its memory freed ask again soon
│   ├── LimitError             as many calls, connections or bytes as are allowed     end some, or raise the limit
│   │   └── QuotaError         one user's share of a daemon is taken                  ask less often, or for less
│   ├── DeadlineError          something took longer than its deadline                look at the cause
│   │   └── WorkerTimeoutError a loader's batch took longer than its timeout          look at the sample it names
│   ├── WorkerError            a loader's workers die as often as they are replaced   look at the dataset
│   ├── RanksLostError         the ranks of a run cannot reach each other any more    restart the job
│   └── StorageError           a device or its file system failed                     use another device
│       ├── NoSpaceError       free space is below what is needed                     free or add a device
│       ├── DeviceMissingError a known device is not where it was                     mount it
│       ├── EngineLostError    the process that writes for a device has ended         look at the kernel log
│       └── DeviceLockedError  another daemon holds the device                        use that daemon
├── DataError                  stored bytes are not what was committed                never retry
│   ├── CorruptDataError       a checksum, length or structure does not hold          use an older one
│   ├── IncompleteError        a shard or segment of the checkpoint is missing        use an older one
│   ├── SourceChangedError     a dataset's files are not those that were indexed      put them back, or index anew
│   └── FormatVersionError     written by a newer format version                      upgrade everstep
└── InternalError              an exception that nobody expected: a bug of everstep   report it

Each class says by `retryable` whether the same call may succeed later; each instance carries a `hint`, the
sentence that says what to do. `code` names the class on the data socket.
"""

from typing import ClassVar


class EverstepError(Exception):
    """Root: `except EverstepError` catches everything that everstep raises on purpose."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint

    @property
    def code(self) -> str:
        """Name of the class: what travels in frames and in typed gRPC details."""
        return type(self).__name__


class UsageError(EverstepError):
    """The caller broke a documented rule."""


class StateTypeError(UsageError):
    """An object in the state is of a kind that cannot be written without pickle; the message names its path."""


class StateMismatchError(UsageError):
    """A checkpoint does not fit the objects it should be restored into."""


class LoaderStateError(UsageError):
    """A loader state belongs to another dataset, or came after iteration began."""


class RunBusyError(UsageError):
    """The trainer of this run and rank still lives."""


class FencedError(UsageError):
    """A newer attempt of the run has started; this one can start nothing new."""


class ProtectedError(UsageError):
    """It stays: it has a tag, or a restart may need it (the newest complete one, the one before it, anything newer)."""


class NotPermittedError(UsageError):
    """The daemon knows the caller, who may not do this: another role or another user may."""


class ConfigError(UsageError):
    """A configuration key or value is not allowed."""


class NotFoundError(UsageError):
    """No such run, checkpoint or device, or it belongs to somebody else: the answer is the same."""


class NodeError(EverstepError):
    """The machine cannot do it now."""

    retryable: ClassVar[bool] = True


class DaemonUnavailableError(NodeError):
    """No daemon answers on the socket, or the connection was lost."""


class VersionMismatchError(NodeError):
    """Daemon and client speak different protocol versions."""

    retryable: ClassVar[bool] = False


class MemoryRefusedError(NodeError):
    """Admission refused an arena: it would not fit beside what the node already holds."""


class MemoryBusyError(MemoryRefusedError):
    """There may be room in a moment: what takes it is being written, or its memory is being freed."""


class LimitError(NodeError):
    """A bound on calls, followers, exports, bytes or the like is reached; the hint names it."""


class QuotaError(LimitError):
    """It is one user's share that is taken, of connections, calls or tokens: others go on."""


class DeadlineError(NodeError):
    """A wait reached its deadline."""


class WorkerError(NodeError, RuntimeError):
    """Workers of a loader cannot start, or die as often as they are replaced; a RuntimeError, as torch's is."""


class WorkerTimeoutError(DeadlineError, RuntimeError):
    """A batch took longer than the loader's `timeout`; a RuntimeError, as torch's is."""


class RanksLostError(NodeError):
    """The ranks of a run cannot agree any more: their Store is gone, or rank 0 says nothing."""

    retryable: ClassVar[bool] = False


class StorageError(NodeError):
    """A device or its file system failed."""


class NoSpaceError(StorageError):
    """Free space, less what is reserved, is below what is needed; nothing was written."""


class DeviceMissingError(StorageError):
    """A known device is not where it was; it is never initialised again."""


class EngineLostError(StorageError):
    """The process that does an engine's work has ended; the device may be well, and the engine is of no use any more.

    Nothing touches file and arena any more.
    """


class DeviceLockedError(StorageError):
    """Another daemon holds the device's lock."""


class DataError(EverstepError):
    """Stored bytes are not what was committed."""


class CorruptDataError(DataError):
    """A checksum, length or structure does not hold; the message names file and block."""


class IncompleteError(DataError):
    """A shard or a segment of the checkpoint is missing."""


class SourceChangedError(DataError):
    """A file of a dataset is gone, shorter, longer or another one since it was indexed; names file and sample."""


class FormatVersionError(DataError):
    """The store was written by a newer format version."""


class InternalError(EverstepError):
    """The daemon met an exception that nobody expected; its log has the traceback. A bug of everstep."""


def _classes(root: type[EverstepError]) -> dict[str, type[EverstepError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _classes(child)
    return found


_BY_CODE = _classes(EverstepError)
ERROR_CODES = tuple(sorted(_BY_CODE))
"""All that `code` can be: what counts errors begins each at 0, else nobody sees the first."""


def error_from_code(code: str, message: str, hint: str) -> EverstepError:
    """Return the error that the other side raised; an unknown code (a newer peer) becomes EverstepError."""
    return _BY_CODE.get(code, EverstepError)(message, hint=hint)

from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DaemonKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DAEMON_KIND_UNSPECIFIED: _ClassVar[DaemonKind]
    DAEMON_KIND_PRIVATE: _ClassVar[DaemonKind]
    DAEMON_KIND_NODE: _ClassVar[DaemonKind]

class RankState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_STATE_UNSPECIFIED: _ClassVar[RankState]
    RANK_STATE_ATTACHED: _ClassVar[RankState]
    RANK_STATE_LINGERING: _ClassVar[RankState]
    RANK_STATE_CLOSED: _ClassVar[RankState]

class SlotState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOT_STATE_UNSPECIFIED: _ClassVar[SlotState]
    SLOT_STATE_FREE: _ClassVar[SlotState]
    SLOT_STATE_COPYING: _ClassVar[SlotState]
    SLOT_STATE_SEALED: _ClassVar[SlotState]
    SLOT_STATE_PERSISTING: _ClassVar[SlotState]
    SLOT_STATE_KEPT: _ClassVar[SlotState]
    SLOT_STATE_LOST: _ClassVar[SlotState]
    SLOT_STATE_STREAMING: _ClassVar[SlotState]
    SLOT_STATE_ABANDONED: _ClassVar[SlotState]

class DeviceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEVICE_STATE_UNSPECIFIED: _ClassVar[DeviceState]
    DEVICE_STATE_OK: _ClassVar[DeviceState]
    DEVICE_STATE_SUSPECT: _ClassVar[DeviceState]
    DEVICE_STATE_MISSING: _ClassVar[DeviceState]
    DEVICE_STATE_DRAINING: _ClassVar[DeviceState]
    DEVICE_STATE_RETIRED: _ClassVar[DeviceState]
    DEVICE_STATE_SLOW: _ClassVar[DeviceState]

class CheckpointState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKPOINT_STATE_UNSPECIFIED: _ClassVar[CheckpointState]
    CHECKPOINT_STATE_COMPLETE: _ClassVar[CheckpointState]
    CHECKPOINT_STATE_LOCAL: _ClassVar[CheckpointState]
    CHECKPOINT_STATE_DAMAGED: _ClassVar[CheckpointState]

class Severity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEVERITY_UNSPECIFIED: _ClassVar[Severity]
    SEVERITY_NOTE: _ClassVar[Severity]
    SEVERITY_REPAIRABLE: _ClassVar[Severity]
    SEVERITY_LOST: _ClassVar[Severity]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_MISSED: _ClassVar[EventKind]
    EVENT_KIND_RUN_ATTACHED: _ClassVar[EventKind]
    EVENT_KIND_RUN_ENDED: _ClassVar[EventKind]
    EVENT_KIND_RANK_LOST: _ClassVar[EventKind]
    EVENT_KIND_SNAPSHOT_SEALED: _ClassVar[EventKind]
    EVENT_KIND_SHARD_COMMITTED: _ClassVar[EventKind]
    EVENT_KIND_SHARD_FAILED: _ClassVar[EventKind]
    EVENT_KIND_CHECKPOINT_COMPLETE: _ClassVar[EventKind]
    EVENT_KIND_CHECKPOINT_SKIPPED: _ClassVar[EventKind]
    EVENT_KIND_CHECKPOINT_REMOVED: _ClassVar[EventKind]
    EVENT_KIND_RESTORED: _ClassVar[EventKind]
    EVENT_KIND_INTERVAL_CHANGED: _ClassVar[EventKind]
    EVENT_KIND_CONTROLLER_CHANGED: _ClassVar[EventKind]
    EVENT_KIND_DEVICE_CHANGED: _ClassVar[EventKind]
    EVENT_KIND_SCRUB_ENDED: _ClassVar[EventKind]
    EVENT_KIND_DAMAGE_FOUND: _ClassVar[EventKind]
    EVENT_KIND_CACHE_MADE: _ClassVar[EventKind]
    EVENT_KIND_CACHE_DROPPED: _ClassVar[EventKind]
    EVENT_KIND_GROUP_JOINED: _ClassVar[EventKind]
    EVENT_KIND_GROUP_LEFT: _ClassVar[EventKind]
    EVENT_KIND_CONFIG_RELOADED: _ClassVar[EventKind]
    EVENT_KIND_DRAINING: _ClassVar[EventKind]
    EVENT_KIND_DRAINED: _ClassVar[EventKind]
    EVENT_KIND_CHECKPOINT_GIVEN_UP: _ClassVar[EventKind]
    EVENT_KIND_RANK_LEFT: _ClassVar[EventKind]

class ControllerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTROLLER_STATE_UNSPECIFIED: _ClassVar[ControllerState]
    CONTROLLER_STATE_UNKNOWN: _ClassVar[ControllerState]
    CONTROLLER_STATE_ADAPTIVE: _ClassVar[ControllerState]
    CONTROLLER_STATE_FIXED: _ClassVar[ControllerState]
    CONTROLLER_STATE_PAUSED: _ClassVar[ControllerState]

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_ATTACHED: _ClassVar[RunState]
    RUN_STATE_LINGERING: _ClassVar[RunState]
    RUN_STATE_CLOSED: _ClassVar[RunState]
    RUN_STATE_STORED: _ClassVar[RunState]
DAEMON_KIND_UNSPECIFIED: DaemonKind
DAEMON_KIND_PRIVATE: DaemonKind
DAEMON_KIND_NODE: DaemonKind
RANK_STATE_UNSPECIFIED: RankState
RANK_STATE_ATTACHED: RankState
RANK_STATE_LINGERING: RankState
RANK_STATE_CLOSED: RankState
SLOT_STATE_UNSPECIFIED: SlotState
SLOT_STATE_FREE: SlotState
SLOT_STATE_COPYING: SlotState
SLOT_STATE_SEALED: SlotState
SLOT_STATE_PERSISTING: SlotState
SLOT_STATE_KEPT: SlotState
SLOT_STATE_LOST: SlotState
SLOT_STATE_STREAMING: SlotState
SLOT_STATE_ABANDONED: SlotState
DEVICE_STATE_UNSPECIFIED: DeviceState
DEVICE_STATE_OK: DeviceState
DEVICE_STATE_SUSPECT: DeviceState
DEVICE_STATE_MISSING: DeviceState
DEVICE_STATE_DRAINING: DeviceState
DEVICE_STATE_RETIRED: DeviceState
DEVICE_STATE_SLOW: DeviceState
CHECKPOINT_STATE_UNSPECIFIED: CheckpointState
CHECKPOINT_STATE_COMPLETE: CheckpointState
CHECKPOINT_STATE_LOCAL: CheckpointState
CHECKPOINT_STATE_DAMAGED: CheckpointState
SEVERITY_UNSPECIFIED: Severity
SEVERITY_NOTE: Severity
SEVERITY_REPAIRABLE: Severity
SEVERITY_LOST: Severity
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_MISSED: EventKind
EVENT_KIND_RUN_ATTACHED: EventKind
EVENT_KIND_RUN_ENDED: EventKind
EVENT_KIND_RANK_LOST: EventKind
EVENT_KIND_SNAPSHOT_SEALED: EventKind
EVENT_KIND_SHARD_COMMITTED: EventKind
EVENT_KIND_SHARD_FAILED: EventKind
EVENT_KIND_CHECKPOINT_COMPLETE: EventKind
EVENT_KIND_CHECKPOINT_SKIPPED: EventKind
EVENT_KIND_CHECKPOINT_REMOVED: EventKind
EVENT_KIND_RESTORED: EventKind
EVENT_KIND_INTERVAL_CHANGED: EventKind
EVENT_KIND_CONTROLLER_CHANGED: EventKind
EVENT_KIND_DEVICE_CHANGED: EventKind
EVENT_KIND_SCRUB_ENDED: EventKind
EVENT_KIND_DAMAGE_FOUND: EventKind
EVENT_KIND_CACHE_MADE: EventKind
EVENT_KIND_CACHE_DROPPED: EventKind
EVENT_KIND_GROUP_JOINED: EventKind
EVENT_KIND_GROUP_LEFT: EventKind
EVENT_KIND_CONFIG_RELOADED: EventKind
EVENT_KIND_DRAINING: EventKind
EVENT_KIND_DRAINED: EventKind
EVENT_KIND_CHECKPOINT_GIVEN_UP: EventKind
EVENT_KIND_RANK_LEFT: EventKind
CONTROLLER_STATE_UNSPECIFIED: ControllerState
CONTROLLER_STATE_UNKNOWN: ControllerState
CONTROLLER_STATE_ADAPTIVE: ControllerState
CONTROLLER_STATE_FIXED: ControllerState
CONTROLLER_STATE_PAUSED: ControllerState
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_ATTACHED: RunState
RUN_STATE_LINGERING: RunState
RUN_STATE_CLOSED: RunState
RUN_STATE_STORED: RunState

class ReloadConfigRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: _Optional[bool] = ...) -> None: ...

class ReloadConfigResponse(_message.Message):
    __slots__ = ("file", "changes", "problem", "hint", "values")
    FILE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    file: str
    changes: _containers.RepeatedCompositeFieldContainer[ConfigChange]
    problem: str
    hint: str
    values: _containers.RepeatedCompositeFieldContainer[ConfigValue]
    def __init__(self, file: _Optional[str] = ..., changes: _Optional[_Iterable[_Union[ConfigChange, _Mapping]]] = ..., problem: _Optional[str] = ..., hint: _Optional[str] = ..., values: _Optional[_Iterable[_Union[ConfigValue, _Mapping]]] = ...) -> None: ...

class ConfigValue(_message.Message):
    __slots__ = ("path", "value", "origin")
    PATH_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    path: _containers.RepeatedScalarFieldContainer[str]
    value: str
    origin: str
    def __init__(self, path: _Optional[_Iterable[str]] = ..., value: _Optional[str] = ..., origin: _Optional[str] = ...) -> None: ...

class ConfigChange(_message.Message):
    __slots__ = ("key", "before", "after", "takes_effect")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    TAKES_EFFECT_FIELD_NUMBER: _ClassVar[int]
    key: str
    before: str
    after: str
    takes_effect: str
    def __init__(self, key: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., takes_effect: _Optional[str] = ...) -> None: ...

class ErrorInfo(_message.Message):
    __slots__ = ("code", "message", "hint", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    hint: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., hint: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class Selector(_message.Message):
    __slots__ = ("run", "checkpoint")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    run: str
    checkpoint: str
    def __init__(self, run: _Optional[str] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("daemon", "runs", "stores", "caches", "groups", "members")
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    daemon: DaemonInfo
    runs: _containers.RepeatedCompositeFieldContainer[RunStatus]
    stores: _containers.RepeatedCompositeFieldContainer[StoreStatus]
    caches: _containers.RepeatedCompositeFieldContainer[CacheStatus]
    groups: _containers.RepeatedCompositeFieldContainer[ShareGroupStatus]
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    def __init__(self, daemon: _Optional[_Union[DaemonInfo, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[RunStatus, _Mapping]]] = ..., stores: _Optional[_Iterable[_Union[StoreStatus, _Mapping]]] = ..., caches: _Optional[_Iterable[_Union[CacheStatus, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[ShareGroupStatus, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ...) -> None: ...

class ShareGroupStatus(_message.Message):
    __slots__ = ("name", "owner_uid", "job_count", "outside_count", "window_start", "window_stop", "ready_count", "leased_count", "prepared_count", "served_count", "private_count", "used_bytes", "budget_bytes", "slowest_pid", "slowest_behind", "quarantined")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    JOB_COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_START_FIELD_NUMBER: _ClassVar[int]
    WINDOW_STOP_FIELD_NUMBER: _ClassVar[int]
    READY_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASED_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREPARED_COUNT_FIELD_NUMBER: _ClassVar[int]
    SERVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_PID_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_BEHIND_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner_uid: int
    job_count: int
    outside_count: int
    window_start: int
    window_stop: int
    ready_count: int
    leased_count: int
    prepared_count: int
    served_count: int
    private_count: int
    used_bytes: int
    budget_bytes: int
    slowest_pid: int
    slowest_behind: int
    quarantined: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., owner_uid: _Optional[int] = ..., job_count: _Optional[int] = ..., outside_count: _Optional[int] = ..., window_start: _Optional[int] = ..., window_stop: _Optional[int] = ..., ready_count: _Optional[int] = ..., leased_count: _Optional[int] = ..., prepared_count: _Optional[int] = ..., served_count: _Optional[int] = ..., private_count: _Optional[int] = ..., used_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., slowest_pid: _Optional[int] = ..., slowest_behind: _Optional[int] = ..., quarantined: _Optional[_Iterable[int]] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("address", "is_me", "is_asked", "problem", "fetched_count", "offered_count")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_ME_FIELD_NUMBER: _ClassVar[int]
    IS_ASKED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    FETCHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    OFFERED_COUNT_FIELD_NUMBER: _ClassVar[int]
    address: str
    is_me: bool
    is_asked: bool
    problem: str
    fetched_count: int
    offered_count: int
    def __init__(self, address: _Optional[str] = ..., is_me: _Optional[bool] = ..., is_asked: _Optional[bool] = ..., problem: _Optional[str] = ..., fetched_count: _Optional[int] = ..., offered_count: _Optional[int] = ...) -> None: ...

class CacheStatus(_message.Message):
    __slots__ = ("number", "owner_uid", "fingerprint", "content", "sample_count", "published_count", "used_bytes", "allocated_bytes", "budget_bytes", "client_count", "idle_s", "reason", "hit_count", "miss_count")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISS_COUNT_FIELD_NUMBER: _ClassVar[int]
    number: int
    owner_uid: int
    fingerprint: str
    content: str
    sample_count: int
    published_count: int
    used_bytes: int
    allocated_bytes: int
    budget_bytes: int
    client_count: int
    idle_s: float
    reason: str
    hit_count: int
    miss_count: int
    def __init__(self, number: _Optional[int] = ..., owner_uid: _Optional[int] = ..., fingerprint: _Optional[str] = ..., content: _Optional[str] = ..., sample_count: _Optional[int] = ..., published_count: _Optional[int] = ..., used_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., client_count: _Optional[int] = ..., idle_s: _Optional[float] = ..., reason: _Optional[str] = ..., hit_count: _Optional[int] = ..., miss_count: _Optional[int] = ...) -> None: ...

class DaemonInfo(_message.Message):
    __slots__ = ("version", "pid", "kind", "uptime_s", "socket", "uid", "arena_bytes", "metrics_port", "draining", "persisted_count", "failed_count", "metrics_url")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PERSISTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILED_COUNT_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    version: str
    pid: int
    kind: DaemonKind
    uptime_s: float
    socket: str
    uid: int
    arena_bytes: int
    metrics_port: int
    draining: bool
    persisted_count: int
    failed_count: int
    metrics_url: str
    def __init__(self, version: _Optional[str] = ..., pid: _Optional[int] = ..., kind: _Optional[_Union[DaemonKind, str]] = ..., uptime_s: _Optional[float] = ..., socket: _Optional[str] = ..., uid: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., metrics_port: _Optional[int] = ..., draining: _Optional[bool] = ..., persisted_count: _Optional[int] = ..., failed_count: _Optional[int] = ..., metrics_url: _Optional[str] = ...) -> None: ...

class SlotStatus(_message.Message):
    __slots__ = ("state", "checkpoint")
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    state: SlotState
    checkpoint: str
    def __init__(self, state: _Optional[_Union[SlotState, str]] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "state", "step", "slots", "arena_bytes", "pid", "left")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    state: RankState
    step: int
    slots: _containers.RepeatedCompositeFieldContainer[SlotStatus]
    arena_bytes: int
    pid: int
    left: str
    def __init__(self, rank: _Optional[int] = ..., state: _Optional[_Union[RankState, str]] = ..., step: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[SlotStatus, _Mapping]]] = ..., arena_bytes: _Optional[int] = ..., pid: _Optional[int] = ..., left: _Optional[str] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("name", "run_id", "owner_uid", "attempt", "world_size", "ranks", "complete_floor", "retention", "pace", "newest_checkpoint", "newest_unix_s", "newest_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FLOOR_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NEWEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    run_id: str
    owner_uid: int
    attempt: int
    world_size: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    complete_floor: str
    retention: Retention
    pace: Pace
    newest_checkpoint: str
    newest_unix_s: float
    newest_bytes: int
    def __init__(self, name: _Optional[str] = ..., run_id: _Optional[str] = ..., owner_uid: _Optional[int] = ..., attempt: _Optional[int] = ..., world_size: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., complete_floor: _Optional[str] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., newest_checkpoint: _Optional[str] = ..., newest_unix_s: _Optional[float] = ..., newest_bytes: _Optional[int] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("interval_steps", "reason", "goal_missed", "cost_share", "skipped_count", "steps", "train_s", "stall_s", "data_s", "budget", "paused_until_unix_s")
    INTERVAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GOAL_MISSED_FIELD_NUMBER: _ClassVar[int]
    COST_SHARE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_S_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    DATA_S_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    PAUSED_UNTIL_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    interval_steps: int
    reason: str
    goal_missed: str
    cost_share: float
    skipped_count: int
    steps: int
    train_s: float
    stall_s: float
    data_s: float
    budget: float
    paused_until_unix_s: float
    def __init__(self, interval_steps: _Optional[int] = ..., reason: _Optional[str] = ..., goal_missed: _Optional[str] = ..., cost_share: _Optional[float] = ..., skipped_count: _Optional[int] = ..., steps: _Optional[int] = ..., train_s: _Optional[float] = ..., stall_s: _Optional[float] = ..., data_s: _Optional[float] = ..., budget: _Optional[float] = ..., paused_until_unix_s: _Optional[float] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("last", "every_steps", "every", "own")
    LAST_FIELD_NUMBER: _ClassVar[int]
    EVERY_STEPS_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    last: int
    every_steps: int
    every: str
    own: bool
    def __init__(self, last: _Optional[int] = ..., every_steps: _Optional[int] = ..., every: _Optional[str] = ..., own: _Optional[bool] = ...) -> None: ...

class DeviceStatus(_message.Message):
    __slots__ = ("device_id", "path", "free_bytes", "total_bytes", "engine", "direct", "state", "reason", "engine_reason", "write_bytes_per_second", "pool_bytes", "name", "queued_bytes")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENGINE_REASON_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    device_id: str
    path: str
    free_bytes: int
    total_bytes: int
    engine: str
    direct: bool
    state: DeviceState
    reason: str
    engine_reason: str
    write_bytes_per_second: int
    pool_bytes: int
    name: str
    queued_bytes: int
    def __init__(self, device_id: _Optional[str] = ..., path: _Optional[str] = ..., free_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., engine: _Optional[str] = ..., direct: _Optional[bool] = ..., state: _Optional[_Union[DeviceState, str]] = ..., reason: _Optional[str] = ..., engine_reason: _Optional[str] = ..., write_bytes_per_second: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., name: _Optional[str] = ..., queued_bytes: _Optional[int] = ...) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("store_id", "devices", "notes", "problems", "scrub")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStatus]
    notes: _containers.RepeatedScalarFieldContainer[str]
    problems: _containers.RepeatedScalarFieldContainer[str]
    scrub: ScrubStatus
    def __init__(self, store_id: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[DeviceStatus, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., problems: _Optional[_Iterable[str]] = ..., scrub: _Optional[_Union[ScrubStatus, _Mapping]] = ...) -> None: ...

class ScrubStatus(_message.Message):
    __slots__ = ("has_begun", "started_unix_s", "ended_unix_s", "planned_count", "checkpoint_count", "size_bytes", "damaged", "next_unix_s")
    HAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    PLANNED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    NEXT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    has_begun: bool
    started_unix_s: float
    ended_unix_s: float
    planned_count: int
    checkpoint_count: int
    size_bytes: int
    damaged: _containers.RepeatedScalarFieldContainer[str]
    next_unix_s: float
    def __init__(self, has_begun: _Optional[bool] = ..., started_unix_s: _Optional[float] = ..., ended_unix_s: _Optional[float] = ..., planned_count: _Optional[int] = ..., checkpoint_count: _Optional[int] = ..., size_bytes: _Optional[int] = ..., damaged: _Optional[_Iterable[str]] = ..., next_unix_s: _Optional[float] = ...) -> None: ...

class CheckpointSummary(_message.Message):
    __slots__ = ("run_name", "run_id", "owner_uid", "attempt", "step", "world_size", "ranks", "size_bytes", "created_unix_s", "state", "in_memory", "notes", "parent", "problems", "offered", "tags", "missing_on", "pins")
    class NotesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    MISSING_ON_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    run_name: str
    run_id: str
    owner_uid: int
    attempt: int
    step: int
    world_size: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    size_bytes: int
    created_unix_s: float
    state: CheckpointState
    in_memory: bool
    notes: _containers.ScalarMap[str, str]
    parent: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    offered: bool
    tags: _containers.RepeatedScalarFieldContainer[str]
    missing_on: _containers.RepeatedScalarFieldContainer[str]
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    def __init__(self, run_name: _Optional[str] = ..., run_id: _Optional[str] = ..., owner_uid: _Optional[int] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., world_size: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., size_bytes: _Optional[int] = ..., created_unix_s: _Optional[float] = ..., state: _Optional[_Union[CheckpointState, str]] = ..., in_memory: _Optional[bool] = ..., notes: _Optional[_Mapping[str, str]] = ..., parent: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ..., offered: _Optional[bool] = ..., tags: _Optional[_Iterable[str]] = ..., missing_on: _Optional[_Iterable[str]] = ..., pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("run", "count_max")
    RUN_FIELD_NUMBER: _ClassVar[int]
    COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    run: str
    count_max: int
    def __init__(self, run: _Optional[str] = ..., count_max: _Optional[int] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointSummary]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[CheckpointSummary, _Mapping]]] = ...) -> None: ...

class LeafInfo(_message.Message):
    __slots__ = ("name", "dtype", "shape", "global_shape", "size_bytes", "aliases", "rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_SHAPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    global_shape: _containers.RepeatedScalarFieldContainer[int]
    size_bytes: int
    aliases: _containers.RepeatedScalarFieldContainer[str]
    rank: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., global_shape: _Optional[_Iterable[int]] = ..., size_bytes: _Optional[int] = ..., aliases: _Optional[_Iterable[str]] = ..., rank: _Optional[int] = ...) -> None: ...

class SegmentInfo(_message.Message):
    __slots__ = ("rank", "device_id", "file", "size_bytes", "block_count", "device")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    device_id: str
    file: str
    size_bytes: int
    block_count: int
    device: str
    def __init__(self, rank: _Optional[int] = ..., device_id: _Optional[str] = ..., file: _Optional[str] = ..., size_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class GetCheckpointRequest(_message.Message):
    __slots__ = ("selector", "leaf_count_max")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    LEAF_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    leaf_count_max: int
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ..., leaf_count_max: _Optional[int] = ...) -> None: ...

class GetCheckpointResponse(_message.Message):
    __slots__ = ("summary", "leaves", "segments", "leaf_count")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    LEAF_COUNT_FIELD_NUMBER: _ClassVar[int]
    summary: CheckpointSummary
    leaves: _containers.RepeatedCompositeFieldContainer[LeafInfo]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentInfo]
    leaf_count: int
    def __init__(self, summary: _Optional[_Union[CheckpointSummary, _Mapping]] = ..., leaves: _Optional[_Iterable[_Union[LeafInfo, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[SegmentInfo, _Mapping]]] = ..., leaf_count: _Optional[int] = ...) -> None: ...

class VerifyCheckpointRequest(_message.Message):
    __slots__ = ("selector",)
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ...) -> None: ...

class SegmentCheck(_message.Message):
    __slots__ = ("rank", "path", "size_bytes", "bad_block", "problem")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BAD_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    rank: int
    path: str
    size_bytes: int
    bad_block: int
    problem: str
    def __init__(self, rank: _Optional[int] = ..., path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., bad_block: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class LoaderRecord(_message.Message):
    __slots__ = ("rank", "place", "ledger_json", "state_json")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    LEDGER_JSON_FIELD_NUMBER: _ClassVar[int]
    STATE_JSON_FIELD_NUMBER: _ClassVar[int]
    rank: int
    place: str
    ledger_json: str
    state_json: str
    def __init__(self, rank: _Optional[int] = ..., place: _Optional[str] = ..., ledger_json: _Optional[str] = ..., state_json: _Optional[str] = ...) -> None: ...

class VerifyCheckpointResponse(_message.Message):
    __slots__ = ("summary", "ok", "segments", "elapsed_s", "problems", "loaders")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    LOADERS_FIELD_NUMBER: _ClassVar[int]
    summary: CheckpointSummary
    ok: bool
    segments: _containers.RepeatedCompositeFieldContainer[SegmentCheck]
    elapsed_s: float
    problems: _containers.RepeatedScalarFieldContainer[str]
    loaders: _containers.RepeatedCompositeFieldContainer[LoaderRecord]
    def __init__(self, summary: _Optional[_Union[CheckpointSummary, _Mapping]] = ..., ok: _Optional[bool] = ..., segments: _Optional[_Iterable[_Union[SegmentCheck, _Mapping]]] = ..., elapsed_s: _Optional[float] = ..., problems: _Optional[_Iterable[str]] = ..., loaders: _Optional[_Iterable[_Union[LoaderRecord, _Mapping]]] = ...) -> None: ...

class RemoveCheckpointRequest(_message.Message):
    __slots__ = ("selector", "force")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    force: bool
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ..., force: _Optional[bool] = ...) -> None: ...

class RemoveCheckpointResponse(_message.Message):
    __slots__ = ("removed", "freed_bytes")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    removed: CheckpointSummary
    freed_bytes: int
    def __init__(self, removed: _Optional[_Union[CheckpointSummary, _Mapping]] = ..., freed_bytes: _Optional[int] = ...) -> None: ...

class DropCacheRequest(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class DropCacheResponse(_message.Message):
    __slots__ = ("dropped",)
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dropped: CacheStatus
    def __init__(self, dropped: _Optional[_Union[CacheStatus, _Mapping]] = ...) -> None: ...

class RemoveRunRequest(_message.Message):
    __slots__ = ("run", "force")
    RUN_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    run: str
    force: bool
    def __init__(self, run: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class RemoveRunResponse(_message.Message):
    __slots__ = ("removed_count", "freed_bytes")
    REMOVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    removed_count: int
    freed_bytes: int
    def __init__(self, removed_count: _Optional[int] = ..., freed_bytes: _Optional[int] = ...) -> None: ...

class TagCheckpointRequest(_message.Message):
    __slots__ = ("selector", "name")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    name: str
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class TagCheckpointResponse(_message.Message):
    __slots__ = ("summary",)
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    summary: CheckpointSummary
    def __init__(self, summary: _Optional[_Union[CheckpointSummary, _Mapping]] = ...) -> None: ...

class UntagCheckpointRequest(_message.Message):
    __slots__ = ("run", "name")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class UntagCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    def __init__(self, checkpoint: _Optional[str] = ...) -> None: ...

class StartScrubRequest(_message.Message):
    __slots__ = ("run", "directories")
    RUN_FIELD_NUMBER: _ClassVar[int]
    DIRECTORIES_FIELD_NUMBER: _ClassVar[int]
    run: str
    directories: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., directories: _Optional[_Iterable[str]] = ...) -> None: ...

class StartScrubResponse(_message.Message):
    __slots__ = ("checkpoint_count", "size_bytes")
    CHECKPOINT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    checkpoint_count: int
    size_bytes: int
    def __init__(self, checkpoint_count: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class InspectStoresRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Finding(_message.Message):
    __slots__ = ("severity", "path", "problem", "repair")
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    severity: Severity
    path: str
    problem: str
    repair: str
    def __init__(self, severity: _Optional[_Union[Severity, str]] = ..., path: _Optional[str] = ..., problem: _Optional[str] = ..., repair: _Optional[str] = ...) -> None: ...

class InspectStoresResponse(_message.Message):
    __slots__ = ("findings", "run_count", "shard_count")
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    RUN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    run_count: int
    shard_count: int
    def __init__(self, findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., run_count: _Optional[int] = ..., shard_count: _Optional[int] = ...) -> None: ...

class ListDevicesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDevicesResponse(_message.Message):
    __slots__ = ("stores",)
    STORES_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[StoreDevices]
    def __init__(self, stores: _Optional[_Iterable[_Union[StoreDevices, _Mapping]]] = ...) -> None: ...

class StoreDevices(_message.Message):
    __slots__ = ("store_id", "devices")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    devices: _containers.RepeatedCompositeFieldContainer[DeviceDetail]
    def __init__(self, store_id: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[DeviceDetail, _Mapping]]] = ...) -> None: ...

class DeviceDetail(_message.Message):
    __slots__ = ("name", "device_id", "path", "state", "reason", "total_bytes", "free_bytes", "held_bytes", "parts", "drained", "retired_unix_s", "missing_since_unix_s", "highest", "pool_bytes")
    class HighestEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    RETIRED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MISSING_SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    device_id: str
    path: str
    state: DeviceState
    reason: str
    total_bytes: int
    free_bytes: int
    held_bytes: int
    parts: _containers.RepeatedCompositeFieldContainer[HeldPart]
    drained: bool
    retired_unix_s: float
    missing_since_unix_s: float
    highest: _containers.ScalarMap[str, str]
    pool_bytes: int
    def __init__(self, name: _Optional[str] = ..., device_id: _Optional[str] = ..., path: _Optional[str] = ..., state: _Optional[_Union[DeviceState, str]] = ..., reason: _Optional[str] = ..., total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[HeldPart, _Mapping]]] = ..., drained: _Optional[bool] = ..., retired_unix_s: _Optional[float] = ..., missing_since_unix_s: _Optional[float] = ..., highest: _Optional[_Mapping[str, str]] = ..., pool_bytes: _Optional[int] = ...) -> None: ...

class HeldPart(_message.Message):
    __slots__ = ("run_name", "owner_uid", "checkpoint", "size_bytes", "offered", "newest", "newest_elsewhere")
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    run_name: str
    owner_uid: int
    checkpoint: str
    size_bytes: int
    offered: bool
    newest: bool
    newest_elsewhere: str
    def __init__(self, run_name: _Optional[str] = ..., owner_uid: _Optional[int] = ..., checkpoint: _Optional[str] = ..., size_bytes: _Optional[int] = ..., offered: _Optional[bool] = ..., newest: _Optional[bool] = ..., newest_elsewhere: _Optional[str] = ...) -> None: ...

class DrainDeviceRequest(_message.Message):
    __slots__ = ("device", "cancel")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    device: str
    cancel: bool
    def __init__(self, device: _Optional[str] = ..., cancel: _Optional[bool] = ...) -> None: ...

class DrainDeviceResponse(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: DeviceDetail
    def __init__(self, device: _Optional[_Union[DeviceDetail, _Mapping]] = ...) -> None: ...

class RetireDeviceRequest(_message.Message):
    __slots__ = ("device", "force", "dry_run")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    device: str
    force: bool
    dry_run: bool
    def __init__(self, device: _Optional[str] = ..., force: _Optional[bool] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class RetireDeviceResponse(_message.Message):
    __slots__ = ("device", "problems")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    device: DeviceDetail
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, device: _Optional[_Union[DeviceDetail, _Mapping]] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadmitDeviceRequest(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class ReadmitDeviceResponse(_message.Message):
    __slots__ = ("device", "new_device", "aside")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NEW_DEVICE_FIELD_NUMBER: _ClassVar[int]
    ASIDE_FIELD_NUMBER: _ClassVar[int]
    device: DeviceDetail
    new_device: bool
    aside: str
    def __init__(self, device: _Optional[_Union[DeviceDetail, _Mapping]] = ..., new_device: _Optional[bool] = ..., aside: _Optional[str] = ...) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ("drain_s",)
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    drain_s: float
    def __init__(self, drain_s: _Optional[float] = ...) -> None: ...

class ShutdownResponse(_message.Message):
    __slots__ = ("persisted_count", "lost_count", "attached_count")
    PERSISTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOST_COUNT_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    persisted_count: int
    lost_count: int
    attached_count: int
    def __init__(self, persisted_count: _Optional[int] = ..., lost_count: _Optional[int] = ..., attached_count: _Optional[int] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("run", "kinds", "since", "log_id", "follow")
    RUN_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    run: str
    kinds: _containers.RepeatedScalarFieldContainer[EventKind]
    since: int
    log_id: str
    follow: bool
    def __init__(self, run: _Optional[str] = ..., kinds: _Optional[_Iterable[_Union[EventKind, str]]] = ..., since: _Optional[int] = ..., log_id: _Optional[str] = ..., follow: _Optional[bool] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "log_id", "unix_s", "kind", "text", "owner_uid", "run_name", "run_id", "attempt", "rank", "checkpoint", "size_bytes", "elapsed_s", "count", "interval_steps", "subject", "code", "hint")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    log_id: str
    unix_s: float
    kind: EventKind
    text: str
    owner_uid: int
    run_name: str
    run_id: str
    attempt: int
    rank: int
    checkpoint: str
    size_bytes: int
    elapsed_s: float
    count: int
    interval_steps: int
    subject: str
    code: str
    hint: str
    def __init__(self, sequence: _Optional[int] = ..., log_id: _Optional[str] = ..., unix_s: _Optional[float] = ..., kind: _Optional[_Union[EventKind, str]] = ..., text: _Optional[str] = ..., owner_uid: _Optional[int] = ..., run_name: _Optional[str] = ..., run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., rank: _Optional[int] = ..., checkpoint: _Optional[str] = ..., size_bytes: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., count: _Optional[int] = ..., interval_steps: _Optional[int] = ..., subject: _Optional[str] = ..., code: _Optional[str] = ..., hint: _Optional[str] = ...) -> None: ...

class OpenWebSessionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenWebSessionResponse(_message.Message):
    __slots__ = ("url", "valid_s")
    URL_FIELD_NUMBER: _ClassVar[int]
    VALID_S_FIELD_NUMBER: _ClassVar[int]
    url: str
    valid_s: float
    def __init__(self, url: _Optional[str] = ..., valid_s: _Optional[float] = ...) -> None: ...

class ControllerStatus(_message.Message):
    __slots__ = ("run_name", "run_id", "owner_uid", "state", "attached_count", "step", "step_s", "interval_steps", "bound", "reason", "goal_missed", "budget", "asked_budget", "cost_share", "cost_half_width", "steps_undecided", "paused_until_unix_s", "forced_count")
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GOAL_MISSED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ASKED_BUDGET_FIELD_NUMBER: _ClassVar[int]
    COST_SHARE_FIELD_NUMBER: _ClassVar[int]
    COST_HALF_WIDTH_FIELD_NUMBER: _ClassVar[int]
    STEPS_UNDECIDED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_UNTIL_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    FORCED_COUNT_FIELD_NUMBER: _ClassVar[int]
    run_name: str
    run_id: str
    owner_uid: int
    state: ControllerState
    attached_count: int
    step: int
    step_s: float
    interval_steps: int
    bound: str
    reason: str
    goal_missed: str
    budget: float
    asked_budget: float
    cost_share: float
    cost_half_width: float
    steps_undecided: int
    paused_until_unix_s: float
    forced_count: int
    def __init__(self, run_name: _Optional[str] = ..., run_id: _Optional[str] = ..., owner_uid: _Optional[int] = ..., state: _Optional[_Union[ControllerState, str]] = ..., attached_count: _Optional[int] = ..., step: _Optional[int] = ..., step_s: _Optional[float] = ..., interval_steps: _Optional[int] = ..., bound: _Optional[str] = ..., reason: _Optional[str] = ..., goal_missed: _Optional[str] = ..., budget: _Optional[float] = ..., asked_budget: _Optional[float] = ..., cost_share: _Optional[float] = ..., cost_half_width: _Optional[float] = ..., steps_undecided: _Optional[int] = ..., paused_until_unix_s: _Optional[float] = ..., forced_count: _Optional[int] = ...) -> None: ...

class GetControllerRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class GetControllerResponse(_message.Message):
    __slots__ = ("controllers",)
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    controllers: _containers.RepeatedCompositeFieldContainer[ControllerStatus]
    def __init__(self, controllers: _Optional[_Iterable[_Union[ControllerStatus, _Mapping]]] = ...) -> None: ...

class SetBudgetRequest(_message.Message):
    __slots__ = ("run", "budget")
    RUN_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    run: str
    budget: float
    def __init__(self, run: _Optional[str] = ..., budget: _Optional[float] = ...) -> None: ...

class SetBudgetResponse(_message.Message):
    __slots__ = ("controller",)
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    controller: ControllerStatus
    def __init__(self, controller: _Optional[_Union[ControllerStatus, _Mapping]] = ...) -> None: ...

class ForceCheckpointRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ForceCheckpointResponse(_message.Message):
    __slots__ = ("run_name", "checkpoint", "size_bytes", "waited_s")
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    run_name: str
    checkpoint: str
    size_bytes: int
    waited_s: float
    def __init__(self, run_name: _Optional[str] = ..., checkpoint: _Optional[str] = ..., size_bytes: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...

class PauseCheckpointsRequest(_message.Message):
    __slots__ = ("run", "ttl_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    ttl_s: float
    def __init__(self, run: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class PauseCheckpointsResponse(_message.Message):
    __slots__ = ("controller",)
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    controller: ControllerStatus
    def __init__(self, controller: _Optional[_Union[ControllerStatus, _Mapping]] = ...) -> None: ...

class ResumeCheckpointsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ResumeCheckpointsResponse(_message.Message):
    __slots__ = ("controller",)
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    controller: ControllerStatus
    def __init__(self, controller: _Optional[_Union[ControllerStatus, _Mapping]] = ...) -> None: ...

class RunDetail(_message.Message):
    __slots__ = ("status", "state", "checkpoint_count", "size_bytes", "arena_bytes")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    status: RunStatus
    state: RunState
    checkpoint_count: int
    size_bytes: int
    arena_bytes: int
    def __init__(self, status: _Optional[_Union[RunStatus, _Mapping]] = ..., state: _Optional[_Union[RunState, str]] = ..., checkpoint_count: _Optional[int] = ..., size_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunDetail]
    def __init__(self, runs: _Optional[_Iterable[_Union[RunDetail, _Mapping]]] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunDetail
    def __init__(self, run: _Optional[_Union[RunDetail, _Mapping]] = ...) -> None: ...

class SlotDetail(_message.Message):
    __slots__ = ("run_name", "run_id", "owner_uid", "rank", "arena", "slot", "state", "checkpoint", "size_bytes")
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    run_name: str
    run_id: str
    owner_uid: int
    rank: int
    arena: int
    slot: int
    state: SlotState
    checkpoint: str
    size_bytes: int
    def __init__(self, run_name: _Optional[str] = ..., run_id: _Optional[str] = ..., owner_uid: _Optional[int] = ..., rank: _Optional[int] = ..., arena: _Optional[int] = ..., slot: _Optional[int] = ..., state: _Optional[_Union[SlotState, str]] = ..., checkpoint: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ListSlotsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ListSlotsResponse(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedCompositeFieldContainer[SlotDetail]
    def __init__(self, slots: _Optional[_Iterable[_Union[SlotDetail, _Mapping]]] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("label", "expires_unix_s")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    label: str
    expires_unix_s: float
    def __init__(self, label: _Optional[str] = ..., expires_unix_s: _Optional[float] = ...) -> None: ...

class PinCheckpointRequest(_message.Message):
    __slots__ = ("selector", "label", "ttl_s")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    label: str
    ttl_s: float
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ..., label: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class PinCheckpointResponse(_message.Message):
    __slots__ = ("summary",)
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    summary: CheckpointSummary
    def __init__(self, summary: _Optional[_Union[CheckpointSummary, _Mapping]] = ...) -> None: ...

class UnpinCheckpointRequest(_message.Message):
    __slots__ = ("run", "label")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    run: str
    label: str
    def __init__(self, run: _Optional[str] = ..., label: _Optional[str] = ...) -> None: ...

class UnpinCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    def __init__(self, checkpoint: _Optional[str] = ...) -> None: ...

class ExportCheckpointRequest(_message.Message):
    __slots__ = ("selector",)
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ...) -> None: ...

class ExportCheckpointResponse(_message.Message):
    __slots__ = ("summary", "directories", "store_uid")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    DIRECTORIES_FIELD_NUMBER: _ClassVar[int]
    STORE_UID_FIELD_NUMBER: _ClassVar[int]
    summary: CheckpointSummary
    directories: _containers.RepeatedScalarFieldContainer[str]
    store_uid: int
    def __init__(self, summary: _Optional[_Union[CheckpointSummary, _Mapping]] = ..., directories: _Optional[_Iterable[str]] = ..., store_uid: _Optional[int] = ...) -> None: ...

class ListCachesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCachesResponse(_message.Message):
    __slots__ = ("caches",)
    CACHES_FIELD_NUMBER: _ClassVar[int]
    caches: _containers.RepeatedCompositeFieldContainer[CacheStatus]
    def __init__(self, caches: _Optional[_Iterable[_Union[CacheStatus, _Mapping]]] = ...) -> None: ...

class ListMembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMembersResponse(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    def __init__(self, members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ...) -> None: ...

class ListGroupsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[ShareGroupStatus]
    def __init__(self, groups: _Optional[_Iterable[_Union[ShareGroupStatus, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("cancel",)
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    cancel: bool
    def __init__(self, cancel: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("draining", "unsettled_count", "attached_count")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    unsettled_count: int
    attached_count: int
    def __init__(self, draining: _Optional[bool] = ..., unsettled_count: _Optional[int] = ..., attached_count: _Optional[int] = ...) -> None: ...

class IssueTokenRequest(_message.Message):
    __slots__ = ("ttl_s", "read_only", "name")
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    read_only: bool
    name: str
    def __init__(self, ttl_s: _Optional[float] = ..., read_only: _Optional[bool] = ..., name: _Optional[str] = ...) -> None: ...

class IssueTokenResponse(_message.Message):
    __slots__ = ("token", "info")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    token: str
    info: TokenInfo
    def __init__(self, token: _Optional[str] = ..., info: _Optional[_Union[TokenInfo, _Mapping]] = ...) -> None: ...

class TokenInfo(_message.Message):
    __slots__ = ("token_id", "name", "role", "owner_uid", "left_s")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    name: str
    role: str
    owner_uid: int
    left_s: float
    def __init__(self, token_id: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., owner_uid: _Optional[int] = ..., left_s: _Optional[float] = ...) -> None: ...

class ListTokensRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTokensResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenInfo]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenInfo, _Mapping]]] = ...) -> None: ...

class RevokeTokenRequest(_message.Message):
    __slots__ = ("token_id",)
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    def __init__(self, token_id: _Optional[str] = ...) -> None: ...

class RevokeTokenResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetQuotasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetQuotasResponse(_message.Message):
    __slots__ = ("users",)
    USERS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[UserQuotas]
    def __init__(self, users: _Optional[_Iterable[_Union[UserQuotas, _Mapping]]] = ...) -> None: ...

class UserQuotas(_message.Message):
    __slots__ = ("uid", "quotas", "refused_count")
    UID_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    uid: int
    quotas: _containers.RepeatedCompositeFieldContainer[Quota]
    refused_count: int
    def __init__(self, uid: _Optional[int] = ..., quotas: _Optional[_Iterable[_Union[Quota, _Mapping]]] = ..., refused_count: _Optional[int] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("name", "used", "bound")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    name: str
    used: int
    bound: int
    def __init__(self, name: _Optional[str] = ..., used: _Optional[int] = ..., bound: _Optional[int] = ...) -> None: ...

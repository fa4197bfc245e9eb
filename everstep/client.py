"""The control API from Python: what a node's daemon holds, and what may be asked of it. docs/api.md explains it.

from everstep.client import NodeClient

with NodeClient() as node:
    print(node.status().daemon.version)
"""

from everstep.checkpoint.fsck import FsckReport
from everstep.core.ids import CheckpointId
from everstep.daemon.control.device_views import DeviceDetail, ReadmitView, RetireView, StoreDevices
from everstep.daemon.control.node_client import Exported, NodeClient
from everstep.daemon.control.run_views import RunDetail, RunState, SlotDetail
from everstep.daemon.control.views import (
    CacheView,
    CheckpointDetail,
    CheckpointStatus,
    CheckpointView,
    DaemonView,
    DeviceStatus,
    DeviceView,
    Drained,
    Exporting,
    MemberView,
    PinView,
    RankState,
    RankView,
    Removed,
    RunView,
    ScrubStarted,
    ShareGroupView,
    StatusView,
    Stopped,
    StoreView,
    Verdict,
)
from everstep.daemon.controller.controller_views import ControllerState, ControllerView, ForcedView
from everstep.daemon.events.event_types import Event, EventKind, EventQuery
from everstep.daemon.slot_machine import SlotState

__all__ = [
    "CacheView",
    "CheckpointDetail",
    "CheckpointId",
    "CheckpointStatus",
    "CheckpointView",
    "ControllerState",
    "ControllerView",
    "DaemonView",
    "DeviceDetail",
    "DeviceStatus",
    "DeviceView",
    "Drained",
    "Event",
    "EventKind",
    "EventQuery",
    "Exported",
    "Exporting",
    "ForcedView",
    "FsckReport",
    "MemberView",
    "NodeClient",
    "PinView",
    "RankState",
    "RankView",
    "ReadmitView",
    "Removed",
    "RetireView",
    "RunDetail",
    "RunState",
    "RunView",
    "ScrubStarted",
    "ShareGroupView",
    "SlotDetail",
    "SlotState",
    "StatusView",
    "Stopped",
    "StoreDevices",
    "StoreView",
    "Verdict",
]

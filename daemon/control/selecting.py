"""Which run or checkpoint a call is about. The base of the service's mix-ins."""

from typing import TYPE_CHECKING

from ...checkpoint.run_store import RunStore
from ...core.errors import UsageError
from ...core.ids import CheckpointId
from ...proto import node_pb2 as pb
from ...proto import node_pb2_grpc
from . import store_views
from .caller import visible_uid
from .messages import id_from_text

if TYPE_CHECKING:
    from ..node import Node


class Selecting(node_pb2_grpc.NodeServicer):
    """Finds what the caller may see; all else does not exist."""

    _node: "Node"

    def _runs(self) -> list[RunStore]:
        return store_views.visible_runs([opened.store for opened in self._node.stores.stores], visible_uid())

    def _run(self, text: str) -> RunStore:
        if not text:
            raise UsageError("no run is named", hint="name it as given to attach(), or by its id")
        stores = [opened.store for opened in self._node.stores.stores]
        return store_views.find_run(stores, text, visible_uid())

    def _selected(self, selector: pb.Selector) -> tuple[RunStore, CheckpointId]:
        run = self._run(selector.run)
        return run, store_views.select_checkpoint(run, id_from_text(selector.checkpoint))

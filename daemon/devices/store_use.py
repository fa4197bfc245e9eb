"""Who uses a store: asked before one is closed while the daemon goes on."""

from typing import TYPE_CHECKING

from ...core.errors import RunBusyError
from .stores import OpenStore

if TYPE_CHECKING:
    from ..node import Node


def refusal_to_close(node: "Node", opened: OpenStore) -> RunBusyError | None:
    """Return why a store must stay open: who is attached, or has asked for what goes on; None: nothing."""
    hint = "stop it, or stop the daemon and name the store's directories with --storage"
    for rank in node.registry.ranks():
        if rank.run.opened is not opened:
            continue
        who = f"rank {rank.rank} of run {rank.run.name!r}"
        if rank.lease is not None:
            return RunBusyError(f"the store is opened again for this, and {who} is attached", hint=hint)
        if rank.persisting or rank.kept_until_s is not None:
            return RunBusyError(
                f"the store is opened again for this, and snapshots of {who} wait in memory for its restart",
                hint="stop the daemon and name the store's directories with --storage, or wait until linger_s is over",
            )
    if node.verifier.is_reading(opened):
        return RunBusyError(
            "a checkpoint of the store is being verified", hint="try again when that has ended"
        )
    return None

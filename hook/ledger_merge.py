"""Ledgers at another world size: what all old ranks handed out stays counted, exactly once."""

from typing import TYPE_CHECKING, cast

from ..checkpoint.value_format import decode_value, load_values
from ..dataloader.ledger import Ledger

if TYPE_CHECKING:
    from ..checkpoint.manifest_types import Manifest
    from .loaders import AnyLoader
    from .restore import Fetched, RestoreSearch


def adopt_ledgers(
    loader: "AnyLoader | None", found: "Fetched", search: "RestoreSearch", *, rank: int
) -> None:
    """Give rank 0 the sum of all old ranks' ledgers and the others empty ones."""
    if loader is None:
        return
    if rank != 0:
        loader.ledger = Ledger(loader.seed)
        return
    for manifest in search.other_manifests(found):
        for ledger in _ledgers(manifest):
            if ledger.seed == loader.ledger.seed:
                loader.ledger.merge(ledger)


def _ledgers(manifest: "Manifest") -> list[Ledger]:
    """Return the ledgers in a shard's values: a loader's state has a key `ledger` (object_state.py)."""
    document = cast("dict[str, object]", load_values(manifest.values))
    states = [value.get("state") for value in document.values() if isinstance(value, dict)]
    loaders = [state for state in states if isinstance(state, dict) and "ledger" in state]
    return [Ledger.from_state(decode_value(state["ledger"])) for state in loaders]

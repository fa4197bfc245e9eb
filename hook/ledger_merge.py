"""Ledgers at another world size: what all old ranks handed out stays counted, exactly once."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from ..checkpoint.value_format import decode_value, load_values
from ..dataloader.ledger import Ledger

if TYPE_CHECKING:
    from ..checkpoint.manifest_types import Manifest
    from .loaders import AnyLoader


def adopt_ledgers(loaders: "Mapping[str, AnyLoader]", others: "Iterable[Manifest]", *, rank: int) -> None:
    """Give rank 0 the sum of all old ranks' ledgers, loader by loader, and the other ranks empty ones.

    `others`: the manifests of the old ranks but the first.
    Called after `apply`, which has given every rank the ledgers of the shard that it read: rank 0's.
    """
    if rank != 0:
        for loader in loaders.values():
            loader.ledger = Ledger(loader.seed)
        return
    for manifest in others:
        for name, loader in loaders.items():
            loader.ledger.merge(_ledger(manifest, name))


def _ledger(manifest: "Manifest", name: str) -> Ledger:
    """Return a loader's ledger in a shard's values (see object_state.py for their form)."""
    documents = cast("dict[str, dict[str, dict[str, object]]]", load_values(manifest.values))
    return Ledger.from_state(decode_value(documents[name]["state"]["ledger"]))

"""The Store of `torch.distributed`, on a connection of our own."""

from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed's own, whose stub does not export it


class _CanClone(Protocol):
    def clone(self) -> "Store": ...


class _Wrapper(Protocol):
    underlying_store: "Store"


class _Server(Protocol):
    host: str
    port: int


def default_store() -> "Store":
    """Return the process group's own; on the rank that serves it the server lives as long as this does."""
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def own_client() -> "Store":
    """Return a connection of our own: a blocked wait on the default one stalls everybody's set."""
    store = default_store()
    with suppress(AttributeError, RuntimeError):
        store = cast("_CanClone", store).clone()  # torch's stub lacks it
    return store


def under(prefix: str, store: "Store") -> "Store":
    """Return a view of the store in which all keys begin with the prefix."""
    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]  documented as dist.PrefixStore


def name_of(store: "Store") -> str:
    """Return what people know the store by: its kind, and where it is served."""
    while hasattr(store, "underlying_store"):
        store = cast("_Wrapper", store).underlying_store
    kind = type(store).__name__
    if not hasattr(store, "host"):
        return f"the {kind} of torch.distributed"
    server = cast("_Server", store)
    return f"the {kind} of torch.distributed at {server.host}:{server.port}"


def present(store: "Store", keys: list[str]) -> list[str]:
    """Return those of the keys that the store has: in one call where it has all."""
    return keys if store.check(keys) else [key for key in keys if store.check([key])]

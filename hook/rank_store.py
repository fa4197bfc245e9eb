"""The Store of `torch.distributed`, on a connection of our own."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch.distributed as dist

from ..core.errors import DeadlineError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed's own, whose stub does not export it


logger = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 60.0
"""torch's own attempt to connect lasts as long as the process group's time limit, or a multiple of it."""
SAID_AFTER_S = 10.0
"""So long others are waited for without a word."""
STORE_GONE_HINT = (
    "whoever serves it has ended, rank 0 or torchrun's agent: look at what it says, and start all ranks again"
)


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
    """Return a connection of our own: a blocked wait on the default one stalls everybody's set.

    Raises:
        DeadlineError: nobody serves the Store any more.
    """
    store, connecting = default_store(), Future["Store"]()

    def connect() -> None:
        try:
            connecting.set_result(cast("_CanClone", store).clone())  # torch's stub lacks it
        except (AttributeError, RuntimeError) as error:
            connecting.set_exception(error)

    threading.Thread(target=connect, name="everstep-store", daemon=True).start()
    try:
        return connecting.result(CONNECT_DEADLINE_S)
    except (TimeoutError, dist.DistNetworkError) as error:
        said = f": {str(error).splitlines()[0]}" if str(error) else f" within {CONNECT_DEADLINE_S:g} s"
        raise DeadlineError(f"{name_of(store)} cannot be reached{said}", hint=STORE_GONE_HINT) from error
    except (AttributeError, RuntimeError):  # one of a kind that has no connections
        return store


def wait_for(
    store: "Store",
    keys: list[str],
    deadline_s: float,
    missing: Callable[[], str],
    look: Callable[[], None] = lambda: None,
) -> None:
    """Return when the store has all keys; say after a while who is missing.

    In turns of some seconds: between them signals are heard, and `look` may raise.

    Raises:
        RuntimeError: the Store's own, when the deadline is over or it cannot be reached.
    """
    until_s, is_said = time.monotonic() + deadline_s, False
    while True:
        began_s = time.monotonic()
        turn_s = max(min(SAID_AFTER_S, until_s - began_s), 0.001)
        try:
            store.wait(keys, timedelta(seconds=turn_s))
            return
        except RuntimeError:
            now_s = time.monotonic()
            if now_s - began_s < turn_s / 2 or now_s >= until_s:  # a Store that is gone takes no time
                raise
        look()
        if not is_said:
            say_awaited(missing(), deadline_s)
            is_said = True


def say_awaited(who: str, deadline_s: float) -> None:
    """Log who is waited for."""
    logger.warning(
        "ranks_awaited who=%r for=%gs: every rank must attach, restore and close the run", who, deadline_s
    )


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

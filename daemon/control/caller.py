"""Who makes the call that is being answered: set by the guard before a handler runs."""

import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

# (The class is generic for the type checker only.)
if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    Context = grpc.aio.ServicerContext

caller_uid: ContextVar[int] = ContextVar("everstep_caller_uid")


def visible_uid() -> int | None:
    """Return whose runs the caller may see; None: everybody's."""
    return caller_uid.get() or None


async def operator(context: Context) -> int:
    """Return the caller's uid, if it is the daemon's or root's: for what concerns every run."""
    uid = caller_uid.get()
    if uid not in (0, os.getuid()):
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"this daemon belongs to uid {os.getuid()}")
    return uid

"""What a daemon that was started as root keeps of it: nothing that it does not need, for good.

It needs none of root's capabilities: it serves its directories and its sockets as their owner, and looks at the other
ends of sockets by what the kernel says of them. CAP_IPC_LOCK stays where it was given, for pages that devices write
from (`io.register_arenas`) beyond the limit of locked memory.
"""

import logging
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from cffi import FFI

from ...core.errors import ConfigError

logger = logging.getLogger(__name__)

CAP_SETGID = 6
CAP_IPC_LOCK = 14
CAP_MAX = 63
_PR_SET_KEEPCAPS, _PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = (
    8,
    23,
    24,
    38,
    47,
)
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_VERSION_3 = 0x20080522
"""linux/capability.h: two words of 32 bits for each set."""

_ffi = FFI()
_ffi.cdef(
    """
    struct header { unsigned int version; int pid; };
    struct words { unsigned int effective, permitted, inheritable; };
    int prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d);
    int capset(struct header *header, struct words *words);
    """
)


class _Libc(Protocol):
    prctl: Callable[[int, int, int, int, int], int]
    capset: Callable[[object, object], int]


def drop_privileges(user: str) -> None:
    """Give up what root has and a daemon does not need, and become `user` unless it is empty; called before any thread.

    Whoever started the daemon, nothing that it executes can gain rights from then on.

    Raises:
        ConfigError: there is no such user, or only root could become it.
    """
    libc = cast("_Libc", _ffi.dlopen(None))
    is_root = os.geteuid() == 0
    if user and not is_root:
        if _account(user).pw_uid != os.geteuid():
            raise ConfigError(
                f"daemon.user is {user!r}, and this daemon was started as uid {os.geteuid()}",
                hint="start it as root or as that user, or leave daemon.user out",
            )
        user = ""
    if is_root:
        _drop_bounding(libc)
        if user:
            _become(libc, _account(user))
        elif CAP_SETGID in _held():
            os.setgroups([])
        kept = {CAP_IPC_LOCK} & _held()
        if _held() != kept:  # whoever started it may have left it nothing, not even the call that drops
            _keep_only(libc, kept)
    _call(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if is_root:
        logger.info("privileges_dropped uid=%d capabilities=%s", os.geteuid(), sorted(_held()))


def _account(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(
            f"daemon.user is {user!r}, whom this machine does not know", hint=f"useradd --system {user}"
        ) from None


def _become(libc: _Libc, account: pwd.struct_passwd) -> None:
    """Take another user's identity and keep the permitted capabilities, to choose among them."""
    _call(libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "keepcaps")
    try:
        os.setgroups([])
        os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
        os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    except OSError as error:
        raise ConfigError(
            f"daemon.user is {account.pw_name!r}, and this daemon may not become it: {error.strerror}",
            hint="start it with all of root's capabilities, or as that user",
        ) from error
    _call(libc.prctl(_PR_SET_KEEPCAPS, 0, 0, 0, 0), "keepcaps")


def _drop_bounding(libc: _Libc) -> None:
    """Let nothing executed later have what is dropped: only CAP_IPC_LOCK stays."""
    _call(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
    for number in range(CAP_MAX + 1):
        known = libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)
        if known == 1 and number != CAP_IPC_LOCK and libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0):
            if 8 in _held():  # CAP_SETPCAP: without it there is nothing that could be dropped
                _call(-1, f"bounding capability {number}")
            return


def _keep_only(libc: _Libc, kept: set[int]) -> None:
    header = _ffi.new("struct header *", {"version": _VERSION_3, "pid": 0})
    masks = [sum(1 << number - low for number in kept if low <= number < low + 32) for low in (0, 32)]
    words = _ffi.new("struct words[2]", [{"effective": mask, "permitted": mask} for mask in masks])
    _call(libc.capset(header, words), "capabilities")


def _held() -> set[int]:
    """Return this process's permitted capabilities."""
    lines = (
        Path("/proc/self/status").read_bytes().splitlines()
    )  # a codec would be imported, as another user already
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith(b"CapPrm:"))
    return {number for number in range(CAP_MAX + 1) if mask >> number & 1}


def _call(result: int, what: str) -> None:
    if result:
        raise ConfigError(
            f"cannot give up root's rights ({what}): {os.strerror(_ffi.errno)}",
            hint="start the daemon as the user that it shall be",
        )

"""Where the daemon of a user listens: by uid alone, because $XDG_RUNTIME_DIR differs between login, cron and Slurm."""

import os
import stat
from pathlib import Path

from .errors import ConfigError

SOCKET_VARIABLE = "EVERSTEP_SOCKET"


def data_socket_path(uid: int | None = None) -> Path:
    """Return the data socket's path: $EVERSTEP_SOCKET, else /run/everstep/<uid>, else /tmp/everstep-<uid>."""
    named = os.environ.get(SOCKET_VARIABLE)
    if named:
        return Path(named).absolute()
    owner = os.getuid() if uid is None else uid
    shared = Path("/run/everstep") / str(owner)
    base = shared if shared.is_dir() else Path(f"/tmp/everstep-{owner}")  # noqa: S108 - checked by ensure_private
    return base / "data.sock"


def control_socket_path(data_socket: Path) -> Path:
    """Return the control API's socket that belongs to a data socket."""
    return data_socket.with_name(
        "control.sock" if data_socket.name == "data.sock" else f"{data_socket.name}.control"
    )


def ensure_private_directory(path: Path, *, is_shared: bool = False) -> None:
    """Make `path` a 0700 directory of this user, or raise ConfigError: no symlink, no other owner, no group or others.

    A directory in /tmp with a known name may have been put there by somebody else. `is_shared`: 0711, as others shall
    reach the sockets in it; its group may be let in alone (0710), and nobody else may change it.
    """
    try:
        path.mkdir(mode=0o711 if is_shared else 0o700, parents=True, exist_ok=True)
        status = os.lstat(path)
    except OSError as error:
        raise ConfigError(
            f"cannot use {path}: {error.strerror}", hint=f"set {SOCKET_VARIABLE} to a path of your own"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is not a directory", hint=f"remove it or set {SOCKET_VARIABLE}")
    if status.st_uid != os.getuid():
        raise ConfigError(
            f"{path} belongs to uid {status.st_uid}", hint=f"set {SOCKET_VARIABLE} to a path of your own"
        )
    if is_shared and not status.st_mode & 0o011:
        raise ConfigError(
            f"{path} is closed to the users that daemon.users lets in (mode {stat.S_IMODE(status.st_mode):o})",
            hint=f"chmod 711 {path}, or 710 and chgrp, for the members of a group alone",
        )
    if is_shared and status.st_mode & 0o022:
        raise ConfigError(
            f"{path} can be changed by others (mode {stat.S_IMODE(status.st_mode):o})",
            hint=f"chmod 711 {path}",
        )
    if not is_shared and status.st_mode & 0o077:
        raise ConfigError(
            f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):o})", hint=f"chmod 700 {path}"
        )


def is_utf_8(text: str) -> bool:
    """Tell whether a text of the operating system's (an argument, a variable, a name) was UTF-8.

    The bytes of one that was not are kept as lone surrogates, which no message can carry.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

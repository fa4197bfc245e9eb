"""Files that hold a token: read only where nobody but this user and root can have read or written them."""

import os
import stat
from pathlib import Path

from ...core.errors import ConfigError

TOKEN_CHARS_MIN = 32
TOKEN_BYTES_MAX = 4096


def read_private(path: Path, key: str, size_bytes_max: int = TOKEN_BYTES_MAX) -> bytes:
    """Return what a file says, up to one byte more than `size_bytes_max`; `key` names it to people.

    Raises:
        ConfigError: it cannot be read, is no regular file, or is open to others.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror or error}") from error
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"{key}: {path} is not a file that only this user can read", hint=f"chmod 600 {path}"
            )
        return file.read(size_bytes_max + 1)


def read_shared_token(path: Path, key: str) -> str:
    """Return the token of such a file that both sides were given by an operator.

    Raises:
        ConfigError: as of `read_private`, or it holds no token of the right length.
    """
    content = read_private(path, key)
    token = content.strip().decode("ascii", errors="replace")
    if not (len(token) >= TOKEN_CHARS_MIN and len(content) <= TOKEN_BYTES_MAX and token.isprintable()):
        raise ConfigError(
            f"{key}: {path} holds no token of {TOKEN_CHARS_MIN} printable characters or more",
            hint=f"openssl rand -hex 32 > {path}",
        )
    return token

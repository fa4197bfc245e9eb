"""The frame of programs that the command line starts because they need torch: JSON in, JSON out, errors by their class.

The request is one JSON object on standard input, the answer one on standard output: the result, or
`{"error": {"code", "message", "hint"}}` with exit code 1.
"""

import errno
import json
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from ..core.errors import EverstepError, InternalError, StorageError

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130

_FULL = "free space there, or name a place on another file system"
_FORBIDDEN = "`ls -ld` shows who may read and write there; choose another place, or run as the owner"
_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "this file system, or a limit of this shell (`ulimit -f`), takes no file that large",
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: "the file system is read-only, often after an error (`dmesg`); name another place",
    errno.EIO: "the drive reports errors: see `dmesg` and its SMART log",
    errno.ENOENT: "check the spelling, and that the directory above it exists",
    errno.ENOTDIR: "a part of that path is a file: name another place",
    errno.EISDIR: "that is a directory: name a file",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit on open files: `ulimit -n`",
    errno.ENFILE: "the node has no more open files to give: `sysctl fs.file-max`",
}
_HINT = "check that path, its permissions and the free space there"


def run_tool(carry_out: Callable[[dict[str, object]], dict[str, object]]) -> int:
    """Carry out the request on standard input, and return the exit code; SIGTERM ends it like an interrupt."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        answer = carry_out(json.load(sys.stdin))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except EverstepError as error:
        return _fail(error)
    except OSError as error:
        return _fail(StorageError(_said(error), hint=_HINTS.get(error.errno or 0, _HINT)))
    except ImportError as error:
        return _fail(
            InternalError(f"this needs a package that is not installed: {error}", hint="pip install torch")
        )
    json.dump(answer, sys.stdout)
    return EXIT_DONE


def _said(error: OSError) -> str:
    return f"{error.filename or 'a file'}: {error.strerror or error}"


def _fail(error: EverstepError) -> int:
    document = {"code": error.code, "message": error.message, "hint": error.hint}
    json.dump({"error": document}, sys.stdout)
    return EXIT_FAILED


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt

"""The frame of programs that the command line starts because they need torch: JSON in, JSON out, errors by their class.

The request is one JSON object on standard input, the answer one on standard output: the result, or
`{"error": {"code", "message", "hint"}}` with exit code 1.
"""

import json
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from ..core.errors import EverstepError, InternalError, StorageError

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


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
        return _fail(
            StorageError(f"{error.filename or 'a file'}: {error.strerror or error}", hint="see errno(3)")
        )
    except ImportError as error:
        return _fail(
            InternalError(f"this needs a package that is not installed: {error}", hint="pip install torch")
        )
    json.dump(answer, sys.stdout)
    return EXIT_DONE


def _fail(error: EverstepError) -> int:
    document = {"code": error.code, "message": error.message, "hint": error.hint}
    json.dump({"error": document}, sys.stdout)
    return EXIT_FAILED


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt

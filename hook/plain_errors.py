"""Errors as the caller needs them: of a public call their own line and one of everstep's, of an object its name."""

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..core.errors import EverstepError, InternalError

logger = logging.getLogger(__name__)

Given = ParamSpec("Given")
Result = TypeVar("Result")


def with_plain_errors(call: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return the call with each EverstepError raised afresh: its message says it all, the way it came does not.

    The way is logged for debugging. A bug keeps it: an InternalError, and whatever is no EverstepError.
    """

    @functools.wraps(call)
    def plain(*arguments: Given.args, **named: Given.kwargs) -> Result:
        try:
            return call(*arguments, **named)
        except InternalError:
            raise
        except EverstepError as error:
            logger.debug("error_raised call=%s", call.__name__, exc_info=True)
            raise error.with_traceback(None) from None

    return plain


def read_named(read: Callable[[], Result], what: str) -> Result:
    """Return what a user's object gives; whatever it raises is raised as it is, with a note that says of what."""
    try:
        return read()
    except Exception as error:
        error.add_note(f"while {what} was read for a snapshot")
        raise

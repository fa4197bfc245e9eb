"""Errors of a public call as its caller needs them: their own line, and one of everstep's."""

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

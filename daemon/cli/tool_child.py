"""Programs of the training side that a command starts: they need torch, which this process never imports."""

import json
import os
import signal
import subprocess
import sys
from typing import cast

from ...core.errors import InternalError, error_from_code

INTERRUPT_DEADLINE_S = 20.0

_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1024 * 1024)}
"""glibc raises its threshold to the largest block freed; from then on tensors leave holes in the heap that the next
one does not fit into, and memory grows with the state. A threshold that is set stays."""


def run_child(module: str, request: dict[str, object]) -> dict[str, object]:
    """Return the answer of `python -m everstep.<module>` to a request; an interrupt ends it first, tidily.

    Raises:
        EverstepError: what the program raised, by its class.
        InternalError: it ended without an answer; what it said last.
    """
    command = [sys.executable, "-P", "-m", f"everstep.{module}"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | _ENVIRONMENT,
    ) as child:
        try:
            answer, said = child.communicate(json.dumps(request))
        except BaseException:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(INTERRUPT_DEADLINE_S)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    if child.returncode == 130:
        raise KeyboardInterrupt
    return _answer_of(answer, said, child.returncode)


def _answer_of(answer: str, said: str, code: int) -> dict[str, object]:
    try:
        document = cast(dict[str, object], json.loads(answer))
    except ValueError as error:
        last = (said.strip().splitlines() or ["nothing"])[-1]
        raise InternalError(f"the program ended with {code} and said: {last}") from error
    failure = document.get("error")
    if isinstance(failure, dict):
        fields = cast(dict[str, str], failure)
        raise error_from_code(fields["code"], fields["message"], fields["hint"])
    return document

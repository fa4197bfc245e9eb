"""Lets a process stop at a named call until a test says go, so that the test can kill it exactly there.

In the environment: PAUSE_AT is `<module>:<name>`, PAUSE_CALL the number of the call (the first is 1) among those whose
arguments, printed, hold PAUSE_MATCH; PAUSE_FOLDER is a folder. The file `reached` appears there when the call is about
to begin, and it goes on once the file `go` exists. The call itself is the product's own. Where PAUSE_RAISES names an
exception, built in or of everstep, the call fails with that at once instead.
"""

import builtins
import importlib
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def install() -> None:
    """Wrap the call that the environment names, if any."""
    place = os.environ.get("PAUSE_AT", "")
    if not place:
        return
    module, name = place.split(":")
    owner: Any = importlib.import_module(module)
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, attribute, _pausing(getattr(owner, attribute)))


def _pausing(call: Callable[..., Any]) -> Callable[..., Any]:
    folder, number = Path(os.environ["PAUSE_FOLDER"]), int(os.environ["PAUSE_CALL"])
    match = os.environ.get("PAUSE_MATCH", "")
    calls = itertools.count(1)

    def paused(*args: Any, **kwargs: Any) -> Any:
        if (not match or match in str(args)) and next(calls) == number:
            (folder / "reached").touch()
            if error := os.environ.get("PAUSE_RAISES"):
                known = vars(builtins) | vars(importlib.import_module("everstep.core.errors"))
                raise known[error]("planted by a test")
            while not (folder / "go").exists():
                threading.Event().wait(0.01)
        return call(*args, **kwargs)

    return paused

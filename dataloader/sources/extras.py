"""Optional packages, imported when a source needs one."""

from importlib import import_module
from typing import Any

from ...core.errors import UsageError


def import_extra(module: str, extra: str, needed_by: str) -> Any:
    """Return a module of an optional package; UsageError says how to install it. These packages have no types."""
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.split(".")[0] != module.split(".", maxsplit=1)[0]:
            raise
        raise UsageError(
            f"{needed_by} needs {exc.name}, which is not installed", hint=f"pip install 'everstep[{extra}]'"
        ) from exc

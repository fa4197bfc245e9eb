"""`everstep import`: other tools' files as a committed checkpoint.

A program of its own: `python -m everstep.hook.importer`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..core.converter import Converter
from ..core.errors import UsageError
from ..core.ids import run_id_of
from .tool_process import run_tool

if TYPE_CHECKING:
    from .import_components import Imported


class ImportRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to import, and into which run."""

    source: str
    run: str
    storage: list[str]
    step: int | None
    as_name: str
    without: list[str]


_REQUEST = Converter(ImportRequest)


def main() -> int:
    """Run the program."""
    return run_tool(lambda document: import_source(_REQUEST.convert(document)))


def import_source(request: ImportRequest) -> dict[str, object]:
    """Commit the checkpoint, and return its name, what it holds and what was left out.

    Raises:
        NotFoundError, CorruptDataError: the source cannot be read.
        UsageError: it cannot be told what of the source is which object, or the run is not new.
        NodeError: the daemon, memory or storage refuse it now.
    """
    # torch is imported where a missing one can be said
    from .import_components import run_state  # noqa: PLC0415
    from .import_files import read_foreign  # noqa: PLC0415
    from .import_run import commit_components  # noqa: PLC0415
    from .link import RunAddress  # noqa: PLC0415

    _check(request)
    found = read_foreign(Path(request.source))
    imported = _components(found.side, found.tree, request)
    _check_without(imported, request.without)
    components = [each for each in imported.components if each.name not in request.without]
    if not components:
        raise UsageError("nothing of the source is left to import", hint="give fewer --without")
    state = run_state(imported, request.step)
    notes = {f"imported.{key}": value for key, value in imported.left_out.items()}
    address = RunAddress(
        name=request.run, rank=0, world_size=1, storage=tuple(request.storage), takeover=False
    )
    checkpoint = commit_components(components, address, state=state, kind=found.kind, notes=notes)
    return {
        "checkpoint": f"{request.run}@{checkpoint}",
        "kind": found.kind,
        "components": [each.name for each in components],
        "left_out": imported.left_out,
    }


def _components(side: object, tree: dict[str, object], request: ImportRequest) -> "Imported":
    from .import_components import components_of, exported_components  # noqa: PLC0415

    if isinstance(side, dict):
        return exported_components(side, tree)  # pyright: ignore[reportUnknownArgumentType] (JSON)
    return components_of(tree, as_name=request.as_name, without=request.without)


def _check_without(imported: "Imported", without: list[str]) -> None:
    from .import_components import component_name  # noqa: PLC0415

    known = {each.name for each in imported.components} | imported.left_out.keys()
    known |= {component_name(key) for key in imported.left_out}
    unknown = [name for name in without if name not in known]
    if unknown:
        raise UsageError(
            f"--without {unknown[0]}: the source holds no such object",
            hint=f"it holds {', '.join(sorted(known))}",
        )


def _check(request: ImportRequest) -> None:
    try:
        run_id_of(request.run)
    except ValueError as error:
        raise UsageError(str(error), hint="choose another name: --run") from error
    if not request.as_name.isidentifier():
        raise UsageError(f"--as {request.as_name!r} cannot be a keyword of attach()")
    if request.step is not None and not 0 <= request.step < 2**63:
        raise UsageError(f"--step is {request.step}", hint="count of boundaries passed, 0 or more")


if __name__ == "__main__":
    sys.exit(main())

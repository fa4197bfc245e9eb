"""What each command does: find who can answer (the daemon, or directories), ask, show, and return the exit code."""

import argparse
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoint.catalogue import no_such_checkpoint
from ...core.errors import DaemonUnavailableError, NotFoundError, UsageError
from ...core.ids import CheckpointId
from ...core.paths import data_socket_path
from ..control.views import CheckpointView, Source, Verdict
from . import device_commands, render
from .output import EXIT_DONE, EXIT_FAILED, Output
from .words import directories_in

if TYPE_CHECKING:
    from ..control.ledger_check import LedgerVerdict

LEAVES_SHOWN_MAX = 2**31 - 1
"""The daemon has a bound of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a command is about."""

    run: str
    """Name or id; empty: all runs."""
    checkpoint: CheckpointId | None
    directories: tuple[Path, ...]
    """Empty: the daemon answers."""

    @property
    def title(self) -> str:
        """The target as it was given."""
        return self.run if self.checkpoint is None else f"{self.run}@{self.checkpoint}"


def parse_target(words: Sequence[str], storage: Sequence[str]) -> Target:
    """Return what the words name: those that are directories or hold a slash are storage, one other is the run.

    Raises:
        UsageError: more than one run is named.
    """
    directories = directories_in(words)
    runs = [word for word in words if word not in directories]
    if len(runs) > 1:
        raise UsageError(
            f"{len(runs)} runs are named: {', '.join(map(repr, runs))}", hint="name one at a time"
        )
    run, checkpoint = split_checkpoint(runs[0]) if runs else ("", None)
    return Target(
        run=run,
        checkpoint=checkpoint,
        directories=tuple(Path(each).absolute() for each in dict.fromkeys((*directories, *storage))),
    )


def status(arguments: argparse.Namespace) -> int:
    """`everstep status`."""
    from ..control.client import NO_DAEMON, connected  # noqa: PLC0415  grpc is slow to import

    hint = f"`everstep ls DIR ...` reads storage without a daemon; {NO_DAEMON}"
    with connected(data_socket_path(), hint=hint) as daemon:
        found = daemon.status()
        quotas = daemon.quotas()
    document = {
        "daemon": found.daemon,
        "quotas": quotas,
        "runs": found.runs,
        "stores": found.stores,
        "caches": found.caches,
        "groups": found.groups,
    }
    Output(as_json=arguments.json).show(document, lambda console: render.status(console, found, quotas))
    return EXIT_DONE


def list_checkpoints(arguments: argparse.Namespace) -> int:
    """`everstep ls`."""
    target = target_of(arguments)
    if target.checkpoint is not None:
        raise UsageError(f"ls takes a run, got {target.title!r}", hint=f"`everstep show {target.title}` does")
    with source_of(target) as (source, notes):
        found = source.checkpoints(target.run)
        problems, label = source.problems(target.run), source.label
        nothing = "" if found else _nothing_text(source, target.run)
    document = {"source": label, "notes": notes, "problems": problems, "checkpoints": found}
    Output(as_json=arguments.json).show(
        document, lambda console: render.checkpoints(console, found, (*notes, *problems), nothing)
    )
    return EXIT_DONE


def show(arguments: argparse.Namespace) -> int:
    """`everstep show`."""
    target = named_run(target_of(arguments), "show")
    leaf_count_max = LEAVES_SHOWN_MAX if arguments.leaves else 0
    with source_of(target) as (source, _):
        detail = source.detail(target.run, target.checkpoint, leaf_count_max=leaf_count_max)
    document = {
        "checkpoint": detail.summary,
        "segments": detail.segments,
        "leaf_count": detail.leaf_count,
        "leaves": detail.leaves,
    }
    Output(as_json=arguments.json).show(document, lambda console: render.detail(console, detail))
    return EXIT_DONE


def verify(arguments: argparse.Namespace) -> int:
    """`everstep verify`: all checkpoints, those of a run, or one."""
    target, output = target_of(arguments), Output(as_json=arguments.json)
    verified: list[Mapping[str, object]] = []
    with source_of(target) as (source, notes):
        # What has no whole manifest is no checkpoint, so it would not be missed below.
        problems = () if target.checkpoint else source.problems(target.run)
        is_intact = not problems
        output.progress(lambda console: render.problems(console, problems))
        for wanted in _wanted(source, target):
            try:
                verdict = source.verify(wanted.run_id, wanted.checkpoint)
            except NotFoundError:
                if target.checkpoint is not None:
                    raise
                continue  # retention has removed it since it was listed
            ledgers = _ledgers(verdict) if arguments.ledger and verdict.is_intact else None
            is_intact &= verdict.is_intact and not any(each.problems for each in ledgers or ())
            verified.append(_verdict_document(verdict, ledgers))
            output.progress(lambda console, v=verdict, found=ledgers: render.verdict(console, v, found))
        label, nothing = source.label, "" if verified else _nothing_text(source, target.run)
    document = {
        "ok": is_intact,
        "source": label,
        "notes": notes,
        "problems": problems,
        "checkpoints": verified,
    }
    output.show(
        document, lambda console: render.verified(console, len(verified), nothing, is_intact=is_intact)
    )
    return EXIT_DONE if is_intact else EXIT_FAILED


def remove(arguments: argparse.Namespace) -> int:
    """`everstep rm`."""
    target = named_run(target_of(arguments), "rm")
    if arguments.all == (target.checkpoint is not None):
        raise UsageError(
            f"{target.title!r} does not say what to remove",
            hint="`everstep rm RUN@ATTEMPT.STEP`, or `everstep rm RUN --all`",
        )
    with source_of(target, for_change=True) as (source, _):
        if target.checkpoint is None:
            removed = source.remove_run(target.run, force=arguments.force)
        else:
            removed = source.remove(target.run, target.checkpoint, force=arguments.force)
    document = {
        "target": target.title,
        "removed_count": removed.checkpoint_count,
        "freed_bytes": removed.freed_bytes,
    }
    Output(as_json=arguments.json).show(
        document, lambda console: render.removed(console, target.title, removed)
    )
    return EXIT_DONE


def stop(arguments: argparse.Namespace) -> int:
    """`everstep stop`."""
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    path, output = data_socket_path(), Output(as_json=arguments.json)
    try:
        with connected(path) as daemon:
            stopped = daemon.stop()
    except DaemonUnavailableError as error:
        if not isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            raise
        document: dict[str, object] = {"socket": str(path), "was_running": False}
        output.show(document, lambda console: render.nothing_to_stop(console, str(path)))
        return EXIT_DONE
    document = {
        "socket": str(path),
        "was_running": True,
        "persisted_count": stopped.persisted_count,
        "lost_count": stopped.lost_count,
        "attached_count": stopped.attached_count,
    }
    output.show(document, lambda console: render.stopped(console, str(path), stopped))
    return EXIT_FAILED if stopped.lost_count else EXIT_DONE


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "status": status,
    "ls": list_checkpoints,
    "show": show,
    "verify": verify,
    "rm": remove,
    "stop": stop,
    "device": device_commands.device,
}


@contextmanager
def source_of(target: Target, *, for_change: bool = False) -> Generator[tuple[Source, tuple[str, ...]]]:
    """Give who answers, and what a user should know about it."""
    if target.directories:
        from . import offline  # noqa: PLC0415  the daemon's side is slow to import, too

        with (offline.changing if for_change else offline.reading)(target.directories) as store:
            yield store, store.notes
        return
    from ..control.client import connected  # noqa: PLC0415

    hint = "name storage directories to read them without a daemon, or set EVERSTEP_SOCKET"
    with connected(data_socket_path(), hint=hint) as daemon:
        yield daemon, ()


def target_of(arguments: argparse.Namespace) -> Target:
    """Return what the arguments are about."""
    return parse_target(arguments.target, arguments.storage)


def named_run(target: Target, command: str, usage: str = "") -> Target:
    """Return a target that names a run; UsageError without one, which says how the command is `usage`d, if given."""
    if not target.run:
        so = f"`everstep {command} {usage}`; " if usage else ""
        raise UsageError(f"{command} needs a run", hint=f"{so}`everstep ls` lists them")
    return target


def split_checkpoint(text: str) -> tuple[str, CheckpointId | None]:
    """Return run and checkpoint of `RUN[@ATTEMPT.STEP]`; a name may hold an @ itself."""
    run, at, last = text.rpartition("@")
    if not (at and run):
        return text, None
    try:
        return run, CheckpointId.parse(last)
    except ValueError:
        return text, None


def _wanted(source: Source, target: Target) -> list[CheckpointView]:
    found = source.checkpoints(target.run)
    if target.checkpoint is None:
        return found
    chosen = [view for view in found if view.checkpoint == target.checkpoint]
    if not chosen:
        raise no_such_checkpoint(target.run, target.checkpoint, [view.checkpoint for view in found])
    return chosen


def _nothing_text(source: Source, run: str) -> str:
    """Return why a list is empty; of one run, which others there are."""
    if not run:
        return f"no checkpoints in {source.label}"
    others = ", ".join(dict.fromkeys(view.run_name for view in source.checkpoints("")))
    return f"run {run!r} has no checkpoint in {source.label}; runs that have: {others or 'none'}"


def _ledgers(verdict: Verdict) -> "list[LedgerVerdict]":
    from ..control.ledger_check import check_loaders  # noqa: PLC0415

    return check_loaders(verdict.summary, verdict.loaders)


def _verdict_document(verdict: Verdict, ledgers: "Sequence[LedgerVerdict] | None") -> Mapping[str, object]:
    document: dict[str, object] = {
        "checkpoint": verdict.summary,
        "ok": verdict.is_intact,
        "problems": verdict.problems,
        "segments": verdict.segments,
        "elapsed_s": verdict.elapsed_s,
    }
    return document if ledgers is None else document | {"ledgers": ledgers}

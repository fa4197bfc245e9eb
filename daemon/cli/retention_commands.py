"""Commands about what stays and whether it is still whole: tag, untag, scrub."""

import argparse
from collections.abc import Callable

from ...core.errors import NotFoundError, UsageError
from ...core.paths import data_socket_path
from . import render
from .node_commands import named_run, source_of, split_checkpoint, target_of
from .output import EXIT_DONE, Output


def tag(arguments: argparse.Namespace) -> int:
    """`everstep tag`."""
    target = named_run(target_of(arguments), "tag", "NAME RUN[@ATTEMPT.STEP]")
    with source_of(target, for_change=True) as (source, _):
        try:
            view = source.tag(target.run, target.checkpoint, arguments.name)
        except NotFoundError as error:
            if split_checkpoint(arguments.name)[1] is None or target.checkpoint is not None:
                raise
            raise UsageError(
                f"no run {target.run!r}: the tag's name comes first, and {arguments.name!r} reads as a checkpoint",
                hint=f"`everstep tag {target.title} {arguments.name}`",
            ) from error
    Output(as_json=arguments.json).show(
        {"tag": arguments.name, "checkpoint": view},
        lambda console: render.done(console, f"{view.title} has the tag {arguments.name!r} and stays"),
    )
    return EXIT_DONE


def untag(arguments: argparse.Namespace) -> int:
    """`everstep untag`."""
    target = named_run(target_of(arguments), "untag", "NAME RUN")
    if target.checkpoint is not None:
        raise UsageError(
            f"a tag names its checkpoint itself, got {target.title!r}",
            hint=f"`everstep untag {arguments.name} {target.run}`",
        )
    with source_of(target, for_change=True) as (source, _):
        checkpoint = source.untag(target.run, arguments.name)
    Output(as_json=arguments.json).show(
        {"tag": arguments.name, "run": target.run, "checkpoint": checkpoint},
        lambda console: render.done(
            console, f"{target.run}@{checkpoint} has no longer the tag {arguments.name!r}"
        ),
    )
    return EXIT_DONE


def scrub(arguments: argparse.Namespace) -> int:
    """`everstep scrub`: begins one in the daemon."""
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    target = target_of(arguments)
    if target.checkpoint is not None:
        raise UsageError(
            f"scrub takes a run or directories, got {target.title!r}",
            hint=f"`everstep verify {target.title}`",
        )
    hint = "`everstep verify DIR ...` reads storage without a daemon; EVERSTEP_SOCKET names another socket"
    with connected(data_socket_path(), hint=hint) as daemon:
        started = daemon.start_scrub(target.run, [path.resolve() for path in target.directories])
    document = {"checkpoint_count": started.checkpoint_count, "size_bytes": started.size_bytes}
    Output(as_json=arguments.json).show(document, lambda console: render.scrub_started(console, started))
    return EXIT_DONE


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"tag": tag, "untag": untag, "scrub": scrub}

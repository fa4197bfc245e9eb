"""`everstep token` and `everstep quota`; and the options that say how a daemon is called."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ...core.durations import duration_text, parse_duration
from ...core.errors import UsageError
from ...core.paths import data_socket_path
from .output import EXIT_DONE, Output

OPTIONS: Mapping[str, tuple[str, str]] = {
    "connect": ("EVERSTEP_CONNECT", "call the daemon at HOST:PORT, not the one of this user"),
    "tls_cert": ("EVERSTEP_TLS_CERTIFICATE", "with --connect: this caller's certificate (PEM)"),
    "tls_key": ("EVERSTEP_TLS_KEY", "with --connect: its key (PEM)"),
    "tls_ca": (
        "EVERSTEP_TLS_AUTHORITY",
        "with --connect: whose signature the daemon's certificate must have (PEM)",
    ),
    "tls_server_name": (
        "EVERSTEP_TLS_SERVER_NAME",
        "with --connect: name in the daemon's certificate; else the host's",
    ),
    "token_file": ("EVERSTEP_TOKEN_FILE", "call as whom `everstep token` has written this file for"),
}
"""By option: the variable that says the same, for scripts and for other tools, and the help."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what stands before any command: how the daemon is called."""
    group = parser.add_argument_group("how the daemon is called")
    for name, (variable, text) in OPTIONS.items():
        metavar = "HOST:PORT" if name == "connect" else "NAME" if name == "tls_server_name" else "FILE"
        group.add_argument(
            f"--{name.replace('_', '-')}", dest=name, metavar=metavar, help=f"{text} (${variable})"
        )


def apply_options(parsed: argparse.Namespace) -> None:
    """Let the rest of this process call the daemon so; options win over the environment."""
    for name, (variable, _) in OPTIONS.items():
        value = getattr(parsed, name, None)
        if value is not None:
            os.environ[variable] = value


def add_commands(add: Callable[..., argparse.ArgumentParser], as_json: argparse.ArgumentParser) -> None:
    """Add the two commands."""
    token = add(
        "token",
        parents=[as_json],
        help="make a token for another tool, list those that are valid, revoke one",
        description="Make a token with which another tool may call the daemon as this user, until its time is over.",
        epilog="It is written to a file that only this user can read: `everstep --token-file FILE status` and"
        " $EVERSTEP_TOKEN_FILE use it. Keep it out of arguments and environments: other users may read those.",
    )
    token.add_argument("what", nargs="?", choices=("list", "revoke"), help="instead of making one")
    token.add_argument(
        "token_id", nargs="?", metavar="ID", help="with revoke: which one; `token list` shows it"
    )
    token.add_argument("--ttl", metavar="TIME", help="how long it is valid: 30s, 10m, 1h, 7d; at most 30d")
    token.add_argument("--read-only", action="store_true", help="it may only look")
    token.add_argument("--name", default="", help="what it is for, as `token list` shows it; no secret")
    where = token.add_mutually_exclusive_group()
    where.add_argument("--file", type=Path, metavar="FILE", help="where it is written, with mode 0600")
    where.add_argument(
        "--stdout", action="store_true", help="print it instead: for a pipe into a secret store"
    )
    add("quota", parents=[as_json], help="show what each user has taken of the daemon, and what it may")


def token(arguments: argparse.Namespace) -> int:
    """`everstep token`."""
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    if arguments.what is None:
        return _make(arguments)
    if arguments.what == "list":
        with connected(data_socket_path()) as daemon:
            found = daemon.tokens()
        Output(as_json=arguments.json).show(
            {"tokens": found},
            lambda console: console.print(
                "\n".join(
                    f"{each.token_id}  {each.role}  uid {each.owner_uid}  {duration_text(each.left_s)} left"
                    + (f"  {each.name}" if each.name else "")
                    for each in found
                )
                or "no token is valid",
                markup=False,
                highlight=False,
            ),
        )
        return EXIT_DONE
    if not arguments.token_id:
        raise UsageError("token revoke needs an id", hint="`everstep token list` shows them")
    with connected(data_socket_path()) as daemon:
        daemon.revoke_token(arguments.token_id)
    Output(as_json=arguments.json).show(
        {"revoked": arguments.token_id},
        lambda console: console.print(f"{arguments.token_id} is not valid any more", highlight=False),
    )
    return EXIT_DONE


def _make(arguments: argparse.Namespace) -> int:
    from ..access.endpoint import write_token  # noqa: PLC0415
    from ..control.client import connected  # noqa: PLC0415

    if not arguments.ttl:
        raise UsageError("token needs --ttl", hint="`everstep token --ttl 1h --file FILE`")
    if arguments.file is None and not arguments.stdout:
        raise UsageError("nobody says where the token shall go", hint="--file FILE, or --stdout to print it")
    try:
        ttl_s = parse_duration(arguments.ttl)
    except ValueError as error:
        raise UsageError(f"--ttl {arguments.ttl!r}: {error}", hint="30s, 10m, 1h, 7d") from error
    with connected(data_socket_path()) as daemon:
        made = daemon.issue_token(ttl_s=ttl_s, is_read_only=arguments.read_only, name=arguments.name)
    if arguments.file is not None:
        write_token(arguments.file, made.token)
    document = {
        "token_id": made.info.token_id,
        "role": made.info.role,
        "left_s": made.info.left_s,
        "file": None if arguments.file is None else str(arguments.file),
    }
    if arguments.stdout:
        document["token"] = made.token
    said = (
        made.token
        if arguments.stdout
        else f"{arguments.file}: token {made.info.token_id}, {made.info.role}, valid for {arguments.ttl}"
    )
    Output(as_json=arguments.json).show(
        document, lambda console: console.print(said, markup=False, highlight=False, soft_wrap=True)
    )
    return EXIT_DONE


def quota(arguments: argparse.Namespace) -> int:
    """`everstep quota`."""
    from ..access.section import UNBOUNDED  # noqa: PLC0415
    from ..control.client import connected  # noqa: PLC0415
    from .render import amount_text  # noqa: PLC0415  rich is slow to import

    with connected(data_socket_path()) as daemon:
        found = daemon.quotas()
    lines: list[str] = []
    for user in found:
        lines.append(f"uid {user.uid}" + (f"  refused {user.refused_count}" if user.refused_count else ""))
        for each in user.bounded:
            is_open = each.name.endswith("_bytes") and each.bound >= UNBOUNDED
            bound = "no bound" if is_open else amount_text(each.name, each.bound)
            lines.append(f"  {each.name:<14}{amount_text(each.name, each.used)} of {bound}")
    Output(as_json=arguments.json).show(
        {"users": found},
        lambda console: console.print(
            "\n".join(lines) or "nobody has anything", markup=False, highlight=False
        ),
    )
    return EXIT_DONE


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"token": token, "quota": quota}

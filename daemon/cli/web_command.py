"""`everstep web`: an address that opens the daemon's page in a browser, logged in as this user, once."""

import argparse
import html
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ...core.durations import duration_text
from ...core.paths import data_socket_path
from .output import EXIT_DONE, EXIT_FAILED, Output

PAGE = "login.html"


def add_web(add: Callable[..., argparse.ArgumentParser], as_json: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    web = add(
        "web",
        parents=[as_json],
        help="print an address that opens the daemon's web page, logged in as you",
        epilog="The address works once, for minutes. On another machine: ssh -L PORT:127.0.0.1:PORT NODE, then open it"
        " there.",
    )
    web.add_argument("--open", action="store_true", help="open it in a browser of this machine")


def web(arguments: argparse.Namespace) -> int:
    """`everstep web`."""
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    socket_path = data_socket_path()
    with connected(socket_path) as daemon:
        url, valid_s = daemon.open_web_session()
    is_open = arguments.open and _open(url, socket_path.parent)
    output = Output(as_json=arguments.json)
    if arguments.json:
        output.show({"url": url, "valid_s": valid_s, "opened": is_open}, lambda _: None)
        return EXIT_DONE if is_open or not arguments.open else EXIT_FAILED
    if is_open:
        print("opened in a browser, logged in as you")
        return EXIT_DONE
    print(url)
    print(f"  works once, for {duration_text(valid_s)}; whoever opens it first sees what you may see")
    if arguments.open:
        print("  no browser could be started here: open the address yourself")
        return EXIT_FAILED
    return EXIT_DONE


def _open(url: str, folder: Path) -> bool:
    """Open the address by way of a file that only this user can read: a command line is everybody's to see."""
    import webbrowser  # noqa: PLC0415  the command line starts without it

    path = folder / PAGE
    path.unlink(missing_ok=True)
    fd = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR
    )
    with os.fdopen(fd, "w") as file:
        file.write(
            f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={html.escape(url)}">'
            "<title>everstep</title>\n"
        )
    return webbrowser.open(path.as_uri())


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"web": web}

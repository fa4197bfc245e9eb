"""The commands about operating a daemon: `config`, `debug`, `completion`. Their arguments, and what runs them."""

import argparse
from collections.abc import Callable
from typing import Any

from . import bundle_arguments, completion_arguments, config_arguments

NAMES = frozenset((config_arguments.NAME, bundle_arguments.NAME, completion_arguments.NAME))


def add_commands(
    commands: "argparse._SubParsersAction[Any]",  # pyright: ignore[reportPrivateUsage]
    as_json: argparse.ArgumentParser,
) -> None:
    """Add the commands of this module to the command line."""
    config = commands.add_parser(
        config_arguments.NAME, help=config_arguments.HELP, description=config_arguments.HELP
    )
    config_arguments.add_arguments(config, as_json)
    debug = commands.add_parser(
        bundle_arguments.NAME, help=bundle_arguments.HELP, description=bundle_arguments.HELP
    )
    bundle_arguments.add_arguments(debug, as_json)
    completion = commands.add_parser(
        completion_arguments.NAME, help=completion_arguments.HELP, description=completion_arguments.HELP
    )
    completion_arguments.add_arguments(completion)


def carry_out(arguments: argparse.Namespace, parser: Callable[[], argparse.ArgumentParser]) -> int:
    """Carry out one of the commands; `parser` makes the whole command line's."""
    if arguments.command == config_arguments.NAME:
        from . import config_commands  # noqa: PLC0415

        return config_commands.run(arguments)
    if arguments.command == bundle_arguments.NAME:
        from . import bundle_command  # noqa: PLC0415

        return bundle_command.run(arguments)
    from . import completion_command  # noqa: PLC0415

    return completion_command.run(arguments, parser())

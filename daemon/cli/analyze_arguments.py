"""What `everstep analyze` takes: its own options, and after `--` the script's."""

import argparse
from collections.abc import Sequence
from pathlib import Path

NAME = "analyze"
HELP = "measure what a training script waits for, and predict what would help"
EPILOG = (
    "The script runs three times, each time until enough steps were seen, in a scratch working folder that shows what"
    " this one shows: with a few batches again and again, with its files in memory, with its files on storage only."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; --json is its own, since it takes a file, too."""
    parser.epilog = EPILOG
    parser.usage = "everstep analyze [options] SCRIPT [-- ARGUMENTS OF THE SCRIPT]"
    parser.set_defaults(script_arguments=[], json_file=None)
    parser.add_argument(
        "script", type=Path, metavar="SCRIPT", help="a training script, as for `python SCRIPT`"
    )
    parser.add_argument(
        "--steps", type=_steps, default=50, help="steps to measure in each run (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup",
        type=_number,
        metavar="STEPS",
        help="steps of each epoch that do not count (default: as many as batches may be prepared ahead, and 3)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=60.0,
        help="fewer steps are enough once they took as long (default: %(default)g)",
    )
    parser.add_argument(
        "--deadline", type=_seconds, default=900.0, help="of each run, in seconds (default: %(default)g)"
    )
    parser.add_argument(
        "--loader",
        type=_number,
        metavar="N",
        help="which of the script's loaders, from 0 in the order of their first use (default: the first that trains)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    parser.add_argument(
        "--json",
        nargs="?",
        const=True,
        default=False,
        action=_Json,
        metavar="FILE",
        help="print one JSON document, or write it to a file",
    )


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command line's own arguments and the script's: those after the first `--` of `analyze`."""
    own = list(arguments)
    if own[:1] != [NAME] or "--" not in own:
        return own, []
    place = own.index("--")
    return own[:place], own[place + 1 :]


class _Json(argparse.Action):
    """`--json` prints, `--json FILE` writes."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, *_: object
    ) -> None:
        namespace.json = values is True
        namespace.json_file = None if values is True else Path(str(values))


def _steps(text: str) -> int:
    value = _number(text)
    if value < 4:
        raise argparse.ArgumentTypeError(f"{text}: fewer than 4 steps say nothing")
    return value


def _number(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value

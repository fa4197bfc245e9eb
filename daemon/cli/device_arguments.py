"""The words of `everstep device`: what it takes, and what it says of itself."""

import argparse

STORAGE_HINT = "--storage DIR ... names all directories of a store, to work without a daemon"

_STORAGE_HELP = "all directories of a store, to work on it without a daemon"
READMIT_HELP = """\
Take the device in DIR back. What that means depends on what DIR holds:

  - a member that was suspect, once you have checked it: it takes what it has
    missed and is well again, also while trainers run
  - a member that was missing and is mounted again, or answers again: it comes
    back with all it has, and nothing is lost
  - a device that was retired: it comes back as a new, empty device; what it
    holds is moved into its quarantine/, where you may delete it
  - an empty directory, such as a new drive in place of a retired one: it
    becomes a new device

For all but the first the store is closed and opened again. A daemon refuses
that while a trainer is attached to the store or snapshots wait in memory for a
restart.
"""


def add_arguments(device: argparse.ArgumentParser, as_json: argparse.ArgumentParser) -> None:
    """Add what `everstep device` takes; `as_json`: the options that all commands have."""
    parts = device.add_subparsers(dest="part", required=True, metavar="WHAT")
    storage = argparse.ArgumentParser(add_help=False)
    storage.add_argument(
        "--storage", nargs="+", action="extend", default=[], metavar="DIR", help=_STORAGE_HELP
    )
    common = [as_json, storage]

    listing = parts.add_parser("ls", parents=common, help="list devices and what lies on them")
    listing.add_argument("directories", nargs="*", metavar="DIR", help="read these without a daemon")

    drain = parts.add_parser("drain", parents=common, help="let a device get no new segments")
    _add_device(drain)
    drain.add_argument("--cancel", action="store_true", help="let it get new segments again")

    retire = parts.add_parser(
        "retire", parents=common, help="take a device out of its store for good: what lies on it is lost"
    )
    _add_device(retire)
    retire.add_argument("--yes", action="store_true", help="do not ask")
    retire.add_argument("--force", action="store_true", help="even one that is well and not drained")

    readmit = parts.add_parser(
        "readmit",
        parents=common,
        help="take a device back, or an empty directory in its place",
        description=READMIT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    readmit.add_argument("directory", metavar="DIR", help="its directory")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "device", metavar="DEVICE", help="id, the beginning of one, path, or name in the node's configuration"
    )

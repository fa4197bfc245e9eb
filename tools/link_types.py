"""Make build/types/everstep: the package as type checkers see it.

Type checkers cannot follow the import hook of an editable install with mapped folders. This farm of directory
links gives them (and only them) a tree in which `everstep.core` lies inside `everstep`. It is git-ignored, never
packaged, and made again by `make check`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FARM = ROOT / "build" / "types" / "everstep"
FOLDERS = ("core", "proto", "checkpoint", "dataloader", "daemon", "hook")


def main() -> None:
    FARM.mkdir(parents=True, exist_ok=True)
    targets = {name: ROOT / "everstep" / name for name in ("__init__.py", "py.typed")}
    targets |= {folder: ROOT / folder for folder in FOLDERS}
    for name, target in targets.items():
        link = FARM / name
        if link.is_symlink() and link.readlink() != target:  # the checkout was moved
            link.unlink()
        if not link.is_symlink():
            link.symlink_to(target)


if __name__ == "__main__":
    main()

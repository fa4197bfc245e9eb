"""Runs one mutant in a process of its own: 0 it was found, 3 it was not.

python mutant_run.py "commit: no fdatasync"
"""

import argparse
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from mutants import MUTANTS, ROOT, Mutant

FOUND, SURVIVED = 0, 3
SEEDS = (1, 2, 3)
DEADLINE_S = 240.0
"""Seconds against hanging for ever: then it says where every thread stands, and fails."""

CONTROL = Mutant(
    name="control: nothing changed",
    file="checkpoint/commit.py",
    edits=(("import time\n", "import time\n"),),
    workloads=("birth", "manifest on one device only"),
)
"""Must not be found."""


class MutantFinder(importlib.abc.MetaPathFinder):
    """Gives one module with another text; all else is the product."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._source = mutant.source().encode()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See MetaPathFinder."""
        del path, target
        if fullname != self._mutant.module:
            return None
        source = self._source

        class Loader(importlib.machinery.SourceFileLoader):
            def get_data(self, path: str) -> bytes:
                return source

            def path_stats(self, path: str) -> dict[str, float]:
                raise OSError("never from a cache")

        file = str(ROOT / self._mutant.file)
        return importlib.util.spec_from_file_location(fullname, file, loader=Loader(fullname, file))


def found_by(mutant: Mutant) -> str:
    """Return what found the mutant, which must be installed, or an empty string."""
    if mutant.test:
        return _failing_test(mutant.test)
    from crash_explorer import Effort, Exploration
    from workloads import WORKLOADS

    logging.disable(logging.CRITICAL)
    effort = Effort(lanes_max=20, losses_max=6, again_share=0.05, process_share=0.4, partial_share=1.0)
    for seed in SEEDS:
        for workload in WORKLOADS:
            if workload.name not in mutant.workloads:
                continue
            try:
                summary = Exploration(workload, effort).run(seed, violations_max=1)
            except Exception as exc:  # noqa: BLE001 - whatever goes wrong while it is recorded shows it
                return f"{workload.name}: {type(exc).__name__}: {exc}"
            if summary.violations:
                return summary.violations[0].splitlines()[0]
    return ""


def _failing_test(test: str) -> str:
    import pytest

    status = pytest.main(
        ["-q", "-x", "--no-header", "-p", "no:cacheprovider", f"--rootdir={ROOT}", str(ROOT / test)]
    )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{test} could not be run: {status!r}")
    return f"{test} fails" if status == pytest.ExitCode.TESTS_FAILED else ""


def main() -> int:
    """Run the mutant named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    mutants = {mutant.name: mutant for mutant in (*MUTANTS, CONTROL)}
    parser.add_argument("name", choices=mutants)
    mutant = mutants[parser.parse_args().name]
    faulthandler.dump_traceback_later(
        DEADLINE_S, exit=True, file=os.dup(sys.stderr.fileno())
    )  # pytest takes that one
    sys.meta_path.insert(0, MutantFinder(mutant))
    found = found_by(mutant)
    print(f"found by {found}" if found else "survived")
    return FOUND if found else SURVIVED


if __name__ == "__main__":
    sys.exit(main())

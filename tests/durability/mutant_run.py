"""Runs one mutant in a process of its own: 0 it was found, 3 it was not, 1 it shows nothing.

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
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from mutant_process import DEADLINE_S, FOUND, SURVIVED
from mutants import MUTANTS, ROOT, Mutant

SEED_COUNT = 3
"""Tried one after the other until the mutant is found."""

SLIPS = (NameError, TypeError, AttributeError, LookupError, SyntaxError, ImportError)
"""What a mutant raises that is written badly: it has not got as far as the fault that it stands for."""

CONTROL = Mutant(
    name="control: nothing changed",
    file="checkpoint/commit.py",
    edits=(("import time\n", "import time\n"),),
    workloads=("birth", "manifest on one device only"),
)
"""Must not be found."""

SLIPPED = tuple(
    Mutant(
        name=f"control: a slip, {number}",
        file="checkpoint/publication.py",
        edits=(("        self._refuse_retired()\n", "        self._no_such_method()\n"),),
        workloads=workloads,
        test=test,
    )
    for number, (workloads, test) in enumerate(
        (
            (("birth",), ""),
            ((), "tests/checkpoint/test_commit.py::test_a_state_without_tensors_is_a_manifest_alone"),
        )
    )
)
"""Must be refused."""


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


class BrokenMutantError(AssertionError):
    """The mutant does not do what its name says: that it fails proves nothing."""


def refuse_slip(error: BaseException) -> None:
    """Return unless this is a slip of the product's code; then raise BrokenMutantError."""
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [path.relative_to(ROOT).parts[0] for path in frames if path.is_relative_to(ROOT)]
    if isinstance(error, SLIPS) and [folder for folder in ours if folder != ".venv"][-1:] != ["tests"]:
        raise BrokenMutantError(f"{type(error).__name__}: {error}") from error


def found_by(mutant: Mutant, first_seed: int) -> str:
    """Return what found the mutant, which must be installed, or an empty string; BrokenMutantError for a slip."""
    if mutant.test:
        return _failing_test(mutant.test)
    from crash_explorer import Effort, Exploration
    from workloads import WORKLOADS

    logging.disable(logging.CRITICAL)
    effort = Effort(lanes_max=20, losses_max=6, again_share=0.05, process_share=0.4, partial_share=1.0)
    for seed in range(first_seed, first_seed + SEED_COUNT):
        for workload in WORKLOADS:
            if workload.name not in mutant.workloads:
                continue
            try:
                summary = Exploration(workload, effort).run(seed, violations_max=1)
            except Exception as exc:  # noqa: BLE001 - whatever else goes wrong while it is recorded shows it
                refuse_slip(exc)
                return f"{workload.name}: {type(exc).__name__}: {exc}"
            if summary.violations:
                return summary.violations[0].splitlines()[0]
    return ""


class _Failures:
    """A plugin of pytest that keeps what failed."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def pytest_exception_interact(self, call: pytest.CallInfo[object]) -> None:
        """See pytest."""
        if call.excinfo is not None:
            self.errors.append(call.excinfo.value)


def _failing_test(test: str) -> str:
    failures = _Failures()
    status = pytest.main(
        ["-q", "-x", "--no-header", "-p", "no:cacheprovider", f"--rootdir={ROOT}", str(ROOT / test)],
        plugins=[failures],
    )
    for error in failures.errors:
        refuse_slip(error)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{test} could not be run: {status!r}")
    return f"{test} fails" if status == pytest.ExitCode.TESTS_FAILED else ""


def main() -> int:
    """Run the mutant named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    mutants = {mutant.name: mutant for mutant in (*MUTANTS, CONTROL, *SLIPPED)}
    parser.add_argument("name", choices=mutants)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    mutant = mutants[given.name]
    faulthandler.dump_traceback_later(
        DEADLINE_S, exit=True, file=os.dup(sys.stderr.fileno())
    )  # pytest takes that one
    sys.meta_path.insert(0, MutantFinder(mutant))
    found = found_by(mutant, given.seed)
    print(f"found by {found}" if found else "survived")
    return FOUND if found else SURVIVED


if __name__ == "__main__":
    sys.exit(main())

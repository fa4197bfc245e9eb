"""Wrong versions of the product, read from `mutants.txt`; each must be found by the explorer or by a named test.

A mutant there is:

    == commit: no fdatasync              its name
    in checkpoint/commit.py              the file
    on two devices with collection       workloads, explored in this order until a violation shows; or
    test tests/…/test_x.py::test_y       a test that must fail
    -    exact text of the file          what is taken away
    +    other text                      what stands there instead, if anything
    ..                                   between two edits

Text that is not there exactly once is an error: the mutant has to be written anew, since nobody knows any more what
it would show.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.txt")


class StaleMutantError(AssertionError):
    """The product's text changed: this mutant cannot be made any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One wrong version."""

    name: str
    file: str
    """Below the root of the repository."""
    edits: tuple[tuple[str, str], ...]
    workloads: tuple[str, ...] = ()
    test: str = ""
    """Instead of workloads."""

    @property
    def module(self) -> str:
        """The module that it replaces."""
        return "everstep." + self.file.removesuffix(".py").replace("/", ".")

    def source(self) -> str:
        """Return the wrong text; StaleMutantError when it cannot be made."""
        text = (ROOT / self.file).read_text()
        for old, new in self.edits:
            if text.count(old) != 1:
                raise StaleMutantError(f"{self.name}: {text.count(old)} times in {self.file}: {old!r}")
            text = text.replace(old, new)
        return text


def parse(text: str) -> Iterator[Mutant]:
    """Yield the mutants of a list."""
    for block in ("\n" + text).split("\n== ")[1:]:
        name, *lines = block.rstrip("\n").splitlines()
        facts = [line.split(" ", 1) for line in lines if line[:1] not in "-+."]
        said = {key: [value for each, value in facts if each == key] for key in ("in", "on", "test")}
        assert len(said["in"]) == 1, f"{name}: which file?"
        assert len(facts) == sum(map(len, said.values())), f"{name}: {facts}"
        yield Mutant(
            name=name,
            file=said["in"][0],
            edits=tuple(_edits([line for line in lines if line[:1] in "-+."])),
            workloads=tuple(said["on"]),
            test="".join(said["test"]),
        )


def _edits(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for is_between, group in groupby(lines, key=lambda line: line == ".."):
        edit = list(group)
        if not is_between:
            old, new = ([line[1:] for line in edit if line[0] == sign] for sign in "-+")
            yield "\n".join(old), "\n".join(new)


MUTANTS = tuple(parse(LIST.read_text()))

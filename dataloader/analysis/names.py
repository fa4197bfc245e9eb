"""The names of files that all processes of a run have written down."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from .open_watch import NATIVE, WROTE


@dataclass(slots=True)
class Names:
    """Paths, each once, in the order of their first use."""

    read: dict[str, None] = field(default_factory=dict[str, None])
    native: dict[str, None] = field(default_factory=dict[str, None])
    """Opened by native code only."""
    written: dict[str, None] = field(default_factory=dict[str, None])

    def gather(self, folder: Path) -> None:
        """Add what the processes of a run wrote into its folder."""
        for path in sorted(folder.glob("*.names")):
            for line in path.read_bytes().split(b"\n")[:-1]:
                self._add(os.fsdecode(line))
        for path in self.read:
            self.native.pop(path, None)  # one process opened it by Python, another one has it mapped

    def _add(self, line: str) -> None:
        if line.startswith(NATIVE):
            self.native[line.removeprefix(NATIVE)] = None
        elif line.startswith(WROTE):
            self.written[line.removeprefix(WROTE)] = None
        else:
            self.read[line] = None

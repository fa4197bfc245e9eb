"""Every class of loaders is tapped once, whatever it does in its `__iter__`."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

from everstep.dataloader import DataLoader
from everstep.dataloader.analysis.conductor import Conductor
from everstep.dataloader.analysis.loader_tap import LoaderTap

DATA = TensorDataset(torch.arange(6))


class Recorded:
    """In place of a conductor: notes who iterates, and changes nothing."""

    def __init__(self) -> None:
        self.iterated: list[str] = []

    def iterate(self, loader: Any, make: Callable[[Any], Iterator[object]]) -> Iterator[object]:
        self.iterated.append(type(loader).__name__)
        return make(loader)


class Sharded(TorchDataLoader[Any]):
    """As Accelerate's: a generator over what torch gives."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Nested(TorchDataLoader[Any]):
    """Makes another loader within its own iteration, as ours does."""

    def __iter__(self) -> Any:
        for _ in range(2):
            yield from TorchDataLoader(DATA, batch_size=3)


def test_each_iteration_is_seen_once_whatever_the_class() -> None:
    recorded = Recorded()
    before = {kind: vars(kind)["__iter__"] for kind in (TorchDataLoader, Sharded, DataLoader)}
    with LoaderTap(cast(Conductor, recorded)).installed():
        for make, batches in ((TorchDataLoader, 3), (Sharded, 3), (DataLoader, 3), (Nested, 4)):
            loader = cast(Any, make)(DATA, batch_size=2)
            assert len(list(loader)) == batches
            assert len(list(loader)) == batches
    assert recorded.iterated == [
        "DataLoader", "DataLoader", "Sharded", "Sharded", "DataLoader", "DataLoader", "Nested", "Nested"
    ]  # fmt: skip
    assert {kind: vars(kind)["__iter__"] for kind in before} == before
    assert len(list(TorchDataLoader(DATA, batch_size=2))) == 3
    assert len(recorded.iterated) == 8, "once it is over nobody looks"


def test_the_command_line_needs_no_torch() -> None:
    code = (
        "import sys, everstep.daemon.cli.analyze_command, everstep.dataloader.analysis.script_program;"
        " sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0

"""A training script as users have it, run by the tests under `everstep analyze`: prints, saves, fails on request."""

import argparse
import ctypes
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

_held: list[int] = []


class Files(Dataset[torch.Tensor]):
    """One file, one sample."""

    def __init__(self, folder: str, *, by_native_code: bool = False) -> None:
        self.paths = sorted(map(str, Path(folder).glob("*.bin")))
        self.by_native_code = by_native_code

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        path = self.paths[index]
        if self.by_native_code:
            libc = ctypes.CDLL(None)
            fd = libc.open(path.encode(), os.O_RDONLY)
            _held.append(fd)
            raw = os.read(fd, 1 << 20)
        else:
            raw = Path(path).read_bytes()
        return torch.frombuffer(bytearray(raw[:4096]), dtype=torch.uint8).float()


class NativeSource:
    """A source that reads by native code and closes each file at once: nobody sees it but by what it declares."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def get_bytes(self, index: int) -> bytes:
        libc = ctypes.CDLL(None)
        fd = libc.open(self.paths[index].encode(), os.O_RDONLY)
        try:
            return os.read(fd, 1 << 20)
        finally:
            libc.close(fd)

    def fingerprint(self) -> str:
        return "native"

    def files(self) -> Iterator[str]:
        yield from self.paths


class OfSource(Dataset[torch.Tensor]):
    """What a source holds."""

    def __init__(self, source: NativeSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> torch.Tensor:
        raw = self.source.get_bytes(index)
        return torch.frombuffer(bytearray(raw[:4096]), dtype=torch.uint8).float()


class Caching(Files):
    """Writes beside what is there, in its workers, and over it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        Path(f"runs/cache-{index}.txt").write_text("prepared")
        with Path("runs/log.txt").open("a") as log:
            log.write("prepared")
        return sample


def tidy() -> None:
    """Do to the working folder what scripts do to begin: remove, cut, touch, make again."""
    shutil.rmtree("old")
    os.truncate("best.pt", 1)
    Path("notes.txt").chmod(0o600)
    Path("notes.txt").touch()
    Path("old").mkdir()
    Path("old/new.txt").write_text("new")


class Stream(IterableDataset[torch.Tensor]):
    """The same, in order only."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.files[index] for index in range(len(self.files)))


def train(options: argparse.Namespace) -> None:
    data = Files("../data", by_native_code=options.what == "native")
    keywords: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": options.workers,
        "multiprocessing_context": options.method,
    }
    if options.what == "tidies":
        tidy()
        data = Caching("../data")
    if options.what == "declares":
        loader = DataLoader(OfSource(NativeSource(data.paths)), shuffle=True, **keywords)
    elif options.what == "stream":
        loader = DataLoader(Stream(data), **keywords)
    else:
        loader = DataLoader(data, shuffle=True, **keywords)
    if options.what == "validates":
        with torch.no_grad():
            for _ in DataLoader(data, batch_size=2):
                pass
    model = torch.nn.Linear(4096, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for epoch in range(options.epochs):
        if options.what == "renews":
            loader = DataLoader(data, shuffle=True, **keywords)
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            model(batch.div_(255)).sum().backward()
            optimizer.step()
            if step == 0:
                torch.save(model.state_dict(), "best.pt")
                Path("runs/log.txt").write_text(f"epoch {epoch}")
            if options.what == "raises" and step == 2:
                raise ValueError("the loss is NaN")
            if options.what == "short" and step == 2:
                break


def attached(options: argparse.Namespace) -> None:
    """The loop of a script that keeps checkpoints in `--storage`."""
    import everstep

    loader = everstep.DataLoader(Files("../data"), batch_size=4, shuffle=True, num_workers=options.workers)
    model = torch.nn.Linear(4096, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    with everstep.attach("analysed", **state, storage=[options.storage], every=1) as run:
        run.restore()
        for _ in run.epochs(options.epochs):
            for batch in loader:
                optimizer.zero_grad()
                model(batch.div_(255)).sum().backward()
                optimizer.step()
                run.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", default="trains")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--method", default=None)
    parser.add_argument("--storage")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    print("said by the script", flush=True)
    if options.what == "hangs":
        time.sleep(600)
    if options.what == "exits":
        sys.exit(3)
    if options.what == "vanishes":
        os._exit(9)
    if options.what == "attaches":
        attached(options)
    elif options.what != "idle":
        train(options)


if __name__ == "__main__":
    main()

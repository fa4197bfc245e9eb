"""A training loop in the test's own process, a daemon beside it, and damage: for the tests of bad input."""

import contextlib
import itertools
import os
import subprocess
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.checkpoint.testing import opened
from everstep.core.errors import EverstepError
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import daemon_process, node_daemon
from everstep.dataloader import DataLoader
from everstep.hook.run import Run

_seeds = itertools.count(1)
"""Each trainer begins from other weights: what it restores cannot be what it had."""


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(8.0) * (index + 1))


@dataclass
class Training:
    """A training loop in this process; `saved` are the weights of each complete checkpoint, the newest last."""

    run: Run
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[torch.Tensor]
    saved: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _batches: Iterator[torch.Tensor] | None = None

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1).clone() for parameter in self.model.parameters()])

    def step(self) -> None:
        if self._batches is None:
            self._batches = (batch for _ in self.run.epochs(1000) for batch in self.loader)
        batch = next(self._batches)
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.run.step()

    def save(self) -> str:
        """Train until one more checkpoint is complete; return its name."""
        before = self.run.report()
        while (report := self.run.report()).checkpoints_complete == before.checkpoints_complete:
            assert report.failures == before.failures
            if report.skipped != before.skipped:  # the arena is being allocated
                threading.Event().wait(0.02)
            self.attempt_to_save()
        self.saved[report.last_complete] = self.weights()
        return report.last_complete

    def attempt_to_save(self) -> None:
        self.run.checkpoint()
        self.step()
        assert self.run.wait(60)


def objects(*, count: int = 64, width: int = 8) -> dict[str, Any]:
    torch.manual_seed(next(_seeds))
    model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loader": DataLoader(Numbers(count), batch_size=4, shuffle=True),
    }


@contextlib.contextmanager
def training(
    storage: list[Path] | list[str], *, count: int = 64, width: int = 8, more: Any = None, **options: Any
) -> Generator[Training]:
    state = objects(count=count, width=width)
    extra = {} if more is None else {"more": more}
    with everstep.attach("bad", **state, **extra, storage=storage, every=10**6, **options) as run:
        made = Training(run, **state)
        yield made
    made.saved[run.report().last_complete] = made.weights()


def own_socket() -> Path:
    return Path(os.environ["EVERSTEP_SOCKET"])


@contextlib.contextmanager
def service() -> Generator[subprocess.Popen[bytes]]:
    """A private daemon of this block's own."""
    own_socket().with_name("daemon.log").unlink(missing_ok=True)
    with daemon_process(own_socket()) as process:
        yield process


def node_config(storage: list[Path], memory: str) -> Path:
    """The configuration of a node daemon over the directories: nvme0, nvme1, …"""
    config = storage[0].with_name("node.toml")
    devices = "".join(f'nvme{number} = "{path}"\n' for number, path in enumerate(storage))
    config.write_text(f'[daemon]\nsocket = "{own_socket()}"\n[memory]\n{memory}\n[devices]\n{devices}')
    return config


@contextlib.contextmanager
def node_service(storage: list[Path], memory: str) -> Generator[list[str]]:
    """A node daemon over the directories; gives the names of its devices."""
    own_socket().with_name("daemon.log").unlink(missing_ok=True)
    with node_daemon(node_config(storage, memory), own_socket()):
        yield [f"nvme{number}" for number in range(len(storage))]


def saved_run(storage: list[Path], count: int = 2, width: int = 8) -> dict[str, torch.Tensor]:
    """A run that ended well, with `count` checkpoints; its daemon is gone."""
    with service(), training(storage, width=width) as trained:
        for _ in range(count - 1):
            trained.save()
        trained.step()
    assert len(trained.saved) == count, trained.saved.keys()
    return trained.saved


def assert_restores(
    storage: list[Path] | list[str], saved: dict[str, torch.Tensor], name: str | None = None, **options: Any
) -> Any:
    """A new trainer gets the checkpoint `name`, else the newest, bit for bit; return what restore() said."""
    name = name or list(saved)[-1]
    with contextlib.ExitStack() as stack:
        if not own_socket().exists():
            stack.enter_context(service())
        trained = stack.enter_context(training(storage, **options))
        restored = trained.run.restore()
        assert restored is not None
        assert str(restored.checkpoint) == name
        assert torch.equal(trained.weights(), saved[name])
        return restored


@contextlib.contextmanager
def refused(kind: type[EverstepError], *parts: object, hint: str) -> Generator[None]:
    """The error is of exactly this class, its message holds all parts, its hint says what to do."""
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    for part in parts:
        assert str(part) in caught.value.message
    assert hint in caught.value.hint


def segments(device: Path, checkpoint: str) -> list[Path]:
    """The files of a checkpoint on a device, by the generation that its manifest names."""
    with opened([device.parent / "d0", device.parent / "d1"], read_only=True) as (store, _):
        (run,) = store.runs()
        record = run.shard(CheckpointId.parse(checkpoint), 0)
        return sorted(device.glob(f"runs/*/*/data/{record.generation}/*.safetensors"))


def manifests(storage: list[Path], checkpoint: str) -> list[Path]:
    found = [path for device in storage for path in device.glob(f"runs/*/*/commits/{checkpoint}.0.mf")]
    assert len(found) == len(storage)
    return found


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def truncate(path: Path, to: float = 0.5) -> None:
    os.truncate(path, int(path.stat().st_size * to))

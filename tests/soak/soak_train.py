"""A training run of the soak: says to the oracle what its state is before each boundary, and what it is told of it.

Ends normally when the file of `--stop` is there. With `--check` it restores, says what it got, and ends.
"""

import argparse
import hashlib
import json
import logging
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from oracle_client import OracleClient
from torch import nn

import everstep
from everstep.core.errors import DaemonUnavailableError, RunBusyError
from everstep.dataloader import CachedDataset, DataLoader, SharedLoader

SAMPLES, BATCH_SIZE, SAMPLE_BYTES = 480, 8, 2048
WIDTH = 256
BUDGET = 0.1
COST_STEPS = 300
"""An attempt that is shorter says nothing of its cost."""
AGAIN = 75
"""Exit code: the service was not there; to be started again."""
AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Source:
    """Samples that anybody can make anew from their number."""

    name: str = "soak"

    def __len__(self) -> int:
        return SAMPLES

    def get_bytes(self, index: int) -> bytes:
        return index.to_bytes(8, "little") + random.Random(f"{self.name}-{index}").randbytes(SAMPLE_BYTES)

    def fingerprint(self) -> str:
        return self.name


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The source through the node's cache, each sample compared with what it is."""

    def __init__(self, cached: CachedDataset[bytes]) -> None:
        self.cached = cached
        self.wrong: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        content = self.cached[index]
        if content != Source().get_bytes(index):
            self.wrong.append(index)
        return torch.sin(torch.arange(float(WIDTH)) * (content[0] + 1)), index


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the hash of all tensors under the names that they have in a checkpoint."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.state.{name}.{key}"] = value
    contents = {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }
    return digest_of(contents)


def digest_of(contents: dict[str, bytes]) -> str:
    """Return the hash of leaves by their names."""
    sha = hashlib.sha256()
    for name, content in sorted(contents.items()):
        sha.update(f"{name} {len(content)}\n".encode() + content)
    return sha.hexdigest()


class Training:
    """One rank of one run."""

    def __init__(self, given: argparse.Namespace, oracle: OracleClient) -> None:
        self.given, self.oracle = given, oracle
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(given.seed + self.rank)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.samples = Samples(CachedDataset(Source(), budget="4MB"))
        common: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": given.seed}
        self.loader: Any = (
            SharedLoader(self.samples, group=given.group, **common)
            if given.group
            else DataLoader(self.samples, **common)
        )
        self.acknowledged = ""

    def say(self, what: str, **facts: object) -> None:
        """Tell the oracle of this run."""
        self.oracle.say(what, run=self.given.name, **facts)

    def say_state(self, run: everstep.Run, epoch: int, ids: list[int] | None) -> None:
        """Tell what the state is before the boundary that comes next."""
        self.say(
            "state",
            rank=self.rank,
            attempt=run.attempt,
            step=run.steps + 1,
            digest=digest(self.model, self.optimizer),
            epoch=epoch,
            ids=ids,
        )

    def say_acknowledged(self, run: everstep.Run) -> None:
        """Tell what is complete, if it is news."""
        newest = run.report().last_complete or ""
        if newest and newest != self.acknowledged:
            self.acknowledged = newest
            attempt, _, step = newest.partition(".")
            self.say("acknowledged", rank=self.rank, attempt=int(attempt), step=int(step))

    def restore(self, run: everstep.Run) -> None:
        """Restore, and tell what came."""
        found = run.restore()
        where = None if found is None else [found.checkpoint.attempt, found.checkpoint.step]
        self.say(
            "begun",
            rank=self.rank,
            world_size=self.world_size,
            attempt=run.attempt,
            restored=where,
            digest=digest(self.model, self.optimizer),
            samples=SAMPLES,
            source="nothing" if found is None else found.source,
        )
        print(json.dumps({"attempt": run.attempt, "restored": where}), flush=True)

    def train(self, run: everstep.Run) -> None:
        """Train until the file says that it is enough, or all ranks at the end of an epoch."""
        for epoch in run.epochs(1 << 30):
            for x, ids in self.loader:
                self.model(x).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                ends = self.agreed(self.given.stop.exists())
                time.sleep(self.given.step_s)
                self.say_state(run, epoch, torch.as_tensor(ids).tolist())
                run.step()
                self.say_acknowledged(run)
                for sample in self.samples.wrong:
                    self.say("wrong_sample", rank=self.rank, sample=sample)
                self.samples.wrong.clear()
                if ends:
                    return

    def agreed(self, flag: bool) -> bool:
        """Return whether any rank says so: ranks go in step, as in any training."""
        if self.world_size == 1:
            return flag
        voted = torch.tensor([float(flag)])
        dist.all_reduce(voted)
        return bool(voted.item())

    def end(self, run: everstep.Run) -> None:
        """Close the run, whose last boundary has the state as it is."""
        self.say_state(run, run.epoch, None)
        run.close()
        self.say_acknowledged(run)


def attach(training: Training) -> everstep.Run:
    """Return the run, with every checkpoint of the last few kept."""
    given = training.given
    return everstep.attach(
        given.name,
        model=training.model,
        optimizer=training.optimizer,
        loader=training.loader,
        storage=given.storage,
        every=given.every or None,
        limits=None if given.every else everstep.Limits(budget=BUDGET, most_s=20.0),
        keep=everstep.Keep(last=3),
    )


def say_cost(training: Training, run: everstep.Run) -> None:
    """Tell what checkpoints took of an attempt that was long enough and asked for a budget."""
    report = run.report()
    if not training.given.every and run.steps >= COST_STEPS and report.train_s:
        share = (report.boundary_s + report.guard_s) / report.train_s
        training.say("cost", share=share, budget=BUDGET, steps=run.steps)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--oracle", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    parser.add_argument("--storage", nargs="+", required=True)
    parser.add_argument("--every", type=int, default=10, help="0: the controller decides")
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", help="share the preparation of batches with the other jobs of this group")
    parser.add_argument("--check", action="store_true")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    oracle = OracleClient(given.oracle)
    training = Training(given, oracle)
    try:
        run = attach(training)
    except (DaemonUnavailableError, RunBusyError) as error:
        print(error, file=sys.stderr)
        time.sleep(AGAIN_S)
        return AGAIN
    try:
        training.restore(run)
    except DaemonUnavailableError as error:
        print(error, file=sys.stderr)
        return AGAIN
    if given.check:
        os._exit(0)  # no last boundary
    training.train(run)
    say_cost(training, run)
    training.end(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The loader with real worker processes and real ranks: the same samples, whoever prepares them."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from everstep.dataloader import DataLoader, Ledger
from everstep.dataloader.order_format import OrderKind, OrderSpec
from everstep.dataloader.order_plan import order

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _resource_tracker() -> None:  # pyright: ignore[reportUnusedFunction]
    """Python's spawn starts one tracker process for good; have it before the first look at what is left behind."""
    resource_tracker.ensure_running()


class Noisy(Dataset[list[float]]):
    """A sample is its number, what the global generators give, and `mark`, which a worker_init_fn may change."""

    mark = 0.0

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> list[float]:
        info = get_worker_info()
        assert info is None or info.dataset is self
        return [index, random.random(), float(np.random.rand()), float(torch.rand(())), self.mark]


def make(**arguments: object) -> DataLoader[object]:
    defaults: dict[str, object] = {"dataset": Noisy(), "batch_size": 4, "shuffle": True, "seed": 9}
    return cast(Callable[..., DataLoader[object]], DataLoader)(**(defaults | arguments))


def rows(batch: object) -> list[list[float]]:
    return torch.stack(cast(list[torch.Tensor], batch)).T.tolist()


def whole_order(n: int, epoch: int) -> list[int]:
    return order(OrderSpec(kind=OrderKind.PERMUTED, seed=9), epoch, n).at(np.arange(n)).tolist()


def epochs(loader: DataLoader[object], count: int) -> list[list[list[float]]]:
    return [[row for batch in loader for row in rows(batch)] for _ in range(count)]


@pytest.mark.parametrize("persistent", [False, True])
def test_two_workers_give_what_none_give_augmentation_included(persistent: bool) -> None:
    loader = make(num_workers=2, persistent_workers=persistent)
    assert epochs(loader, 3) == epochs(make(), 3)
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


def test_spawned_workers() -> None:
    data = TensorDataset(torch.arange(23))
    loader = make(dataset=data, num_workers=1, multiprocessing_context="spawn", persistent_workers=True)
    for epoch in range(2):
        assert [row[0] for batch in loader for row in rows(batch)] == whole_order(23, epoch)
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


def test_resume_at_another_number_of_workers_with_batches_prefetched() -> None:
    """Two workers prefetch four batches; the state knows only those that the loop got."""
    whole, seen = whole_order(23, 0), list[float]()
    state, ledger = make().state_dict(), Ledger(9)
    for workers, steps in [(2, 1), (0, 2), (1, 1), (2, 10)]:
        loader = make(num_workers=workers)
        loader.load_state_dict(state)
        loader.ledger = ledger
        for step, batch in enumerate(loader):
            seen += [row[0] for row in rows(batch)]
            state, ledger = loader.state_dict(), Ledger.from_state(loader.ledger.state())
            assert state["cursor"] == len(seen)
            if step + 1 == steps:
                break
    assert seen == whole
    assert Ledger.verify([ledger], state) == []


def test_persistent_workers_go_on_after_a_break() -> None:
    loader = make(num_workers=2, persistent_workers=True)
    seen = [row[0] for row in rows(next(iter(loader)))]
    with pytest.warns(UserWarning, match="goes on with epoch 0 at sample 4"):
        seen += [row[0] for batch in loader for row in rows(batch)]
    assert seen == whole_order(23, 0)
    assert [row[0] for batch in loader for row in rows(batch)] == whole_order(23, 1)


def test_creating_and_running_workers_draws_nothing_from_the_global_generators() -> None:
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    for _ in make(num_workers=2):
        assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before


def mark_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker_id
    cast(Noisy, info.dataset).mark = 7.0


def test_worker_init_fn_sees_the_users_dataset() -> None:
    loader = make(num_workers=2, worker_init_fn=mark_dataset)
    assert {row[4] for batch in loader for row in rows(batch)} == {7.0}
    assert cast(Noisy, loader.dataset).mark == 0.0


CRASH_SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from everstep.dataloader import DataLoader, Ledger

fuse, stored, workers, victim = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
trainer = os.getpid()

class Fragile:
    def __len__(self):
        return 23
    def __getitem__(self, index):
        if index == victim and fuse.exists():
            fuse.unlink()
            os.kill(trainer, signal.SIGKILL)
        return index

loader, trained = DataLoader(Fragile(), batch_size=4, shuffle=True, seed=9, num_workers=workers), []
if stored.exists():
    trained, state, ledger = json.loads(stored.read_text())
    loader.load_state_dict(state)
    loader.ledger = Ledger.from_state(ledger)
while loader.epoch < 2:
    for batch in loader:
        trained += batch.tolist()
        new = stored.with_suffix(".new")
        new.write_text(json.dumps([trained, loader.state_dict(), loader.ledger.state()]))
        new.replace(stored)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_kill_in_mid_epoch_a_restart_loses_and_repeats_nothing(tmp_path: Path, workers: int) -> None:
    """The trainer is killed, in its own dataset or by a worker; what workers had prefetched is in no state."""
    fuse, stored, expected = tmp_path / "fuse", tmp_path / "state", whole_order(23, 0) + whole_order(23, 1)
    fuse.touch()
    command = [sys.executable, "-c", CRASH_SCRIPT, str(fuse), str(stored), str(workers), str(expected[13])]
    crashed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert crashed.returncode == -signal.SIGKILL
    trained = json.loads(stored.read_text())[0] if stored.exists() else []
    assert len(trained) <= 12
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    trained, state, ledger = json.loads(stored.read_text())
    assert trained == expected
    assert Ledger.verify([Ledger.from_state(ledger)], state) == []


RANK_SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch.utils.data import TensorDataset
from everstep.dataloader import DataLoader

rank, path = int(sys.argv[1]), sys.argv[2]
loader = DataLoader(TensorDataset(torch.arange(23)), batch_size=4, shuffle=True, seed=9)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
ids, weights = [], []
for (batch,) in loader:
    ids.append(batch.tolist())
    weights.append(loader.weight)
    everybody = torch.tensor([len(ids)])
    dist.all_reduce(everybody)  # hangs if a rank has no batch at some step
    assert everybody.item() == 2 * len(ids)
dist.barrier()
dist.destroy_process_group()
print(json.dumps([len(loader), ids, weights, loader.ledger.state(), loader.state_dict()]))
"""


def test_two_ranks_of_torch_distributed_share_one_order(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", RANK_SCRIPT, str(rank), str(tmp_path / "store")] for rank in range(2)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    results = [cast(list[object], json.loads(output.splitlines()[-1])) for output in outputs]
    steps = [cast(list[list[int]], result[1]) for result in results]
    assert [i for pair in zip(*steps, strict=True) for part in pair for i in part] == whole_order(23, 0)
    assert [cast(list[float], result[2])[-1] for result in results] == [
        pytest.approx(8 / 7),
        pytest.approx(6 / 7),
    ]
    assert results[0][4] == results[1][4]
    ledgers = [Ledger.from_state(result[3]) for result in results]
    assert Ledger.verify(ledgers, cast(dict[str, object], results[0][4])) == []


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_pinned(workers: int) -> None:
    for batch in make(num_workers=workers, pin_memory=True):
        assert all(column.is_pinned() for column in cast(list[torch.Tensor], batch))

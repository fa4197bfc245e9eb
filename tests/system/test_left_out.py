"""`everstep verify --ledger` after a run that left samples out: what was trained is the dataset, less what is named."""

import io
import json
import os
import signal
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from in_process import service
from torch.utils.data import Dataset

import everstep
from everstep.daemon.cli.main import main
from everstep.dataloader import DataLoader, skip
from everstep.dataloader.order_format import OrderKind, OrderSpec, ids_between

COUNT, SEED = 31, 3
(DEADLY,) = ids_between(OrderSpec(kind=OrderKind.PERMUTED, seed=SEED), 0, COUNT, (5, 6))


class Deadly(Dataset[torch.Tensor]):
    """Sample i is eight times i; reading one of them kills the worker."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((8,), float(index))


def train(storage: list[Path]) -> list[int]:
    """Train an epoch and a step with a hole, a sample that kills workers and a short end; return the epoch's ids."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(Deadly(), batch_size=4, shuffle=True, seed=SEED, num_workers=2, drop_last=True)
    loader.load_state_dict(skip(loader.state_dict(), 8, 12))
    trained: list[int] = []
    options = {"model": model, "optimizer": optimizer, "loader": loader, "storage": storage, "every": 10**6}
    with everstep.attach("left-out", **options) as run:  # type: ignore[arg-type]
        for epoch in run.epochs(2):
            for batch in loader:
                trained += [int(row[0]) for row in batch] if epoch == 0 else []
                optimizer.zero_grad()
                (model(batch / COUNT).square().mean() * loader.weight).backward()
                optimizer.step()
                run.step()
                if epoch == 1:
                    break
    return trained


def verify(storage: list[Path], *more: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        code = main(["verify", "left-out", "--ledger", *more, *map(str, storage)])
    assert code == 0, out.getvalue()
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_what_was_trained_is_the_dataset_less_what_is_named(devices: list[Path]) -> None:
    with service(), pytest.warns(RuntimeWarning, match=f"sample {DEADLY} is quarantined"):
        trained = train(devices)
    (ledger,) = json.loads(verify(devices, "--json"))["checkpoints"][0]["ledgers"]
    assert ledger["problems"] == []
    of_epoch_0 = ledger["left_out"][0]
    assert of_epoch_0["epoch"] == 0
    assert of_epoch_0["quarantined"] == {"count": 1, "ids": [DEADLY]}
    assert of_epoch_0["skipped_positions"] == [[8, 12]]
    named = [sample for why in ("quarantined", "skipped", "dropped") for sample in of_epoch_0[why]["ids"]]
    assert len(named) == len(set(named)) == 1 + 4 + (COUNT - 4) % 4
    assert sorted(trained) == sorted(set(range(COUNT)) - set(named))
    text = verify(devices)
    assert "each sample exactly once, less what is named" in text
    assert f"epoch 0: less sample {DEADLY} quarantined" in text
    assert "skipped, positions [8, 12)" in text

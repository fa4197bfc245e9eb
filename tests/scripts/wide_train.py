"""A run whose state is larger than a container's /dev/shm, with loader workers; one JSON line at the end."""

import argparse
import hashlib
import json
import os

import torch
from torch import nn

import everstep
from everstep.dataloader import DataLoader

MIB = 1024**2


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256,), float(index))


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", nargs="+", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Linear(256, 50_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loader = DataLoader(Rows(), batch_size=32, shuffle=True, num_workers=1)
    with everstep.attach(
        "wide", model=model, optimizer=optimizer, loader=loader, storage=args.storage, every=1000
    ) as run:
        restored = run.restore()
        first = digest(model)
        for _ in run.epochs(run.epoch + 1):
            for batch in loader:
                optimizer.zero_grad()
                model(batch).mean().backward()
                optimizer.step()
                run.step()
    report = run.report()
    shm = os.statvfs("/dev/shm")
    print(
        json.dumps(
            {
                "shm_mib": shm.f_blocks * shm.f_frsize // MIB,
                "state_mib": 2 * sum(p.numel() * 4 for p in model.parameters()) // MIB,
                "restored": None if restored is None else str(restored.checkpoint),
                "complete": report.last_complete,
                "failures": list(report.failures),
                "first_digest": first,
                "last_digest": digest(model),
            }
        )
    )


if __name__ == "__main__":
    main()

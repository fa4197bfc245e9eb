"""Train until killed, with checkpoints, the cache and shared preparation; prints `step N`. Arguments: the storage."""

import sys

import torch

import everstep
from everstep.dataloader import SharedLoader

SAMPLES = 64


class Source:
    """Random-looking samples, the same in every process."""

    def __len__(self) -> int:
        return SAMPLES

    def get_bytes(self, index: int) -> bytes:
        return bytes((index + each) % 256 for each in range(256))

    def fingerprint(self) -> str:
        return "observed"


def decode(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).float() / 255


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = everstep.CachedDataset(Source(), decode=decode, budget=1 << 20)
    loader = SharedLoader(dataset, batch_size=8, shuffle=True, seed=0, group="observed")
    with everstep.attach(
        "observed", model=model, optimizer=optimizer, loader=loader, storage=sys.argv[1:], every=5
    ) as run:
        run.restore()
        step = 0
        for _ in run.epochs(1_000_000):
            for batch in loader:
                loss = (model(batch) - batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step()
                step += 1
                print(f"step {step}", flush=True)


if __name__ == "__main__":
    main()

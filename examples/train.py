"""Train a small GPT with everstep: kill it at any moment and start it again, it goes on where it was."""

import argparse
import logging

import torch
from model import GPT, Bytes
from torch.nn import functional

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--windows", type=int, default=3200)
parser.add_argument("--storage", nargs="+", required=True)
args = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="%(message)s")

torch.manual_seed(0)
loader = everstep.DataLoader(Bytes(args.windows, 128), batch_size=16, shuffle=True, num_workers=1)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))

state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
with everstep.attach("gpt", **state, storage=args.storage, every=20) as run:
    run.restore()
    for epoch in run.epochs(args.epochs):
        for x, y in loader:
            loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            run.log(loss=loss.item())
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            run.step()

"""The same on several ranks: `torchrun --nproc-per-node=2 train_ddp.py`. Each rank saves and restores its part."""

import argparse
import logging

import torch
import torch.distributed as dist
from model import GPT, Bytes
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--windows", type=int, default=3200)
parser.add_argument("--storage", nargs="+", required=True)
args = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="%(message)s")

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # dropout differs between ranks; DDP gives all the weights of rank 0
loader = everstep.DataLoader(Bytes(args.windows, 128), batch_size=16, shuffle=True, num_workers=1)
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))

state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
with everstep.attach("gpt", **state, storage=args.storage, every=20) as run:
    run.restore()
    for epoch in run.epochs(args.epochs):
        for x, y in loader:
            loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) * loader.weight
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            run.log(loss=loss.item())
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            run.step()
dist.destroy_process_group()

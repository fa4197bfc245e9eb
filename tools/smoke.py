"""Train a few steps, stop, start again and restore: the shortest proof that an installed everstep works.

Run from any folder with the interpreter under test; writes to a temporary folder only and ends its daemon. Exit
status 1 and a sentence when something is not as it should be.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from everstep import Run
    from everstep.dataloader import DataLoader

STEPS = 5


def train(folder: Path, *, restore: bool) -> None:
    """Run one trainer: print the step and a digest of the state, trained here or restored."""
    import everstep

    if "torch" in sys.modules or "numpy" in sys.modules:
        sys.exit("smoke: `import everstep` alone imported torch or numpy")
    import torch

    from everstep.dataloader import DataLoader

    torch.manual_seed(1 if restore else 2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=8)
    storage = [str(folder / "disk0"), str(folder / "disk1")]
    run = everstep.attach("smoke", model=model, optimizer=optimizer, loader=loader, storage=storage, every=1)
    run.restore()
    if not restore:
        _few_steps(run, model, optimizer, loader)
    digest = hashlib.sha256()
    tensors = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    for tensor in tensors:
        digest.update(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))
    print(len(tensors), digest.hexdigest())
    run.close()


def _few_steps(
    run: "Run", model: "Module", optimizer: "Optimizer", loader: "DataLoader[tuple[Tensor, ...]]"
) -> None:
    for _ in run.epochs(2):
        for count, (batch,) in enumerate(loader, start=1):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            run.step()
            if count == STEPS:
                return


def trainer(folder: Path, phase: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", __file__, phase, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"smoke: {phase} failed with exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.split("\n")[-2]


def everstep(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("everstep")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"smoke: {' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="es-") as temporary:
        folder = Path(temporary)
        socket = folder / "s" / "data.sock"
        os.environ["EVERSTEP_SOCKET"] = str(socket)
        for name in ("s", "disk0", "disk1"):
            (folder / name).mkdir(mode=0o700)
        trained = trainer(folder, "train")
        restored = trainer(folder, "restore")
        if trained != restored:
            sys.exit(f"smoke: restored state differs from the trained one:\n{trained}\n{restored}")
        deadline = time.monotonic() + 30
        while socket.exists():
            if time.monotonic() > deadline:
                sys.exit("smoke: the private daemon did not exit after a clean close()")
            time.sleep(0.05)
        if "smoke" not in everstep("ls", str(folder / "disk0"), str(folder / "disk1")):
            sys.exit("smoke: `everstep ls` does not list the run")
    print(f"smoke: state of {trained.split()[0]} tensors restored bit for bit")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(Path(sys.argv[2]), restore=sys.argv[1] == "restore")
    else:
        main()

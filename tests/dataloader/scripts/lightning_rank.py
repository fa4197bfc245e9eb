"""One rank of a job with Lightning's DDP, under torchrun on gloo: one JSON line on stdout.

`lightning_rank.py FOLDER first` saves FOLDER/mid.ckpt after two steps, and ends there; `… rest` goes on from it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as lightning
import torch

from everstep.dataloader import DataLoader, Ledger

SAMPLES, BATCH_SIZE, EPOCHS, STEPS = 17, 4, 2, 2


class Module(lightning.LightningModule):
    """Notes what is trained; a batch of weight 0 is padding."""

    def __init__(self, loader: DataLoader[torch.Tensor]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.loader = loader
        self.trained: list[list[int]] = []
        self.padding: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        is_padding = self.loader.weight == 0
        self.trained.append([] if is_padding else batch.tolist())
        self.padding += batch.tolist() if is_padding else []
        return self.layer(batch.float().unsqueeze(1)).mean() * self.loader.weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class SavesInTheMiddle(lightning.Callback):
    """Saves a checkpoint after some steps, on all ranks at once, as users' own callbacks do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == STEPS:
            trainer.save_checkpoint(self._path)


def main(folder: Path, part: str) -> None:
    torch.set_num_threads(1)
    dataset = cast(Any, range(SAMPLES))
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, seed=3)
    module, path = Module(loader), folder / "mid.ckpt"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        max_steps=STEPS if part == "first" else -1,
        callbacks=[SavesInTheMiddle(path)] if part == "first" else [],
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
    )
    ledger = folder / f"ledger-{trainer.global_rank}.json"
    if part == "rest":
        loader.ledger = Ledger.from_state(json.loads(ledger.read_text()))
    trainer.fit(module, loader, ckpt_path=None if part == "first" else path)
    ledger.write_text(json.dumps(loader.ledger.state()))
    said = {"rank": trainer.global_rank, "trained": module.trained, "padding": module.padding}
    os.write(1, (json.dumps(said | {"state": loader.state_dict()}) + "\n").encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    os._exit(0)  # gloo may drop its last work while the interpreter ends, and abort (pytorch#179291)

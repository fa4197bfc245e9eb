"""What `everstep analyze` is shown with: a small network on photos that are decoded and resized for each batch.

    python examples/photos.py --make                    # once: 800 JPEGs below build/photos
    everstep analyze examples/photos.py -- --workers 1

Needs Pillow and NumPy. Nothing in it knows everstep.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

FOLDER = Path(__file__).resolve().parents[1] / "build" / "photos"
COUNT = 800
SIZE = (512, 384)
QUALITY = 88


class Photos(Dataset[tuple[torch.Tensor, int]]):
    """The JPEGs of a folder as float images of 3 x 128 x 128 in [0, 1], each with one of ten classes."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as image:
            pixels = np.array(image.convert("RGB").resize((128, 128), Image.Resampling.BICUBIC))
        return torch.from_numpy(pixels).permute(2, 0, 1) / 255, index % 10


def make(folder: Path) -> None:
    """Write the JPEGs: clouds of every size, so that they cost as much to decode as photos do."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for number in range(COUNT):
        total = np.zeros((SIZE[1], SIZE[0], 3))
        for octave in range(2, 9):
            small = generator.integers(0, 256, (3 << octave, 4 << octave, 3), dtype=np.uint8)
            total += np.asarray(Image.fromarray(small).resize(SIZE, Image.Resampling.BICUBIC)) / 2**octave
        Image.fromarray(np.uint8(total * (255 / total.max()))).save(folder / f"{number}.jpg", quality=QUALITY)


def main() -> None:
    """Train for some epochs, or make the photos."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    if args.make:
        make(FOLDER)
        return
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Photos(FOLDER), batch_size=8, shuffle=True, num_workers=args.workers)
    for _ in range(args.epochs):
        for images, classes in loader:
            loss = functional.cross_entropy(model(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()

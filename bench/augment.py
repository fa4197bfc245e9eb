"""What training does to an image: decode, random resized crop, flip."""

import io
import random

import torch
from PIL import Image

OUTPUT_SIZE = 224
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
"""Of torchvision's RandomResizedCrop."""


def augmented(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """Return an image decoded, cropped at random, resized and perhaps flipped: uint8 [3, 224, 224].

    Draws from `random`, which loaders seed in their workers.
    """
    with Image.open(io.BytesIO(data)) as image:
        box = _resized_crop(image.size)
        small = image.resize((OUTPUT_SIZE, OUTPUT_SIZE), Image.Resampling.BILINEAR, box)
    if random.random() < 0.5:
        small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return pixels.view(OUTPUT_SIZE, OUTPUT_SIZE, 3).permute(2, 0, 1)


def _resized_crop(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the box of a random resized crop, of an area and an aspect in the usual ranges."""
    area = size[0] * size[1] * random.uniform(*AREA)
    aspect = random.uniform(*ASPECT)
    width, height = min((area * aspect) ** 0.5, size[0]), min((area / aspect) ** 0.5, size[1])
    left, upper = random.uniform(0, size[0] - width), random.uniform(0, size[1] - height)
    return left, upper, left + width, upper + height

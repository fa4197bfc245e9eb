"""Real JPEGs: crops of the photographs that scikit-image and scikit-learn ship, each about 100 KB.

    python bench/jpegs.py FOLDER --images 20000      # made once; a folder that has them already is left as it is

The photographs lie in the wheels; nothing is downloaded and neither library is imported:
`pip install --no-deps scikit-image scikit-learn`. Each image is a function of (seed, number) alone. No torch here: the
processes that make them start at once.
"""

import argparse
import functools
import importlib.metadata
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from PIL import Image

VERSION = 1
IMAGES = 20_000
SEED = 0
TARGET_BYTES = 100_000
SIZE = (512, 384)
"""Pixels, or the other way round: with TARGET_BYTES some 4 bits a pixel, as ImageNet has."""
CROP_AREA = (0.35, 1.0)
QUALITIES = (60, 99)
TRIES = 3
NEAR = 0.15
"""How far from TARGET_BYTES an image may be before another quality is tried."""
CHUNK = 200

PHOTOGRAPHS = {
    "scikit-image": (
        "astronaut.png", "brick.png", "chelsea.png", "coffee.png", "grass.png", "gravel.png",
        "hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png", "motorcycle_right.png", "retina.jpg", "rocket.jpg",
    ),
    "scikit-learn": ("china.jpg", "flower.jpg"),
}  # fmt: skip
"""Photographs, no drawings or masks, by the package that has them."""


class PhotographsError(Exception):
    """The photographs are not installed."""


def photographs() -> dict[str, Path]:
    """Return the files of the photographs by name.

    Raises:
        PhotographsError: a package is missing.
    """
    return {
        f"{path.stem}": path for package, names in PHOTOGRAPHS.items() for path in _files_of(package, names)
    }


def _files_of(package: str, names: Sequence[str]) -> list[Path]:
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise PhotographsError(
            f"{package} is not installed: pip install --no-deps {' '.join(PHOTOGRAPHS)}"
        ) from error
    found = {file.name: Path(str(file.locate())) for file in files if file.parent.name in {"data", "images"}}
    if missing := [name for name in names if name not in found]:
        raise PhotographsError(f"{package} has no {', '.join(missing)}")
    return [found[name] for name in names]


def made(folder: Path, count: int, *, seed: int = SEED, sources: dict[str, Path] | None = None) -> Path:
    """Return the folder with `count` images in a folder for each photograph; made where they are not there yet."""
    target = folder / f"everstep-jpegs-{count}-{seed}"
    files = photographs() if sources is None else sources
    note = {"version": VERSION, "count": count, "seed": seed, "photographs": sorted(files)}
    done = target.with_suffix(".json")
    if done.exists() and json.loads(done.read_text()) == note:
        return target
    done.unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    for name in files:
        (target / name).mkdir(parents=True)
    chunks = [range(begin, min(begin + CHUNK, count)) for begin in range(0, count, CHUNK)]
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        for _ in pool.map(functools.partial(_make, target, files, seed), chunks):
            pass
    done.write_text(json.dumps(note))
    return target


def _make(target: Path, files: dict[str, Path], seed: int, numbers: range) -> None:
    """Write the images of these numbers."""
    names = sorted(files)
    for number in numbers:
        name = names[number % len(names)]
        data = image_of(*_opened(name, str(files[name])), random.Random(f"{seed} {number}"))
        (target / name / f"{number:06}.jpg").write_bytes(data)


@functools.cache
def _opened(name: str, path: str) -> tuple[Image.Image, int]:
    """Return a photograph, and the quality at which a crop of it has about the wanted size."""
    with Image.open(path) as file:
        photograph = file.convert("RGB")
    low, high = QUALITIES
    whole = photograph.resize(SIZE, Image.Resampling.BICUBIC, _crop(photograph.size, random.Random(name)))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(_jpeg(whole, middle)) <= TARGET_BYTES else (low, middle - 1)
    return photograph, low


def image_of(photograph: Image.Image, quality: int, rng: random.Random) -> bytes:
    """Return a random crop as JPEG, near to TARGET_BYTES where its quality can make it so."""
    size = SIZE if rng.random() < 0.5 else (SIZE[1], SIZE[0])
    crop = photograph.resize(size, Image.Resampling.BICUBIC, _crop(photograph.size, rng))
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    data = _jpeg(crop, quality)
    for _ in range(TRIES):
        ratio = len(data) / TARGET_BYTES
        better = quality + (3 if ratio < 1 - NEAR else -3 if ratio > 1 + NEAR else 0)
        better = min(max(better, QUALITIES[0]), QUALITIES[1])
        if better == quality:
            break
        quality = better
        data = _jpeg(crop, quality)
    return data


def _crop(size: tuple[int, int], rng: random.Random) -> tuple[float, float, float, float]:
    """Return a random box: left, upper, right, lower."""
    share = rng.uniform(*CROP_AREA) ** 0.5
    width, height = share * size[0], share * size[1]
    left, upper = rng.uniform(0, size[0] - width), rng.uniform(0, size[1] - height)
    return left, upper, left + width, upper + height


def _jpeg(image: Image.Image, quality: int) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def main() -> int:
    """Make them and say where they are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    try:
        target = made(args.folder, args.images, seed=args.seed)
    except PhotographsError as error:
        print(f"jpegs: {error}", file=sys.stderr)
        return 1
    sizes = [path.stat().st_size for path in target.glob("*/*.jpg")]
    print(f"{target}: {len(sizes)} images, {sum(sizes) / len(sizes) / 1000:.1f} KB on average")
    return 0


if __name__ == "__main__":
    sys.exit(main())

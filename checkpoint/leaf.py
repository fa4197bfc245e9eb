"""What a leaf is: one named tensor (or long byte string) of the training state, described without torch."""

import functools
import math

from msgspec import Struct
from msgspec.structs import force_setattr

from .dtype_format import itemsize_bytes

NAME_LENGTH_MAX = 4096
"""Characters of a leaf's name. A manifest repeats names, and is read whole."""


class LeafSpec(Struct, frozen=True, kw_only=True, gc=False):
    """Name and memory shape of one leaf.

    `strides` are in elements, as torch gives them; a leaf is *dense*: its elements fill
    `size_bytes` consecutive bytes in the order that the strides say. `replicas` is the number of
    ranks that hold the same bytes (1: only this rank). `global_shape` and `global_offset` place a
    shard in the whole tensor; for an unsharded leaf they are `shape` and zeros.
    """

    name: str
    dtype: str
    """torch's name without the prefix: float32, bfloat16, float8_e4m3fn, complex64, … (dtype_format.py)."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    replicas: int = 1
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    size_bytes: int = 0
    """Bytes of the leaf's elements, whatever is given; 0 for an empty tensor."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a leaf needs a name")
        if not len(self.shape) == len(self.strides) == len(self.global_shape) == len(self.global_offset):
            raise ValueError(
                f"leaf {self.name!r}: shape, strides, global_shape and global_offset differ in length"
            )
        if min(self.shape, default=0) < 0 or min(self.strides, default=0) < 0:
            raise ValueError(f"leaf {self.name!r}: negative size or stride")
        force_setattr(self, "size_bytes", math.prod(self.shape) * itemsize_bytes(self.dtype))

    @property
    def is_contiguous(self) -> bool:
        """Tell whether storage order is row-major order, so that the leaf may be cut along dim 0."""
        return self.strides == contiguous_strides(self.shape) or self.size_bytes == 0


@functools.lru_cache(4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return torch's row-major strides (in elements) of a shape; dimensions of size 0 count as 1."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def whole_leaf(name: str, dtype: str, shape: tuple[int, ...], *, replicas: int = 1) -> LeafSpec:
    """Return the spec of an unsharded, row-major leaf."""
    return LeafSpec(
        name=name,
        dtype=dtype,
        shape=shape,
        strides=contiguous_strides(shape),
        replicas=replicas,
        global_shape=shape,
        global_offset=(0,) * len(shape),
    )


class Alias(Struct, frozen=True, kw_only=True, gc=False):
    """A leaf whose bytes lie inside another leaf's (tied weights, views of one storage): stored once, listed here."""

    name: str
    of: str
    """Name of the leaf that holds the bytes."""
    offset_bytes: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

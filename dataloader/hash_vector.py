"""The mixer of hash_format.py over numpy arrays of uint64; a test holds the two equal."""

import numpy as np
import numpy.typing as npt

from .hash_format import MULTIPLIER_1, MULTIPLIER_2

Words = npt.NDArray[np.uint64]

_M1, _M2 = np.uint64(MULTIPLIER_1), np.uint64(MULTIPLIER_2)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def mix64_array(values: Words) -> Words:
    """Return `mix64` of each element, in a new array."""
    mixed = values ^ (values >> _S30)
    mixed *= _M1
    mixed ^= mixed >> _S27
    mixed *= _M2
    mixed ^= mixed >> _S31
    return mixed


def mix64_twice_array(values: Words, key_1: int, key_2: int) -> Words:
    """Return `mix64_twice` of each element, in a new array."""
    return mix64_array(mix64_array(values + np.uint64(key_1)) ^ np.uint64(key_2))

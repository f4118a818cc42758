"""Pseudo-random numbers and permutations that are functions of (key, index): nothing is stored.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); a
permutation is a Feistel network over it, walked until it falls into the range (Black and Rogaway,
CT-RSA 2002). Both stay the same on every machine and in every version.
"""

import hashlib
from functools import lru_cache

import numpy as np

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = 4


@lru_cache(maxsize=256)
def derive_key(*parts: str | int) -> int:
    """A 64-bit key for whatever the parts name."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def mix(value: int) -> int:
    """SplitMix64's finaliser of a 64-bit integer."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def random_bits(key: int, indices: np.ndarray) -> np.ndarray:
    """64 random bits that belong to each index: uint64 ``[n]``.

    In place, as ``n`` may be all documents of a corpus.
    """
    value = indices.astype(np.uint64)
    value += np.uint64(1)
    value *= np.uint64(_GAMMA)
    value += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value ^= value >> np.uint64(shift)
        value *= np.uint64(factor)
    value ^= value >> np.uint64(31)
    return value


def uniform(key: int, indices: np.ndarray) -> np.ndarray:
    """A number in [0, 1) that belongs to each index: float64 ``[n]``."""
    value = random_bits(key, indices)
    value >>= np.uint64(11)
    return value * 2.0**-53


def permute(index: int, size: int, key: int) -> int:
    """The image of ``index`` under the permutation of ``range(size)`` that ``key`` names."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mix((key + turn * _GAMMA + right) & _MASK) & low)
        index = left << half | right
        if index < size:
            return index

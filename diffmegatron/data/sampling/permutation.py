"""Pseudo-random numbers and permutations as functions of (key, index), without stored state.

The random bits come from the finaliser (the last mixing function) of the generator SplitMix64
(Steele, Lea and Flood, OOPSLA 2014). The finaliser is also the round function of a Feistel network,
which permutes the numbers below a power of two. The network is applied repeatedly until the result
is below the wanted size (Black and Rogaway, CT-RSA 2002).
"""

import hashlib
from functools import lru_cache

import numpy as np

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
# Shift and factor of each multiplication in SplitMix64's finaliser.
_FINALISER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_ROUNDS = 4


@lru_cache(maxsize=256)
def derive_key(*parts: str | int) -> int:
    """Return a 64-bit key, derived from ``parts`` by sha256."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def mix(value: int) -> int:
    """Apply SplitMix64's finaliser to a 64-bit integer."""
    for shift, factor in _FINALISER:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def random_bits(key: int, indices: np.ndarray) -> np.ndarray:
    """Return 64 pseudo-random bits for each of the n indices, uint64 ``[n]``."""
    value = indices.astype(np.uint64)
    value += np.uint64(1)
    value *= np.uint64(_GAMMA)
    value += np.uint64(key)
    for shift, factor in _FINALISER:
        value ^= value >> np.uint64(shift)
        value *= np.uint64(factor)
    value ^= value >> np.uint64(31)
    return value


def uniform(key: int, indices: np.ndarray) -> np.ndarray:
    """Return a random number in [0, 1) for each of the n indices, float64 ``[n]``."""
    value = random_bits(key, indices)
    value >>= np.uint64(11)
    return value * 2.0**-53


def permute(index: int, size: int, key: int) -> int:
    """Return the image of ``index`` under a permutation of ``range(size)`` that ``key`` selects."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mix((key + turn * _GAMMA + right) & _MASK) & low)
        index = left << half | right
        if index < size:
            return index

"""Makes random numbers that depend on a seed and a position alone, whatever was drawn before.

Source: Philox 4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The CUDA kernels
(csrc/kernels/cuda/sampling) compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROUNDS = 10
MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], np.uint32)
HALF = np.uint64(32)


def random_bits(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return 64 random bits for each pair of a seed and a position.

    Args:
        seeds: R whole numbers; only their lowest 64 bits count.
        positions: R absolute positions of the tokens to choose.

    Returns:
        [R] uint64.
    """
    counters = np.zeros((len(positions), 4), np.uint32)
    counters[:, :2] = _halves(positions)
    words = philox(counters, _halves(seeds)).astype(np.uint64)
    return words[:, 0] << HALF | words[:, 1]


def philox(counters: npt.NDArray[np.uint32], keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return the blocks of Philox 4x32-10 for counters [R, 4] and keys [R, 2], as [R, 4] uint32."""
    words, key = counters, keys.copy()
    for _ in range(ROUNDS):
        products = words[:, ::2] * MULTIPLIERS  # [R, 2] uint64
        high, low = (products >> HALF).astype(np.uint32), products.astype(np.uint32)
        mixed = high[:, ::-1] ^ words[:, 1::2] ^ key
        words = np.stack([mixed[:, 0], low[:, 1], mixed[:, 1], low[:, 0]], axis=1)
        key += KEY_STEPS
    return words


def _halves(numbers: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Split whole numbers into their two lowest words, [R, 2]; the lower comes first."""
    lowest = np.array([number % 2**64 for number in numbers], np.uint64)
    return np.stack([lowest.astype(np.uint32), (lowest >> HALF).astype(np.uint32)], axis=1)

"""Chooses tokens from logits on the host, exactly as the CUDA kernels do on a device.

Tokens are ordered by (logit, index), ascending, and weighed in fixed point: exp((logit - max) / temperature) * 2^40.
Repetition penalty, temperature, top_k, top_p and min_p leave an end of that order, and the random bits of (seed,
position) point into its weight. Weights are integers, so that their sums do not depend on how they are added up.

Source: the order and definitions of transformers' logits processors; min-p, arXiv 2407.01082.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ortolan.runtime.generate.draw import BAD, Draw
from ortolan.runtime.generate.random import random_bits

Floats = npt.NDArray[np.float32]
UNIT = np.float32(2.0**40)  # weight of the most likely token
WEIGHTLESS = np.float32(28.5)  # so far below the largest, in units of the temperature, a logit's weight is 0
BLOCK = 512


def choose(logits: Floats, draws: Sequence[Draw | None]) -> list[int]:
    """Choose one token per row of logits.

    Args:
        logits: [R, V] float32; not changed.
        draws: R; None: no choice is wanted.

    Returns:
        R token ids; 0 where none is wanted, and `BAD` wherever a row contains NaN or infinity.
    """
    best, lowest = logits.argmax(axis=1), logits.min(axis=1)  # NaN is the largest to one, the least to the other
    sound = np.isfinite(lowest) & np.isfinite(logits[np.arange(len(logits)), best])
    tokens: list[int] = np.where(sound, 0, BAD).tolist()
    wanted = [(row, draw) for row, draw in enumerate(draws) if draw is not None and tokens[row] != BAD]
    drawn = [draw for _, draw in wanted if draw.is_random]
    bits = iter(random_bits([draw.seed for draw in drawn], [draw.position for draw in drawn]).tolist() if drawn else ())
    for row, draw in wanted:
        if draw.is_random:
            tokens[row] = _draw(_penalized(logits[row], draw), draw, next(bits))
        else:
            tokens[row] = int(_penalized(logits[row], draw).argmax() if draw.has_penalty else best[row])
    return tokens


def penalize(logits: Floats, seen: Sequence[int] | npt.NDArray[np.integer], penalty: float) -> Floats:
    """Divide positive logits [V] of tokens in `seen` by the penalty, and multiply negative ones; all stay finite."""
    result, largest = logits.copy(), np.finfo(np.float32).max
    places, penalty = np.asarray(seen, np.int64), float(np.float32(penalty))
    given = logits[places].astype(np.float64)
    result[places] = np.where(given > 0, given / penalty, given * penalty).clip(-largest, largest)
    return result


def _penalized(logits: Floats, draw: Draw) -> Floats:
    return penalize(logits, draw.seen, draw.sampling.repetition_penalty) if draw.has_penalty else logits


def _draw(logits: Floats, draw: Draw, bits: int) -> int:
    """Choose a token of logits [V] by 64 random bits."""
    order = _Order(_candidates(logits, draw), draw.inverse_temperature, np.float32(draw.sampling.min_p))
    dropped = max(order.low_weight, _tail_weight(order, 1.0 - draw.sampling.top_p))
    logit, nth = order.logit_at(dropped + (bits * (order.total - dropped) >> 64))
    return int(np.flatnonzero(logits == logit)[nth])


def _candidates(logits: Floats, draw: Draw) -> Floats:
    """Return the logits that top_k keeps, but for those whose weight is 0 anyway."""
    with np.errstate(over="ignore"):
        least = logits.max() - WEIGHTLESS / draw.inverse_temperature
    if 0 < draw.sampling.top_k < len(logits):
        least = max(least, np.partition(logits, -draw.sampling.top_k)[-draw.sampling.top_k])
    kept: Floats = logits[logits >= least]
    return kept


def _tail_weight(order: _Order, tail_mass: float) -> int:
    """Return the weight of the tail that top_p drops, whole tokens only: at most a share of all, and not all."""
    if tail_mass <= 0.0:
        return 0
    return order.weight_before(min(int(tail_mass * float(order.total)), order.total - 1))


class _Order:
    """Logits in ascending order, and their weights, which are added up block by block: large new arrays take longest.

    Attributes:
        total: weight of all.
        low_weight: of those whose share of the largest one's probability is below min_p.
    """

    def __init__(self, logits: Floats, inverse_temperature: np.float32, min_p: np.float32) -> None:
        """Sort the logits in place."""
        logits.sort()
        weights = logits - logits[-1]
        weights *= inverse_temperature
        np.exp(weights, out=weights)
        low = int(np.searchsorted(weights, min_p))
        weights *= UNIT
        np.rint(weights, out=weights)
        self._logits, self._weights = logits, weights
        whole = len(weights) // BLOCK
        sums = weights[: whole * BLOCK].reshape(whole, BLOCK).sum(axis=1, dtype=np.int64)
        self._begins = np.concatenate([[0], np.cumsum(sums)])  # [whole + 1], weight before each block
        self.total = self._weight_of(len(weights))
        self.low_weight = self._weight_of(low)

    def weight_before(self, target: int) -> int:
        """Return the weight of what comes before the logit that a target below `total` falls on."""
        return self._weight_of(self._find(target))

    def logit_at(self, target: int) -> tuple[np.float32, int]:
        """Return the logit that a target below `total` falls on, and how many equal ones come before it."""
        place = self._find(target)
        logit = self._logits[place]
        return logit, place - int(np.searchsorted(self._logits, logit))

    def _weight_of(self, count: int) -> int:
        """Return the weight of the first `count` logits."""
        block = count // BLOCK
        return int(self._begins[block]) + int(self._weights[block * BLOCK : count].sum(dtype=np.int64))

    def _find(self, target: int) -> int:
        block = int(np.searchsorted(self._begins, target, side="right")) - 1
        ends = np.cumsum(self._weights[block * BLOCK : (block + 1) * BLOCK], dtype=np.int64)
        return block * BLOCK + int(np.searchsorted(ends, target - int(self._begins[block]), side="right"))

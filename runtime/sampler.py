"""Chooses a token from logits.

Source: the order and definitions of transformers' logits processors; min-p, arXiv 2407.01082.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.runtime.options import Sampling

SEED_BITS = 63


@dataclass(slots=True, kw_only=True)
class Generation:
    """A generation under way: with the sequence's tokens, all that its next tokens depend on.

    Attributes:
        sampling: with a seed.
        max_new_tokens: after which it ends.
        count: tokens chosen so far; each took one draw of the random numbers.
        logits: of the prompt, [V] or as a device holds them, until the first token is chosen.
    """

    sampling: Sampling
    max_new_tokens: int
    count: int = 0
    logits: Any = None

    def __post_init__(self) -> None:
        if self.sampling.seed is None:
            self.sampling = dataclasses.replace(self.sampling, seed=secrets.randbits(SEED_BITS))

    @property
    def can_go_on(self) -> bool:
        """Whether what the next token depends on is still there."""
        return self.count > 0 or self.logits is not None


class Sampler:
    """Draws tokens; equal seeds and logits give equal tokens."""

    def __init__(self, options: Sampling, draws: int = 0) -> None:
        """Start behind the first `draws` tokens of a generation."""
        self._options = options
        bits = np.random.PCG64(options.seed)
        bits.advance(draws)  # choosing a token takes one number
        self._generator = np.random.Generator(bits)

    def choose(self, logits: npt.NDArray[np.float32], history: Sequence[int]) -> int:
        """Choose a token from logits [V], given the tokens of the sequence so far."""
        options = self._options
        if options.repetition_penalty != 1.0:
            logits = penalize(logits, history, options.repetition_penalty)
        if options.temperature == 0.0:
            return int(np.argmax(logits))
        probabilities = distribution(logits, options)
        return int(self._generator.choice(len(probabilities), p=probabilities))


def penalize(logits: npt.NDArray[np.float32], history: Sequence[int], penalty: float) -> npt.NDArray[np.float32]:
    """Divide positive logits of tokens in `history` by the penalty, and multiply negative ones; all stay finite."""
    result, largest, penalty = logits.copy(), np.finfo(np.float32).max, float(np.float32(penalty))
    seen = np.unique(np.asarray(history, np.int64))
    given = result[seen].astype(np.float64)
    result[seen] = np.where(given > 0, given / penalty, given * penalty).clip(-largest, largest)
    return result


def distribution(logits: npt.NDArray[np.float32], options: Sampling) -> npt.NDArray[np.float64]:
    """Return the probabilities [V] that temperature, top_k, top_p and min_p leave."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
        scaled = (logits.astype(np.float64) - float(logits.max())) / options.temperature
    if 0 < options.top_k < len(scaled):
        lowest = np.partition(scaled, -options.top_k)[-options.top_k]
        scaled[scaled < lowest] = -np.inf
    if options.top_p < 1.0:
        scaled = _keep_top_p(scaled, options.top_p)
    if options.min_p > 0.0:
        probabilities = _softmax(scaled)
        scaled[probabilities < options.min_p * probabilities.max()] = -np.inf
    return _softmax(scaled)


def _keep_top_p(scaled: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.float64]:
    """Drop the least likely tokens whose probabilities together stay within 1 - top_p."""
    order = np.argsort(scaled, kind="stable")
    cumulative = np.cumsum(_softmax(scaled)[order])
    drop = cumulative <= 1.0 - top_p
    drop[-1] = False
    scaled[order[drop]] = -np.inf
    return scaled


def _softmax(scaled: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(scaled - scaled.max())
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result

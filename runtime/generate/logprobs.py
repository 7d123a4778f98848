"""Says how likely tokens were: log-probabilities of the model's own distribution.

They are the log-softmax of the raw float32 logits: before repetition penalty, temperature and truncation. So they tell
what the model thinks of a token, however it was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import whole_number

MAX_LOGPROBS = 64  # best tokens per position; the CUDA kernel has room for as many


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token and the best tokens in its place were.

    Attributes:
        token: its id.
        logprob: its log-probability, a float32 value.
        top: (token id, log-probability) of the best tokens, best first; of equal ones the lower id comes first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def as_list(self) -> list[Any]:
        """Return this as JSON holds it."""
        return [self.token, self.logprob, [list(pair) for pair in self.top]]

    @classmethod
    def from_list(cls, described: Sequence[Any]) -> TokenLogprobs:
        """Rebuild what `as_list` returned. Raises TypeError or ValueError where it is something else."""
        token, logprob, top = described
        return cls(int(token), float(logprob), tuple((int(other), float(value)) for other, value in top))


def check_logprobs(given: object) -> int | None:
    """Return how many best tokens are wanted per token; None: no log-probabilities. Raises ConfigError."""
    return None if given is None else whole_number("logprobs", given, 0, MAX_LOGPROBS)


def top_logprobs(
    logits: npt.NDArray[np.float32], tokens: Sequence[int] | npt.NDArray[np.integer], k: int
) -> list[TokenLogprobs]:
    """Return the log-probabilities of one token per row, and of the k best; computed in float64.

    Args:
        logits: [R, V] float32, finite; not changed.
        tokens: R token ids.
        k: at most V are given.
    """
    return [_of_row(row, int(token), min(k, len(row))) for row, token in zip(logits, tokens, strict=True)]


def _of_row(logits: npt.NDArray[np.float32], token: int, k: int) -> TokenLogprobs:
    shifted = logits.astype(np.float64)
    largest = shifted.max()
    shifted -= largest
    log_sum = largest + np.log(np.exp(shifted, out=shifted).sum())

    def logprob(index: int) -> float:
        return float(np.float32(logits[index] - log_sum))

    return TokenLogprobs(token, logprob(token), tuple((index, logprob(index)) for index in _best(logits, k)))


def _best(logits: npt.NDArray[np.float32], k: int) -> list[int]:
    """Return the places of the k largest logits, best first."""
    if k == 0:
        return []
    candidates = np.flatnonzero(logits >= np.partition(logits, -k)[-k])  # ascending; more than k where logits are equal
    order = np.argsort(-logits[candidates], kind="stable")
    best: list[int] = candidates[order[:k]].tolist()
    return best

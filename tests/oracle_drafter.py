"""A drafter for tests: it knows the right tokens, and is wrong where it is told to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortolan import Sampling, Speculation


class OracleDrafter:
    """Proposes what follows in known sequences, each token right with some probability."""

    def __init__(self, right: Sequence[Sequence[int]], share: float, vocab_size: int) -> None:
        self._right, self._share, self._vocab_size = right, share, vocab_size
        self._random = np.random.default_rng(0)

    def propose(self, tokens: Sequence[int], count: int, sampling: Sampling) -> list[int]:
        """Return the tokens that follow, some of them wrong."""
        whole = next((each for each in self._right if list(each[: len(tokens)]) == list(tokens)), tokens)
        draft = list(whole[len(tokens) : len(tokens) + count])
        wrong = self._random.random(len(draft)) >= self._share
        return [(token + bad) % self._vocab_size for token, bad in zip(draft, wrong.tolist(), strict=True)]

    def is_likely(self, tokens: Sequence[int], known: int) -> bool:
        """Say yes."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle(Speculation):
    """An `OracleDrafter` of sequences, prompts included."""

    right: tuple[tuple[int, ...], ...]
    share: float = 0.7
    vocab_size: int = 131

    def open(self, model: object, max_context: int) -> OracleDrafter:
        """Make the drafter."""
        return OracleDrafter(self.right, self.share, self.vocab_size)

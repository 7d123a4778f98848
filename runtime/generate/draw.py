"""Says what the choice of one token depends on, besides the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortolan.runtime.options import Sampling

BAD = -1  # in place of a token: its logits contain NaN or infinity
MIN_TEMPERATURE = 1e-20  # below it, as above 0, only the best token has any probability left
MAX_TEMPERATURE = 1e37  # above it all tokens are equally likely, and 1 / temperature is still a normal float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one token is chosen; equal draws from equal logits give equal tokens, on the host and on a device.

    Attributes:
        sampling: the rules; their own seed is not looked at.
        seed: of the random numbers.
        position: of the token to choose in its sequence, counted from 0.
        seen: token ids of the sequence so far, for the repetition penalty.
    """

    sampling: Sampling
    seed: int
    position: int
    seen: Sequence[int] | npt.NDArray[np.integer] = ()

    @property
    def is_random(self) -> bool:
        """Whether random numbers take part."""
        return self.sampling.temperature > 0.0

    @property
    def has_penalty(self) -> bool:
        """Whether the tokens so far take part."""
        return self.sampling.repetition_penalty != 1.0

    @property
    def inverse_temperature(self) -> np.float32:
        """1 / temperature as the kernels hold it; infinity takes the most likely token."""
        if not self.is_random:
            return np.float32(np.inf)
        return np.float32(1.0 / min(max(self.sampling.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE))

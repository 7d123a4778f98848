"""What a step on a CUDA device gave, on its way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortolan.runtime.device.buffers import Array
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.generate.device_logprobs import Words, read_logprobs
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.steps.stepper import Logits


@dataclass(frozen=True, slots=True)
class Choices:
    """Where the choices of a step arrive: tokens [R], log-probabilities, and how many of these each row wants."""

    produced: npt.NDArray[np.int32]
    words: Words | None
    counts: Sequence[int | None]


class Scorer(Protocol):
    """What holds the logits [R, V] of a step, until the next one."""

    logits: Array

    def score(self, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of one token and of the k best for each of the first logit rows."""


class DeviceResult:
    """Tokens on their way from the device."""

    def __init__(
        self, device: CudaBuffers, choices: Choices, events: tuple[Any, Any], scorer: Scorer, staging: Any
    ) -> None:
        """Take what will be there once the second event has passed; the step reads `staging` until then."""
        self._device, self._choices, self._events = device, choices, events
        self._scorer, self._staging = scorer, staging
        self._tokens: list[int] | None = None

    @property
    def device_seconds(self) -> float | None:
        """Time that the step took on the device, once its tokens were waited for."""
        return None if self._tokens is None else self._device.seconds_between(*self._events)

    def tokens(self) -> list[int]:
        """Wait, and return the token that each logit row chose."""
        if self._tokens is None:
            self._device.wait(self._events[1])
            self._tokens = self._choices.produced[: len(self._choices.counts)].tolist()
            self._staging = None
        return self._tokens

    def logits(self) -> Logits:
        """Wait, and return the logits [R, V]."""
        with self._device.scope():
            rows = self._scorer.logits[: len(self._choices.counts)]
        logits: Logits = self._device.download(rows)
        return logits

    def logprobs(self) -> list[TokenLogprobs | None]:
        """Wait, and return the log-probabilities that each row wanted."""
        tokens, words = self.tokens(), self._choices.words
        return [None] * len(tokens) if words is None else read_logprobs(words, tokens, self._choices.counts)

    def score(self, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of one token and of the k best for each of the first logit rows."""
        return self._scorer.score(tokens, k)

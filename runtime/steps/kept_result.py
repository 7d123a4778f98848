"""What a step gave, in memory of the host."""

from __future__ import annotations

from collections.abc import Sequence

from ortolan.runtime.generate.logprobs import TokenLogprobs, top_logprobs
from ortolan.runtime.steps.stepper import Logits, StepResult


class KeptResult:
    """A result of which all is known: the tokens, the logits [R, V] and the log-probabilities of each logit row."""

    def __init__(
        self,
        tokens: list[int],
        logits: Logits,
        logprobs: list[TokenLogprobs | None],
        device_seconds: float | None = None,
    ) -> None:
        self._tokens, self._logits, self._logprobs = tokens, logits, logprobs
        self.device_seconds = device_seconds

    @classmethod
    def copy_of(cls, result: StepResult) -> KeptResult:
        """Wait for a step, and copy what it gave, so that it outlives the steps after it."""
        logits = result.logits().copy()
        return cls(list(result.tokens()), logits, list(result.logprobs()), result.device_seconds)

    def tokens(self) -> list[int]:
        """Return the token that each logit row chose."""
        return self._tokens

    def logits(self) -> Logits:
        """Return the logits [R, V]."""
        return self._logits

    def logprobs(self) -> list[TokenLogprobs | None]:
        """Return the log-probabilities that each row wanted."""
        return self._logprobs

    def score(self, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of one token and of the k best for each of the first logit rows."""
        return top_logprobs(self._logits[: len(tokens)], tokens, k)

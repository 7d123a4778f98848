"""What a step gave, copied before other steps take its place."""

from __future__ import annotations

from collections.abc import Sequence

from ortolan.runtime.generate.logprobs import TokenLogprobs, top_logprobs
from ortolan.runtime.steps.stepper import Logits, StepResult


class KeptResult:
    """A result that outlives the steps after it."""

    def __init__(self, result: StepResult) -> None:
        """Wait for a step, and copy what it gave."""
        self._tokens, self._logprobs = list(result.tokens()), list(result.logprobs())
        self._logits: Logits = result.logits().copy()
        self.device_seconds = result.device_seconds

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

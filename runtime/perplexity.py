"""Measures how well a model predicts a text: perplexity over windows that move by a stride."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ortolan.errors import ConfigError, whole_number
from ortolan.runtime.model import Model
from ortolan.runtime.steps.layout import check_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """How well a text was predicted.

    Attributes:
        tokens: predictions that count; the first token of a text has none.
        negative_log_likelihood: their sum, in nats.
    """

    tokens: int
    negative_log_likelihood: float

    @property
    def perplexity(self) -> float:
        """The exponential of the mean."""
        return math.exp(self.negative_log_likelihood / self.tokens)

    @property
    def bits(self) -> float:
        """The sum in bits."""
        return self.negative_log_likelihood / math.log(2)


def measure_perplexity(
    model: Model,
    token_ids: Sequence[int] | npt.NDArray[Any],
    window: int | None = None,
    stride: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Perplexity:
    """Measure the perplexity of a text.

    Every token but the first is predicted once. The first window predicts all of its tokens; each later one begins
    `stride` tokens after the one before, and predicts those of its tokens that no window did, after all of its others.

    Args:
        model: to measure.
        token_ids: [T], at least two.
        window: tokens that a prediction may look back on, its own included; None takes the model's max_context.
        stride: tokens from the beginning of a window to that of the next; None takes half of the window.
        progress: called with numbers of tokens that were predicted.

    Raises:
        ConfigError: fewer than two tokens, ids outside the vocabulary, a window that the model does not have, or a
            stride that is not less than the window.
        NumericError: the model produced NaN or infinity.

    Source: Hugging Face, "Perplexity of fixed-length models" (transformers documentation).
    """
    tokens = check_token_ids(token_ids, model.manifest.vocab_size)
    if len(tokens) < 2:
        raise ConfigError("the text has one token; perplexity needs at least two")
    longest = model.manifest.max_context
    window = min(whole_number("window", longest if window is None else window, 2, longest), len(tokens))
    stride = whole_number("stride", max(1, window // 2) if stride is None else stride, 1, max(1, longest - 1))
    if stride >= window and window < len(tokens):
        raise ConfigError(f"stride is {stride}; it must be less than the window, {window}, which it moves")
    session = model.session(max_context=window)
    total, count = 0.0, 0
    for begin, first, end in _windows(len(tokens), window, stride):
        session.rewind(0)
        if first - 1 > begin:
            session.prefill(tokens[begin : first - 1])
        scored = session.score(tokens[first - 1 : end])
        total -= math.fsum(each.logprob for each in scored)
        count += len(scored)
        if progress:
            progress(len(scored))
    return Perplexity(tokens=count, negative_log_likelihood=total)


def _windows(count: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield where each window begins, the first token that it predicts, and its end."""
    begin, first = 0, 1
    while first < count:
        end = min(begin + window, count)
        yield begin, first, end
        begin, first = begin + stride, end

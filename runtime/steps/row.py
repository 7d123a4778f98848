"""One sequence's part of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ortolan.runtime.device.buffers import Array
from ortolan.runtime.generate.draw import Draw

if TYPE_CHECKING:
    from ortolan.runtime.steps.together import Work

NO_DRAWS: tuple[Draw | None, ...] = (None,)


@runtime_checkable
class HiddenReader(Protocol):
    """Takes what a model's head reads."""

    def take_hidden(self, row: Row, hidden: Array) -> Work[None] | None:
        """Take the hidden states [T, features] of a row's tokens, which are overwritten by the next step.

        On a device they are there once the work that was enqueued so far is done. Never raises. What is returned runs
        before that step, together with that of other rows; None: nothing is to be run.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """What a step feeds of one sequence, and what it wants of it.

    Attributes:
        tokens: to feed, at least one.
        logical: tokens read before.
        pages: of each cache kind, in the order of their slots; empty where caches are contiguous.
        variant: of RoPE.
        physical: tokens in the cache of each evictable layer, per kv head [Hkv]; empty: all hold `logical`.
        captures: for each evictable layer the buffer [1, Wq, Hq, D] that takes queries; empty: none are taken.
        draws: for each of the last tokens whose logits are wanted, how the token after it is chosen; None: it is known,
            or not wanted. At least one, at most as many as `tokens`.
        logprobs: the number of most likely tokens whose log-probabilities are wanted; None: none.
        hidden: what a draft head reads beside each token, [T, features]; None for a model.
        reader: takes the hidden states that the step computes of `tokens`; None: nobody does.
        history: tokens of the sequence that are known, those before the row first.
        source: row of the step before whose choice is this row's only token, whatever `tokens` says; None: `tokens`
            are known.
    """

    tokens: Sequence[int] | npt.NDArray[np.int64]
    logical: int
    pages: Mapping[str, Sequence[int]] = field(default_factory=dict)
    variant: int = 0
    physical: Mapping[int, npt.NDArray[np.int32]] = field(default_factory=dict)
    captures: Mapping[int, Array] = field(default_factory=dict)
    draws: Sequence[Draw | None] = NO_DRAWS
    logprobs: int | None = None
    hidden: Array | None = None
    reader: HiddenReader | None = None
    history: Sequence[int] = ()
    source: int | None = None

"""One request of an engine: its tokens, how the next is chosen, and when to stop."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ortolan.runtime.batch_inputs import Choice
from ortolan.runtime.buffers import Array
from ortolan.runtime.options import Sampling
from ortolan.runtime.sampler import Sampler
from ortolan.runtime.sequence import TokenSequence
from ortolan.runtime.stops import StopFilter
from ortolan.runtime.stream import Outbox


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What an engine knows of a request besides its pages.

    Attributes:
        sequence: its tokens.
        choice: how the next is chosen.
        stops: ends it.
        eos_token_ids: end it too.
        max_new_tokens: the most to generate.
        max_context: longest sequence.
        outbox: where tokens go.
        kept: tokens that each kv head of each evictable layer kept at the eviction, [Hkv]; empty before it.
        captures: buffers of queries, while the prompt's last ones are read.
    """

    sequence: TokenSequence
    choice: Choice
    stops: StopFilter
    eos_token_ids: frozenset[int]
    max_new_tokens: int
    max_context: int
    outbox: Outbox
    kept: dict[int, npt.NDArray[np.int32]] = field(default_factory=dict)
    captures: Mapping[int, Array] = field(default_factory=dict)

    @property
    def has_penalty(self) -> bool:
        """Whether the choice of a token depends on all tokens before."""
        return self.choice.sampling.repetition_penalty != 1.0

    def physical(self) -> dict[int, npt.NDArray[np.int32]]:
        """Return the tokens in each cache that was evicted, per kv head [Hkv]."""
        sequence = self.sequence
        if not sequence.evicted_at:
            return {}
        later = sequence.fed - sequence.evicted_at
        return {index: lengths + np.int32(later) for index, lengths in self.kept.items()}

    def accept(self, token: int, length: int) -> bool:
        """Take the token that makes the sequence `length` long, and hand on what may be seen; True: it was the last."""
        if token in self.eos_token_ids:
            return self._finish("eos")
        seen, stopped = self.stops.push(token)
        self.outbox.put(seen, self.stops.text)
        if stopped:
            self.outbox.finish("stop")
            return True
        if length - self.sequence.prompt_length == self.max_new_tokens:
            return self._finish("length")
        if length > self.max_context:
            return self._finish("context")
        return False

    def _finish(self, reason: str) -> bool:
        seen, stopped = self.stops.flush()
        self.outbox.put(seen, self.stops.text)
        self.outbox.finish("stop" if stopped else reason)
        return True


def make_choice(sampling: Sampling, tokens: list[int]) -> Choice:
    """Make a sequence's choice; `tokens` are those that it goes on adding to."""
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    return Choice(sampling=sampling, sampler=Sampler(sampling), seed=seed, tokens=tokens)

"""One request of an engine: its tokens, how the next is chosen, and when to stop."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ortolan.errors import ConfigError
from ortolan.runtime.batch_inputs import Choice
from ortolan.runtime.buffers import Array
from ortolan.runtime.options import Sampling
from ortolan.runtime.sampler import Sampler
from ortolan.runtime.sequence import TokenSequence
from ortolan.runtime.stream import Outbox

Stops = Sequence[int | Sequence[int]]


class StopFilter:
    """Holds back tokens that may turn out to be the beginning of a stop sequence."""

    def __init__(self, stops: Stops, vocab_size: int) -> None:
        """Take stop sequences; a single id is a sequence of one.

        Raises:
            ConfigError: one is empty, or no token id.
        """
        if isinstance(stops, str) or not isinstance(stops, Iterable):
            raise ConfigError(f"stop is {stops!r}; it must be a list of token ids and of sequences of them")
        self._stops = [_checked(stop, vocab_size) for stop in stops]
        self._held: list[int] = []

    def push(self, token: int) -> tuple[list[int], bool]:
        """Take a token; returns the tokens that are no part of a stop sequence for sure, and whether one is whole."""
        if not self._stops:
            return [token], False
        held = self._held
        held.append(token)
        for stop in self._stops:
            if held[-len(stop) :] == stop:
                return held[: -len(stop)], True
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> list[int]:
        """Return what is held back; nothing follows."""
        held, self._held = self._held, []
        return held


def _checked(stop: int | Sequence[int], vocab_size: int) -> list[int]:
    tokens = list(stop) if isinstance(stop, Iterable) else [stop]
    valid = all(isinstance(t, (int, np.integer)) and not isinstance(t, bool) and 0 <= t < vocab_size for t in tokens)
    if not tokens or not valid:
        raise ConfigError(f"stop holds {stop!r}; each must be a token id in 0 .. {vocab_size - 1}, or a list of such")
    return [int(token) for token in tokens]


def _overlap(held: list[int], stop: list[int]) -> int:
    """Return the length of the longest end of `held` that begins `stop`, but is not all of it."""
    longest = min(len(held), len(stop) - 1)
    return next(n for n in range(longest, -1, -1) if held[len(held) - n :] == stop[:n])


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
        self.outbox.put(seen)
        if stopped:
            self.outbox.finish("stop")
            return True
        if length - self.sequence.prompt_length == self.max_new_tokens:
            return self._finish("length")
        if length > self.max_context:
            return self._finish("context")
        return False

    def _finish(self, reason: str) -> bool:
        self.outbox.put(self.stops.flush())
        self.outbox.finish(reason)
        return True


def make_choice(sampling: Sampling, tokens: list[int]) -> Choice:
    """Make a sequence's choice; `tokens` are those that it goes on adding to."""
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    return Choice(sampling=sampling, sampler=Sampler(sampling), seed=seed, tokens=tokens)

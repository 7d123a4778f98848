"""The half of a session that generates: it chooses tokens, yields them, and can take a generation up again."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import ConfigError, whole_number
from ortolan.manifest import Manifest
from ortolan.runtime.options import Sampling, check_sampling
from ortolan.runtime.plan import CachePlan
from ortolan.runtime.sampler import Generation, Sampler

NO_TOKENS: npt.NDArray[np.int64] = np.empty(0, np.int64)


class GeneratingSession(abc.ABC):
    """Generates from what the other half, `Session`, reads."""

    plan: CachePlan
    finish_reason: str | None
    _manifest: Manifest
    _history: list[int]
    _pending: list[int]
    _generation: Generation | None

    @property
    @abc.abstractmethod
    def logical_length(self) -> int:
        """Tokens read so far."""

    @abc.abstractmethod
    def _read_prompt(
        self, token_ids: Sequence[int] | npt.NDArray[Any], progress: Callable[[int], object] | None
    ) -> Any:
        """Do what `prefill` says; the logits stay where the steps left them."""

    @abc.abstractmethod
    def _with_pending(self, given: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Put the token that `generate` left before the given ones, and check that there is room."""

    @abc.abstractmethod
    def _decode(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Feed one token and count it as decoded; returns logits [V]."""

    def generate(
        self,
        token_ids: Sequence[int] | npt.NDArray[Any],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Iterator[int]:
        """Read a prompt and yield the tokens that follow it, without the end-of-sequence token.

        The prompt is read by this call, not by the first `next`. When the iterator ends, `finish_reason` is
        "eos", "length" (max_new_tokens) or "context" (max_context); until then, and where it is left early,
        it is None.

        Raises:
            ConfigError: max_new_tokens is below 1, or the session was used otherwise before the iterator
                ended; besides, as `prefill`.
        """
        limit, sampling = whole_number("max_new_tokens", max_new_tokens), check_sampling(sampling)
        self.finish_reason = None
        logits = self._read_prompt(token_ids, progress)
        return self._start(Generation(sampling=sampling, max_new_tokens=limit, logits=logits))

    def resume(self, max_new_tokens: int | None = None) -> Iterator[int]:
        """Go on with the last generation as if it had never been left, also in a restored session.

        Args:
            max_new_tokens: how many more at most; None: what is left of the number that `generate` was given.

        Raises:
            ConfigError: max_new_tokens is below 1; nothing was generated, it ended with the end-of-sequence token,
                the session was used otherwise since, or a step of it ended early and left too little to go on from:
                while tokens were read again, or between reading and choosing one; besides, as `generate`.
        """
        turn = self._resumable()
        if max_new_tokens is not None:
            max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        if turn is None:
            raise ConfigError(
                "no generation can be resumed: none was started, it ended, other calls came after it, or it was "
                "interrupted where too little was left to go on from"
            )
        self._settle()
        longest = turn.max_new_tokens if max_new_tokens is None else turn.count + max_new_tokens
        return self._start(dataclasses.replace(turn, max_new_tokens=longest))

    def _resumable(self) -> Generation | None:
        """Return the last generation, if all that its next token depends on is still there."""
        turn = self._generation
        if turn is None or not turn.can_go_on or (turn.count and not self._pending):
            return None
        return turn

    def _settle(self) -> None:
        """End the generation under way, if there is one: the session is used otherwise."""
        self._generation = None

    def _start(self, turn: Generation) -> Iterator[int]:
        self._generation, self.finish_reason = turn, None
        return self._continue(turn)

    def _continue(self, turn: Generation) -> Iterator[int]:
        sampler = Sampler(turn.sampling, draws=turn.count)
        while self._goes_on(turn):
            logits = self._decode(self._with_pending(NO_TOKENS)) if turn.count else turn.logits
            token = sampler.choose(logits, self._history)
            if token in self._manifest.eos_token_ids:
                self.finish_reason = "eos"
                self._settle()
                return
            self._note_chosen(turn, token)
            yield token

    def _goes_on(self, turn: Generation) -> bool:
        """Say whether a generation has a token to come; else `finish_reason` says why not."""
        if self._generation is not turn:
            raise ConfigError("the session was used otherwise since the last token; start a new generate")
        if turn.count >= turn.max_new_tokens:
            self.finish_reason = "length"
        elif turn.count and self.logical_length + 1 > self.plan.max_context:
            self.finish_reason = "context"
        return self.finish_reason is None

    def _note_chosen(self, turn: Generation, token: int) -> None:
        """Count a token that is about to be yielded."""
        turn.count, turn.logits = turn.count + 1, None
        self._pending = [token]

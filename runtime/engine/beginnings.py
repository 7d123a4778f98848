"""Describes what a request begins with: a new sequence, or one that a file holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ortolan.errors import ConfigError, ContextLengthError, file_path
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.caches.plan import CachePlan, context_advice
from ortolan.runtime.engine.sequence import TokenSequence
from ortolan.runtime.engine.stream import Outbox
from ortolan.runtime.generate.turn import Shown, Turn, TurnOptions
from ortolan.runtime.saved.fingerprint import Fingerprint
from ortolan.runtime.saved.reader import SavedSequence
from ortolan.runtime.text.so_far import TextSoFar
from ortolan.runtime.text.tokenizer import Detokenize


@dataclass(frozen=True, slots=True)
class TakenUp:
    """A saved generation, ready to go on.

    Attributes:
        turn: as it was left.
        sequence: the same.
        outbox: holds what had been chosen and not shown; ended where nothing is left to generate.
        text: of the tokens that were shown.
    """

    turn: Turn
    sequence: TokenSequence
    outbox: Outbox
    text: TextSoFar


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginnings:
    """Makes what requests of one engine begin with, and numbers their sequences.

    Where a method fails, it closes the file that it was given, or has opened.

    Attributes:
        manifest: of the model.
        plan: of the pools.
        identify: says what model this is.
        detokenize: starts to decode token ids. Raises ConfigError where there is no tokenizer.
    """

    manifest: Manifest
    plan: CachePlan
    identify: Callable[[], Fingerprint]
    detokenize: Detokenize
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def turn(self, options: TurnOptions) -> Turn:
        """Begin a new generation."""
        return Turn(options, self.manifest.vocab_size, self.detokenize)

    def open(self, path: str | Path) -> SavedSequence:
        """Open a saved sequence of this model."""
        saved = SavedSequence(file_path("path", path))
        with _closed_on_failure(saved):
            saved.check_model(self.identify(), self.manifest)
        return saved

    def sequence(self, given: list[int], options: Eviction | None, saved: SavedSequence | None) -> TokenSequence:
        """Describe a sequence whose last tokens are the given ones."""
        with _closed_on_failure(saved):
            return self._describe(given, options, saved)

    def take_up(self, saved: SavedSequence, path: str | Path, max_new_tokens: int | None) -> TakenUp:
        """Rebuild a saved generation, hand on what it had chosen and not shown, and take up its text."""
        with _closed_on_failure(saved):
            return self._rebuild(saved, path, max_new_tokens)

    def _rebuild(self, saved: SavedSequence, path: str | Path, max_new_tokens: int | None) -> TakenUp:
        described, outbox = saved.generation, Outbox()
        if described is None:
            raise _nothing_to_restore(path)
        turn = Turn.from_description(described["turn"], self.manifest.vocab_size, self.detokenize)
        sequence, context = self._describe([], saved.eviction, saved), self.plan.max_context
        ready = [Shown.from_list(each) for each in described["ready"]]
        shown = turn.shown_tokens
        text = turn.start_text(shown[: len(shown) - len(ready)])
        outbox.put(ready, turn.stop_text)
        if described["chosen"] is not None:
            token, logprobs = Shown.from_list(described["chosen"])
            outbox.put(turn.accept(token, sequence.fed + 1, context, logprobs), turn.stop_text)
            sequence.tokens.append(token)
        if turn.can_go_on and sequence.pending:
            longest = turn.max_new_tokens if max_new_tokens is None else turn.count + max_new_tokens
            turn.reopen(longest, len(sequence.tokens), context)
        if turn.finish_reason is not None:
            outbox.finish(turn.finish_reason)
        elif not sequence.pending:
            raise _nothing_to_restore(path)
        return TakenUp(turn, sequence, outbox, text)

    def _describe(self, given: list[int], options: Eviction | None, saved: SavedSequence | None) -> TokenSequence:
        sequence = TokenSequence(number=next(self._numbers), prompt_length=0, max_length=0, eviction=options)
        context = self.plan.max_context
        if saved is not None:
            saved.load_state(sequence, self.plan, self.manifest)
            sequence.is_stored = True
            sequence.is_unrepeatable = sequence.evicted_at > 0 or self.plan.cuts.by_family
        sequence.tokens += given
        sequence.prompt_length = len(sequence.tokens) if given else 0
        if len(sequence.tokens) > context:
            raise ContextLengthError(
                f"the prompt has {len(sequence.tokens)} tokens, more than max_context = {context}; shorten it, or "
                f"{context_advice(context, self.manifest, 'engine')}"
            )
        return sequence


@contextmanager
def _closed_on_failure(saved: SavedSequence | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if saved is not None:
            saved.close()
        raise


def _nothing_to_restore(path: str | Path) -> ConfigError:
    return ConfigError(
        f"{path} does not contain a generation that can go on; submit a prompt with session={str(path)!r}"
    )

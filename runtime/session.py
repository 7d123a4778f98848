"""One sequence, driven by a caller: prefill in chunks, decode, evict, rewind, generate, save."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import ConfigError, check_progress, whole_number
from ortolan.policies import Eviction
from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.device.memory import MemoryReport
from ortolan.runtime.eviction.evicting import Evicting
from ortolan.runtime.generate.chain import Chain, Chosen
from ortolan.runtime.generate.generation import Generation
from ortolan.runtime.generate.logprobs import TokenLogprobs, check_logprobs
from ortolan.runtime.generate.stops import Stops
from ortolan.runtime.generate.turn import Turn, TurnOptions
from ortolan.runtime.options import Sampling
from ortolan.runtime.ownership import exclusive
from ortolan.runtime.saved.state import SavedParts
from ortolan.runtime.saved.writer import save_sequence
from ortolan.runtime.session_parts import SessionParts
from ortolan.runtime.speculation.drafter import Speculator
from ortolan.runtime.speculation.drafters import Drafters
from ortolan.runtime.speculation.options import Speculation
from ortolan.runtime.state.sequence import SequenceState
from ortolan.runtime.stats import Stats
from ortolan.runtime.steps.feeder import Feeder, Tokens, Wanted
from ortolan.runtime.steps.layout import TokenIds, check_token_ids
from ortolan.runtime.steps.reader import Reader
from ortolan.runtime.steps.stepper import Logits
from ortolan.runtime.text.streaming import TextStream, prompt_ids

Progress = Callable[[int], object] | None


class Session:
    """Reads and continues one sequence. Made by `Model.session`.

    May move between threads, one at a time; on CUDA its first decode step on each captures the graph there. A call
    while another one has not returned raises ConfigError, also one that `progress` makes. Tokens that `generate` yields
    belong to the sequence: the last one is fed together with whatever comes next, also where the caller stopped early.

    Attributes:
        plan: of the caches.
        stats: what was done so far, and how long it took.
        state: tokens and lengths of the sequence.
        generation: the one that was started last, as long as nothing else used the session.
        finish_reason: why the last generation ended; None before.
        use: by one call at a time.
    """

    def __init__(self, parts: SessionParts) -> None:
        self.plan: CachePlan = parts.feeder.plan
        self.stats = Stats()
        self.state: SequenceState = parts.feeder.state
        self.generation: Generation | None = None
        self.finish_reason: str | None = None
        self.feeder = Feeder(parts.feeder, self.stats)
        self._parts = parts
        self._drafters = Drafters(parts.open_drafter, self.feeder)
        self._evicting = Evicting(self.feeder, parts.eviction, parts.evict_session, parts.score_session)
        lose = weakref.WeakMethod(self._lose)  # a cycle would keep the caches until they are collected
        self._evicting.on_lost = lambda: (call := lose()) and call()
        self._reader = Reader(self.feeder, self._evicting)
        self._chain = Chain(self.feeder, self._reader)
        self.use = self._chain.use

    @property
    def logical_length(self) -> int:
        """Tokens read so far."""
        return self.state.fed

    @property
    def cache_bytes(self) -> int:
        """Bytes that the caches take now; of paged ones, their pages."""
        return self.feeder.room.bytes

    @property
    def draft_bytes(self) -> int:
        """Bytes of the caches and buffers that the last drafter has, its model's or the model's own head's."""
        return self._drafters.bytes

    @property
    def eviction(self) -> Eviction | None:
        """Options of the eviction; None where the session never evicts."""
        return self._parts.eviction

    def physical_length(self, layer: int) -> int:
        """Return the tokens that one layer's cache holds: after an eviction, fewer than were read."""
        return self.feeder.physical_length(self._cache_layer(layer))

    def cache_capacity(self, layer: int) -> int:
        """Return the slots of one layer's cache now; of a layer that reads another's, those of that one."""
        return self.feeder.caches.capacity(self._cache_layer(layer))

    def kept_positions(self, layer: int) -> npt.NDArray[np.int32] | None:
        """Return the positions that the last eviction kept, [Hkv, K] ascending; None before one.

        Where kv heads keep different numbers, -1 follows those of a head with fewer.
        """
        kept = self.state.lengths.kept.get(self._cache_layer(layer))
        return None if kept is None else kept.copy()

    @exclusive
    def prefill(self, token_ids: TokenIds, progress: Progress = None) -> Logits:
        """Read a prompt, or the next turn, in chunks; evict afterwards where that is due.

        Reading that ends early, by a failed step, an interrupt or what `progress` raises, leaves the session with the
        first `logical_length` tokens of its sequence and nothing else, fewer than before the call where tokens were
        being read again. Another call reads the rest: all tokens from there on, the one that `generate` yielded last
        included. If no chunk read that one, it no longer waits to be fed.

        Args:
            token_ids: [T], at least one.
            progress: called with the number of tokens of each chunk that was read, the token that `generate` yielded
                last included. What it raises ends the reading after that chunk.

        Returns:
            Logits [V] float32 of the last token, those before any eviction.

        Raises:
            ConfigError: no tokens, ids outside the vocabulary, or `progress` is not a function; nothing was read.
            CapacityError: ring history is gone, or, as ContextLengthError, `max_context` would be passed; nothing was
                read, and a token that `generate` yielded last still waits to be fed.
            NumericError: the model produced NaN or infinity. As after any failed step, the session then ends
                before the chunk that failed; `logical_length` says where.
        """
        check_progress(progress)
        tokens = self._checked(token_ids)
        self._settle()
        logits: Logits = self._reader.read_prompt(tokens, progress).logits()[-1].copy()
        return logits

    @exclusive
    def step(self, token_id: int) -> Logits:
        """Feed one token; returns logits [V] float32. Raises as `prefill` does."""
        tokens = self._checked([token_id])
        self._settle()
        logits: Logits = self._reader.decode(tokens).logits()[-1].copy()
        return logits

    @exclusive
    def score(self, token_ids: TokenIds, logprobs: int = 0, progress: Progress = None) -> list[TokenLogprobs]:
        """Read tokens, and say how likely each of them was after those before it.

        Args:
            token_ids: [T], at least one.
            logprobs: how many most likely tokens come with each.
            progress: as in `prefill`.

        Returns:
            T - 1 entries, for all tokens but the first.

        Raises:
            ConfigError: the session evicts, or a token waits to be fed; besides, as `prefill`.
        """
        check_progress(progress)
        best = check_logprobs(logprobs) or 0
        if self._parts.eviction is not None:
            raise ConfigError("score needs a session without eviction, and this one evicts; make another session")
        if self.state.pending:
            raise ConfigError(
                "the last token of a generation waits to be read, which score does not do; make another session"
            )
        tokens = self._checked(token_ids)
        self._settle()
        return self._reader.score(tokens, best, progress)

    @exclusive
    def generate(
        self,
        token_ids: TokenIds,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        progress: Progress = None,
        *,
        stop: Stops = (),
        logprobs: int | None = None,
        speculation: Speculation | None = None,
    ) -> Generation:
        """Read a prompt and yield the tokens that follow it, without the end-of-sequence token.

        The prompt is read by this call, not by the first `next`. When the iterator ends, `finish_reason` is
        "eos", "stop", "length" (max_new_tokens) or "context" (max_context); until then, and where it is left early,
        it is None. The iterator's `tokens`, `logprobs` and `text` have what was yielded so far.

        Args:
            token_ids: [T], at least one.
            max_new_tokens: the most to generate.
            sampling: how tokens are chosen; None takes the most likely.
            progress: as in `prefill`.
            stop: texts, token ids and lists of these, or one text or id, that end the generation. They are not
                yielded; of a stop of several tokens all but the last were read, and stay in the sequence.
            logprobs: how many most likely tokens come with each token's log-probability; None: no log-probabilities.
            speculation: who drafts tokens, which are then checked several in a step, `ortolan.PromptLookup`,
                `ortolan.DraftModel` or `ortolan.MtpHead`; None: every token takes a step of its own.

        Raises:
            ConfigError: max_new_tokens is below 1, a stop is not allowed, the model cannot have that drafter, or the
                session was used otherwise before the iterator ended; besides, as `prefill`.
        """
        check_progress(progress)
        speculator = self._drafters.start(speculation)
        tokens = self._checked(token_ids)
        context = tokens.tolist()
        options = TurnOptions(
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            eos_token_ids=frozenset(self.feeder.manifest.eos_token_ids),
            stop=stop,
            logprobs=logprobs,
            context=context,
        )
        turn = Turn(options, self.feeder.manifest.vocab_size, self._parts.detokenize)
        self._settle()
        self.finish_reason = None
        known = [*self.state.history, *context]
        wanted = Wanted(draws=turn.draws(known, len(known)), logprobs=turn.logprobs)
        result = self._reader.read_prompt(tokens, progress, wanted)
        return self._start(turn, (result.tokens()[-1], result.logprobs()[-1]), speculator)

    def stream_text(
        self,
        prompt: str | TokenIds,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        progress: Progress = None,
        stop: Stops = (),
        logprobs: int | None = None,
        speculation: Speculation | None = None,
    ) -> TextStream:
        """Read a prompt, and return an iterator over the text that follows it.

        The pieces are whole characters with their spaces: what follows the prompt in the text of prompt and answer.
        `prompt` is a text, or token ids [T]. A text is encoded with the special tokens that begin a sequence where
        nothing was read before, and without them where it is a later turn. The other arguments are those of `generate`,
        whose iterator is the `generation` of the one that is returned.

        Raises:
            ContractMismatchError: the model has no tokenizer. Besides, as `generate`.
        """
        tokens = prompt_ids(self._parts.tokenizer(), prompt, is_first=self.logical_length == 0)
        return TextStream(
            self.generate(
                tokens, max_new_tokens, sampling, progress, stop=stop, logprobs=logprobs, speculation=speculation
            )
        )

    @exclusive
    def resume(self, max_new_tokens: int | None = None, *, speculation: Speculation | None = None) -> Generation:
        """Go on with the last generation as if it had never been left, also in a restored session.

        Args:
            max_new_tokens: how many more at most; None: what is left of the number that `generate` was given.
            speculation: who drafts tokens; None: as before, and in a restored session nobody.

        Raises:
            ConfigError: max_new_tokens is below 1; nothing was generated, it ended with the end-of-sequence token or a
                stop, the session was used otherwise since, or a step of it ended early and left too little to go on
                from: while tokens were read again, or between reading and choosing one; besides, as `generate`.
        """
        if max_new_tokens is not None:
            max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        left = self._resumable()
        if left is None:
            raise ConfigError(
                "no generation can be resumed: none was started, it ended, other calls came after it, or it was "
                "interrupted where too little was left to go on from"
            )
        speculator = self._drafters.start(speculation) or left.speculator
        self._chain.settle()
        turn = left.turn
        longest = turn.max_new_tokens if max_new_tokens is None else turn.count + max_new_tokens
        turn.reopen(longest, len(self.state.tokens), self.plan.max_context)
        self.finish_reason = None
        generation = self._start(turn, None, speculator)
        generation.take_up(left)
        return generation

    def interrupt(self) -> None:
        """End the call under way, or the next one, by SessionInterruptedError; any thread or signal handler may call.

        On the CPU a chunk under way ends within it; on CUDA reading ends between chunks. An eviction is not cut short;
        the second reading that some policies have before it is, and then nothing is evicted. The session has what was
        read before, as after any reading that ends early (see `prefill`), and can go on: a generation by `resume`.
        """
        self.feeder.interrupt.ask()

    @exclusive
    def rewind(self, length: int) -> None:
        """Forget all tokens from logical position `length` on; 0 starts anew.

        A token that `generate` yielded last, and that is not fed yet, is forgotten too.

        Raises:
            ConfigError: the length is negative, or more than was read.
            CapacityError: the history before it is gone: evicted, or overwritten in a ring.
        """
        length = whole_number("the length to rewind to", length, 0, self.logical_length)
        self._settle()
        if 0 < length < self.logical_length:
            self.feeder.check_rewind(length)
        self.feeder.rewind(length)
        self._drafters.forget(length)

    @exclusive
    def save(self, path: str | Path, rewind_tokens: int = 0) -> None:
        """Write the session to one file, from which `Model.restore` makes it anew; it can be used on.

        May be called between the tokens of `generate`: a restored session then goes on with `resume`.

        Args:
            path: of the file; replaced where it exists, and only by a whole one.
            rewind_tokens: how far the restored session can rewind where the model has sliding windows, if this one
                can; full-attention caches rewind as here. Each costs a slot in every ring.

        Raises:
            ConfigError: no file can have that name or may be made there.
            CapacityError: a failed step overwrote what the next one needs.
            StorageError: the disk is full, or writing failed otherwise; `path` is what it was before.
            ContractMismatchError: the model's files, which tell what model it is, are gone.
        """
        self._reader.check_whole()
        save_sequence(path, self.saved_parts(), self._parts.identify(), rewind_tokens)

    @exclusive
    def fork(self) -> Session:
        """Make another session that goes on from here, generations included; neither sees what the other reads.

        Raises:
            CapacityError: there is no memory for another session's caches.
        """
        parts = self.saved_parts()
        other = self._parts.make_another([self.cache_capacity(layer) for layer in range(len(self.plan.layers))])
        other.feeder.copy_from(self.feeder, parts.lengths)
        other.take_up(parts.generation, parts.finish_reason)
        return other

    def saved_parts(self) -> SavedParts:
        """Return what there is to save; steps under way count as written, not as read."""
        lengths = copy.deepcopy(self.state.lengths)
        lengths.discard(self._chain.tokens_ahead, self.feeder.capture_rows)
        left = self._resumable()
        return SavedParts(
            manifest=self.feeder.manifest,
            plan=self.plan,
            eviction=self._parts.eviction,
            caches=self.feeder.caches,
            state=self.state,
            lengths=lengths,
            capture_rows=self.feeder.capture_rows,
            generation=None if left is None else left.describe(),
            finish_reason=self.finish_reason,
        )

    def take_up(self, generation: dict[str, Any] | None, finish_reason: str | None) -> None:
        """Go on with a generation that was saved; for `Model.restore`, which has filled state and caches."""
        self.finish_reason = finish_reason
        if generation is not None:
            turn = Turn.from_description(generation["turn"], self.feeder.manifest.vocab_size, self._parts.detokenize)
            self._start(turn, None).take_description(generation)

    def memory_report(self) -> MemoryReport:
        """Say what holds how many bytes now: weights, caches, captured queries, buffers of steps, and the rest."""
        return self._parts.report(self)

    def _start(self, turn: Turn, chosen: Chosen | None, speculator: Speculator | None = None) -> Generation:
        self.generation = Generation(self, self._chain, turn, chosen, speculator)
        return self.generation

    def _resumable(self) -> Generation | None:
        """Return the last generation, if all that its next token depends on is still there."""
        left = self.generation
        return left if left is not None and left.can_go_on else None

    def _settle(self) -> None:
        """End the generation under way, if there is one: the session is used otherwise."""
        self.generation = None
        self._chain.settle()

    def _lose(self) -> None:
        """Take note that nothing is left of the sequence."""
        self._settle()
        self._drafters.forget(0)

    def _checked(self, token_ids: TokenIds) -> Tokens:
        """Check ids, and return those to feed."""
        return self._reader.with_pending(check_token_ids(token_ids, self.feeder.manifest.vocab_size))

    def _cache_layer(self, layer: int) -> int:
        """Check a layer's index, and return the layer whose cache it reads."""
        return self.feeder.manifest.cache_owner(whole_number("layer", layer, 0, len(self.plan.layers) - 1))

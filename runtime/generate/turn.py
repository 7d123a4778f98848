"""Follows one generation: which rules choose its tokens, which of them may be shown, and when it ends."""

from __future__ import annotations

import dataclasses
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ortolan.errors import ConfigError, ContractMismatchError, whole_number
from ortolan.runtime.generate.draw import Draw
from ortolan.runtime.generate.logprobs import TokenLogprobs, check_logprobs
from ortolan.runtime.generate.stops import StopFilter, Stops
from ortolan.runtime.options import Sampling, check_sampling
from ortolan.runtime.text.so_far import TextSoFar
from ortolan.runtime.text.tokenizer import Detokenize, DetokenizerStream

SEED_BITS = 63
CONTEXT_TOKENS = 64  # of the prompt's end, on which the text of the first token depends


class Shown(NamedTuple):
    """A token that may be shown, with its log-probabilities where they were asked for."""

    token: int
    logprobs: TokenLogprobs | None

    def as_list(self) -> list[Any]:
        """Return this as JSON holds it."""
        return [self.token, None if self.logprobs is None else self.logprobs.as_list()]

    @classmethod
    def from_list(cls, described: Sequence[Any]) -> Shown:
        """Rebuild what `as_list` returned. Raises ContractMismatchError where it is something else."""
        try:
            token, logprobs = described
            return cls(whole_number("token", token, 0), logprobs and TokenLogprobs.from_list(logprobs))
        except (TypeError, ValueError) as error:
            raise _unreadable(error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """What a caller may choose about one generation.

    Attributes:
        sampling: how tokens are chosen; None takes the most likely one.
        max_new_tokens: the most to choose.
        eos_token_ids: end it, and are not shown; empty: none does.
        stop: texts, token ids and lists of token ids that end it, and are not shown.
        logprobs: how many best tokens come with each token's log-probability; None: no log-probabilities.
        context: tokens before the first one; only the last few matter.

    Raises:
        ConfigError: sampling, max_new_tokens or logprobs has a value that is not allowed.
    """

    sampling: Sampling | None = None
    max_new_tokens: int = 64
    eos_token_ids: frozenset[int] = frozenset()
    stop: Stops = ()
    logprobs: int | None = None
    context: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_sampling(self.sampling)
        object.__setattr__(self, "max_new_tokens", whole_number("max_new_tokens", self.max_new_tokens))
        object.__setattr__(self, "logprobs", check_logprobs(self.logprobs))


class Turn:
    """One generation, of a session or of an engine's request.

    Attributes:
        sampling: how tokens are chosen; its seed is a number.
        max_new_tokens: the most to choose.
        logprobs: as in `TurnOptions`.
        count: tokens chosen so far, without an end-of-sequence token.
        finish_reason: "eos", "stop", "length" (max_new_tokens) or "context" (max_context); None before the end.
    """

    def __init__(self, options: TurnOptions, vocab_size: int, detokenize: Detokenize | None = None) -> None:
        """Start before the first token.

        Args:
            options: what the caller chose; a seed of None becomes a fresh one.
            vocab_size: V.
            detokenize: starts to decode ids; None: there is no tokenizer. Where there is none, it may also raise
                ConfigError, but only once a text is needed.

        Raises:
            ConfigError: a stop is not allowed; see `StopFilter`.
        """
        sampling = check_sampling(options.sampling)
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(SEED_BITS))
        self.sampling, self.logprobs = sampling, options.logprobs
        self.max_new_tokens = options.max_new_tokens
        self.count = 0
        self.finish_reason: str | None = None
        self._seed = int(sampling.seed or 0)
        self._eos = options.eos_token_ids
        self._context = [int(token) for token in options.context[-CONTEXT_TOKENS:]]
        self._vocab_size = vocab_size
        self._detokenize = detokenize
        self._stops = StopFilter(options.stop, vocab_size, self._start if detokenize else None)
        self._text = self.start_text()
        self._tokens: list[int] = []  # all that were chosen
        self._released = 0  # of these, by the filter
        self._shown = 0  # of these; more than released where what the end had shown is held back again
        self._held: deque[TokenLogprobs | None] = deque()  # of the others

    @property
    def text(self) -> str | None:
        """The text of what was shown, and of what comes before a stop text in its first token; None: no tokenizer.

        After `reopen` it lacks what a stop may still reach into, until that is certain.
        """
        if self.stop_text is not None:
            return self.stop_text
        return self._text.read(self._tokens, self._released, is_last=self.finish_reason is not None)

    @property
    def stop_text(self) -> str | None:
        """The text, where a stop is one; None: no stop is, so that the text is that of the tokens alone."""
        return self._stops.text

    @property
    def shown_tokens(self) -> list[int]:
        """The tokens that were shown."""
        return self._tokens[: self._shown]

    def start_text(self, before: Sequence[int] = ()) -> TextSoFar:
        """Return what decodes tokens that follow `before`, the first ones of this."""
        return TextSoFar(self._start, before)

    @property
    def can_go_on(self) -> bool:
        """Whether more tokens could follow: it has not ended, or only because of its limits."""
        return self.finish_reason in (None, "length", "context")

    def draws(self, tokens: Sequence[int], position: int, draft: Sequence[int] = ()) -> list[Draw]:
        """Say how the token at an absolute position is chosen, and those behind each token of a draft from there on.

        Args:
            tokens: of the sequence; those from `position` on take no part.
            position: of the first token to choose. Tokens before it that are not in `tokens` are still being chosen.
            draft: tokens that may follow.
        """
        first = self._draw(position)
        if first.has_penalty:
            seen = [*tokens[:position], *draft]
            known = len(seen) - len(draft)
            return [self._draw(position + i, seen[: known + i]) for i in range(1 + len(draft))]
        if first.is_random:
            return [self._draw(position + i) for i in range(1 + len(draft))]
        return [first] * (1 + len(draft))  # the most likely token wherever it lies

    def accept(self, token: int, length: int, max_context: int, logprobs: TokenLogprobs | None = None) -> list[Shown]:
        """Take a chosen token, and set `finish_reason` where it is the last.

        Args:
            token: its id.
            length: logical length of the sequence with it.
            max_context: longest sequence; the last token may lie one beyond, as it is not fed.
            logprobs: of the token.

        Returns:
            The tokens that may be shown now: not those that may belong to a stop.
        """
        if token in self._eos:
            return self._flush("eos")
        self.count += 1
        shown, stopped = self._push(token, logprobs)
        if stopped:
            self.finish_reason = "stop"
        elif (reason := self._limit(length, max_context)) is not None:
            shown += self._flush(reason)
        return shown

    def reopen(self, max_new_tokens: int, length: int, max_context: int) -> None:
        """Set another limit, and go on where only limits had ended this; `finish_reason` says whether it does.

        What the end had shown cannot be taken back, but counts again for stops that were not whole.

        Args:
            max_new_tokens: the most to choose, those chosen already included.
            length: logical length of the sequence with the last token.
            max_context: longest sequence.
        """
        assert self.can_go_on
        self.max_new_tokens = max_new_tokens
        ended = self.finish_reason is not None
        self.finish_reason = self._limit(length, max_context) if self.count else None
        if ended and self.finish_reason is None:
            self._replay()

    def describe(self) -> dict[str, Any]:
        """Return all there is to know, as JSON holds it; see `from_description`."""
        return {
            "sampling": dataclasses.asdict(self.sampling),
            "max_new_tokens": self.max_new_tokens,
            "eos_token_ids": sorted(self._eos),
            "stop": self._stops.stops,
            "logprobs": self.logprobs,
            "count": self.count,
            "finish_reason": self.finish_reason,
            "context": self._context,
            "tokens": list(self._tokens),
            "held": [None if each is None else each.as_list() for each in self._held],
        }

    @classmethod
    def from_description(
        cls, description: Mapping[str, Any], vocab_size: int, detokenize: Detokenize | None = None
    ) -> Turn:
        """Rebuild a generation that goes on as the described one would have.

        Raises:
            ContractMismatchError: the description is not one that `describe` of this version makes.
            ConfigError: a stop is a text, and there is no tokenizer.
        """
        try:
            options = TurnOptions(
                sampling=Sampling(**description["sampling"]),
                max_new_tokens=description["max_new_tokens"],
                eos_token_ids=frozenset(whole_number("token", token, 0) for token in description["eos_token_ids"]),
                stop=list(description["stop"]),
                logprobs=description["logprobs"],
                context=[whole_number("token", token, 0) for token in description.get("context", ())],
            )
            count, reason = whole_number("count", description["count"], 0), description["finish_reason"]
            tokens = [whole_number("token", token, 0) for token in description["tokens"]]
            held = [None if each is None else TokenLogprobs.from_list(each) for each in description["held"]]
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(error) from error
        turn = cls(options, vocab_size, detokenize)
        turn.count, turn.finish_reason = count, reason
        turn._tokens, turn._held = tokens, deque(held)
        turn._replay()
        return turn

    def _start(self) -> DetokenizerStream:
        """Start to decode tokens. Raises ConfigError where there is no tokenizer."""
        if self._detokenize is None:
            raise ConfigError("there is no tokenizer")
        return self._detokenize(self._context)

    def _draw(self, position: int, seen: Sequence[int] = ()) -> Draw:
        return Draw(sampling=self.sampling, seed=self._seed, position=position, seen=seen)

    def _limit(self, length: int, max_context: int) -> str | None:
        if self.count >= self.max_new_tokens:
            return "length"
        return "context" if length > max_context else None

    def _push(self, token: int, logprobs: TokenLogprobs | None) -> tuple[list[Shown], bool]:
        self._tokens.append(token)
        self._held.append(logprobs)
        released, stopped = self._stops.push(token)
        return self._show(released), stopped

    def _flush(self, reason: str) -> list[Shown]:
        released, stopped = self._stops.flush()
        self.finish_reason = "stop" if stopped else reason
        return self._show(released)

    def _show(self, released: list[int]) -> list[Shown]:
        """Count what the filter has released; returns what was not shown before."""
        fresh = released[max(0, self._shown - self._released) :]
        self._released += len(released)
        self._shown = max(self._shown, self._released)
        return [Shown(token, self._held.popleft()) for token in fresh]

    def _replay(self) -> None:
        """Bring a new filter to where the tokens so far lead, and the end, if this has ended."""
        self._stops = StopFilter(self._stops.stops, self._vocab_size, self._start if self._detokenize else None)
        self._shown, self._released = len(self._tokens) - len(self._held), 0
        self._text = self.start_text()  # what the end had shown may be held back again
        stopped = False
        for token in self._tokens:
            released, stopped = self._stops.push(token)
            self._released += len(released)
        if self.finish_reason is not None and not stopped:
            self._released += len(self._stops.flush()[0])


def _unreadable(error: Exception) -> ContractMismatchError:
    return ContractMismatchError(
        f"a saved generation cannot be read ({error!r}); save it again with this version of Ortolan"
    )

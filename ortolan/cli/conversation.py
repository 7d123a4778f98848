"""A conversation in one session, which reads the token ids that the chat template gives for its messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortolan.cli.prompts import conversation_ids, following_ids
from ortolan.errors import CapacityError, ContextLengthError

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What is read before an answer.

    Attributes:
        base: token ids before the messages.
        messages: those of the conversation behind `base`, the new one last.
        token_ids: of all, up to where the answer begins.
        kept: how many of them the session has read, and keeps.
    """

    base: list[int]
    messages: list[Message]
    token_ids: list[int]
    kept: int


class Conversation:
    """Messages and answers.

    Each turn renders all of them, and the session goes back to where what it has read parts from that. So it has the
    template's ids however an answer ended, and also where the template writes earlier answers otherwise than they were
    read. Where an eviction has taken that history, the turn is put behind all that was read. The first turn behind a
    saved session is put there, too, as that has token ids and no messages.
    """

    def __init__(self, tokenizer: Any, session: Any, *, system: str | None, template: Path | None) -> None:
        """Go on from what the session has; where that is nothing, begin with the system message."""
        self._tokenizer, self._session = tokenizer, session
        self._system, self._template = system, template
        self._base: list[int] = list(session.state.tokens)
        self._messages: list[Message] = []

    def check(self) -> None:
        """Raise ConfigError where there is no template that can write the next message."""
        self._render(self._base, [_user("?")])

    def plan(self, text: str) -> Turn:
        """Return the turn of a user's message.

        Raises:
            ConfigError: the template refuses the messages, or cannot write one behind an answer.
            ContextLengthError: the turn is too long.
        """
        base, messages = self._base, [*self._messages, _user(text)]
        token_ids, state = self._render(base, messages), self._session.state
        kept = min(_common_length(token_ids, state.history), len(token_ids) - 1)
        if self._session.feeder.rewind_problem(kept):
            kept = 0
            if state.lengths.evicted_at:
                base, messages, kept = list(state.tokens), messages[-1:], state.fed
                token_ids = self._render(base, messages)
        longest = self._session.plan.max_context
        if len(token_ids) > longest:
            raise ContextLengthError(
                f"with this message the conversation has {len(token_ids)} tokens, past max_context = {longest}; send a "
                "shorter one, or begin a new conversation (/reset)"
            )
        return Turn(base=base, messages=messages, token_ids=token_ids, kept=kept)

    def read(self, turn: Turn, **choices: Any) -> Iterator[str]:
        """Read a turn, and return an iterator over the text of its answer.

        What was taken of the text counts as the answer, however it ends. Where it breaks off before any text, the
        message is not part of the conversation.

        Args:
            turn: planned last.
            choices: as in `Session.stream_text`.

        Raises:
            As `Session.stream_text`.
        """
        self._base, self._messages = turn.base, turn.messages[:-1]
        self._session.rewind(turn.kept)
        return self._heard(self._session.stream_text(turn.token_ids[turn.kept :], **choices), turn)

    def reset(self) -> None:
        """Begin a new conversation, with the same system message."""
        self._session.rewind(0)
        self._base, self._messages = [], []

    def _heard(self, text: Any, turn: Turn) -> Iterator[str]:
        said, is_whole = list[str](), False
        try:
            for piece in text:
                said.append(piece)
                yield piece
            is_whole = True
        finally:
            if said or is_whole:
                self._messages = [*turn.messages, {"role": "assistant", "content": "".join(said)}]
            self._forget_from(len(turn.token_ids) + len(text.generation.tokens))

    def _forget_from(self, length: int) -> None:
        """Forget what was chosen and not said, as of a stop, so that it is neither saved nor put before a message."""
        if len(self._session.state.tokens) > length:
            with contextlib.suppress(CapacityError):
                self._session.rewind(length)

    def _render(self, base: list[int], messages: list[Message]) -> list[int]:
        if base:
            return base + following_ids(self._tokenizer, messages, template=self._template)
        return conversation_ids(self._tokenizer, messages, system=self._system, template=self._template)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _common_length(first: list[int], second: list[int]) -> int:
    """Return how many ids two lists begin with alike."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)

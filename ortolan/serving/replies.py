"""Builds what answers hold as JSON: OpenAI's objects of completions and chat completions, whole or piece by piece."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortolan.serving.asked import Asked

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What came to one choice since the piece before.

    Attributes:
        choice: its number: prompt after prompt, the choices of each.
        text: whole characters.
        logprobs: of tokens, in order; empty where none are wanted.
        offsets: for each of these, where its text begins in the choice's; empty in chats.
        finish_reason: why the choice ended, as a stream says it; None before.
    """

    choice: int
    text: str
    logprobs: Sequence[Any] = ()
    offsets: Sequence[int] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Describes one answer; `tokenizer` gives tokens their texts."""

    asked: Asked
    model: str
    tokenizer: Any
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    _texts: dict[int, str] = field(default_factory=dict, init=False, repr=False)  # of tokens

    def whole(self, choices: Sequence[Sequence[Piece]], completion_tokens: int) -> dict[str, Any]:
        """Describe the answer of all choices, each given as its pieces."""
        described = []
        for index, pieces in enumerate(choices):
            text = "".join(piece.text for piece in pieces)
            given = [each for piece in pieces for each in piece.logprobs]
            logprobs = self._logprobs(given, [offset for piece in pieces for offset in piece.offsets])
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            described.append(
                {
                    "index": index,
                    **(content if self.asked.is_chat else {"text": text}),
                    "logprobs": logprobs,
                    "finish_reason": FINISH_REASONS[pieces[-1].finish_reason or "length"],
                }
            )
        return self._object("", described) | {"usage": self.usage(completion_tokens)}

    def beginning(self, choice: int) -> dict[str, Any] | None:
        """Describe what a stream says before a choice's first piece; None where that is nothing."""
        if not self.asked.is_chat:
            return None
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def piece(self, piece: Piece) -> dict[str, Any]:
        """Describe a piece of a stream."""
        content: Any = ({"content": piece.text} if piece.text else {}) if self.asked.is_chat else piece.text
        reason = None if piece.finish_reason is None else FINISH_REASONS[piece.finish_reason]
        return self._chunk(piece.choice, content, self._logprobs(piece.logprobs, piece.offsets), reason)

    def counts(self, completion_tokens: int) -> dict[str, Any]:
        """Describe the end of a stream that counts tokens."""
        return self._object(".chunk", []) | {"usage": self.usage(completion_tokens)}

    def starts(self, prompt: Sequence[int]) -> Callable[[int], int]:
        """Return what says, token after token behind a prompt, where the text of each begins."""
        stream, length = self.tokenizer.stream(prompt), 0

        def start(token: int) -> int:
            nonlocal length
            before, length = length, length + len(stream.push(token))
            return before

        return start

    def usage(self, completion_tokens: int) -> dict[str, int]:
        """Count tokens; a prompt counts once, however many choices it has."""
        prompt_tokens = sum(len(each) for each in self.asked.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def _chunk(self, choice: int, content: Any, logprobs: Any, reason: str | None) -> dict[str, Any]:
        name = "delta" if self.asked.is_chat else "text"
        described = {"index": choice, name: content, "logprobs": logprobs, "finish_reason": reason}
        return self._object(".chunk", [described]) | ({"usage": None} if self.asked.has_usage else {})

    def _object(self, suffix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        if self.asked.is_chat:
            kind, prefix = f"chat.completion{suffix}", "chatcmpl"
        else:
            kind, prefix = "text_completion", "cmpl"
        return {
            "id": f"{prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, given: Sequence[Any], offsets: Sequence[int]) -> dict[str, Any] | None:
        if self.asked.options["logprobs"] is None:
            return None
        if self.asked.is_chat:
            content = [
                self._token(each.token, each.logprob) | {"top_logprobs": [self._token(*pair) for pair in each.top]}
                for each in given
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._text(each.token) for each in given],
            "token_logprobs": [each.logprob for each in given],
            "top_logprobs": [{self._text(token): value for token, value in reversed(each.top)} for each in given],
            "text_offset": list(offsets),
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        held = None if _REPLACEMENT in text else list(text.encode("utf-8"))  # a token may hold a part of a character
        return {"token": text, "logprob": logprob, "bytes": held}

    def _text(self, token: int) -> str:
        """Return a token's text with its space, which decoders leave out at the beginning."""
        if token not in self._texts:
            once, twice = (self.tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
            self._texts[token] = twice[len(once) :]
        return self._texts[token]

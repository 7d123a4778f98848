"""Turns a generation into a stream of text."""

from __future__ import annotations

from collections.abc import Iterator

from ortolan.errors import ConfigError
from ortolan.runtime.generate.generation import Generation
from ortolan.runtime.steps.layout import TokenIds
from ortolan.runtime.text.tokenizer import Tokenizer


def prompt_ids(tokenizer: Tokenizer, prompt: str | TokenIds, *, is_first: bool) -> TokenIds:
    """Return the token ids of a prompt; a text that begins a sequence gets the special tokens that do so.

    Raises:
        ConfigError: the text is empty.
    """
    if not isinstance(prompt, str):
        return prompt
    token_ids = tokenizer.encode(prompt, add_special_tokens=is_first)
    if not token_ids:
        raise ConfigError("the prompt is a text without tokens; give one that is not empty")
    return token_ids


class TextStream(Iterator[str]):
    """An iterator over the text that follows a prompt. Made by `Session.stream_text`.

    Each piece consists of whole characters, with their spaces; a token that completes no character gives none.

    Attributes:
        generation: the tokens behind the text: `tokens`, `logprobs`, `text` and `finish_reason` so far.
    """

    def __init__(self, generation: Generation, shown: int = 0) -> None:
        """Yield the text of a generation behind its first `shown` characters."""
        self.generation = generation
        self._shown = shown

    def __next__(self) -> str:
        while True:
            is_last = next(self.generation, None) is None
            text = self.generation.text
            assert text is not None  # whoever made this has a tokenizer
            piece = text[self._shown :]
            self._shown = max(self._shown, len(text))
            if piece:
                return piece
            if is_last:
                raise StopIteration

"""Turns a stream of token ids into a stream of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ortolan.runtime.text.tokenizer import Tokenizer


def stream_text(tokenizer: Tokenizer, token_ids: Iterable[int]) -> Iterator[str]:
    """Yield text piece by piece, whole characters only.

    Args:
        tokenizer: of the model.
        token_ids: as `Session.generate` yields them.
    """
    stream = tokenizer.stream()
    for token in token_ids:
        piece = stream.push(token)
        if piece:
            yield piece
    rest = stream.finish()
    if rest:
        yield rest

"""Turns a stream of token ids into a stream of text that ends at a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ortolan.errors import ConfigError
from ortolan.runtime.text.tokenizer import Tokenizer


def stream_text(tokenizer: Tokenizer, token_ids: Iterable[int], stop: str | Sequence[str] = ()) -> Iterator[str]:
    """Yield text piece by piece: whole characters only, and nothing of a stop string.

    Args:
        tokenizer: of the model.
        token_ids: as `Session.generate` yields them; not consumed further once a stop string is complete.
        stop: texts at which to end, or one.

    Raises:
        ConfigError: a stop string is empty.
    """
    stop = check_stop_strings(stop)
    stream = tokenizer.stream()
    held = ""
    for token in token_ids:
        held += stream.push(token)
        end = first_stop(held, stop)
        if end is not None:
            if end:
                yield held[:end]
            return
        safe = len(held) - possible_stop(held, stop)
        if safe:
            yield held[:safe]
            held = held[safe:]
    held += stream.finish()
    end = first_stop(held, stop)
    rest = held if end is None else held[:end]
    if rest:
        yield rest


def check_stop_strings(stop: str | Sequence[str]) -> Sequence[str]:
    """Return stop strings as a list, also where one is given. Raises ConfigError where one is empty."""
    listed = [stop] if isinstance(stop, str) else stop
    if any(not text for text in listed):
        raise ConfigError("a stop string is empty; it would stop before the first token")
    return listed


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first stop string begins."""
    found = [position for position in (text.find(s) for s in stop) if position >= 0]
    return min(found, default=None)


def possible_stop(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which a stop string begins."""
    longest = 0
    for s in stop:
        for length in range(min(len(s) - 1, len(text)), longest, -1):
            if text.endswith(s[:length]):
                longest = length
                break
    return longest

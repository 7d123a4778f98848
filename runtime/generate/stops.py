"""Finds where stop tokens and stop texts end a generation, and holds back what may belong to one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ortolan.errors import ConfigError
from ortolan.runtime.text.tokenizer import DetokenizerStream

Stops = int | str | Sequence[int | str | Sequence[int]]
StartText = Callable[[], DetokenizerStream]


class StopFilter:
    """Holds back tokens that may turn out to be a part of what stops.

    Its state depends on the tokens pushed alone: pushing them to a new filter restores it.

    Attributes:
        stops: texts and sequences of token ids, in the order given.
        text: of the tokens handed on, and at a stop string also what its first token holds before it; None where no
            stop is a string.
    """

    def __init__(self, stops: Stops, vocab_size: int, start: StartText | None = None) -> None:
        """Take token ids, sequences of them, and texts.

        Args:
            stops: in any order; a single id is a sequence of one. One text or id may come without a list.
            vocab_size: V.
            start: starts to decode ids; called where a stop is a text. None: there is no tokenizer.

        Raises:
            ConfigError: a stop is empty, or is neither a text nor token ids, or is a text and there is no tokenizer.
        """
        self.stops = [stop if isinstance(stop, str) else _checked(stop, vocab_size) for stop in _listed(stops)]
        strings = [stop for stop in self.stops if isinstance(stop, str)]
        self._stops = [stop for stop in self.stops if not isinstance(stop, str)]
        self._held: list[int] = []
        self._texts = _TextStops(strings, start) if strings else None
        self.text = "" if strings else None

    def push(self, token: int) -> tuple[list[int], bool]:
        """Take a token; returns the tokens that certainly are not part of a stop, and whether one is whole."""
        if not self._stops and self._texts is None:
            return [token], False
        self._held.append(token)
        if self._texts is not None:
            self._texts.push(token)
        return self._hand_on(is_last=False)

    def flush(self) -> tuple[list[int], bool]:
        """Return what is held back, up to a stop string that is whole now; nothing follows."""
        if self._texts is not None:
            self._texts.finish()
        return self._hand_on(is_last=True)

    def _hand_on(self, *, is_last: bool) -> tuple[list[int], bool]:
        held, texts = self._held, self._texts
        cuts = [len(held) - len(stop) for stop in self._stops if held[-len(stop) :] == stop]
        text_cut = texts.find() if texts else None
        if text_cut is not None and text_cut <= min(cuts, default=len(held)):
            self._take_text(text_cut, at_stop=True)
            return held[:text_cut], True
        if cuts:
            self._take_text(min(cuts), at_stop=False)
            return held[: min(cuts)], True
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        count = len(held) if is_last else min(len(held) - keep, texts.safe_tokens() if texts else len(held))
        self._take_text(count, at_stop=False)
        self._held = held[count:]
        return held[:count], False

    def _take_text(self, tokens: int, *, at_stop: bool) -> None:
        if self._texts is not None and self.text is not None:
            self.text += self._texts.take(tokens, at_stop=at_stop)


class _TextStops:
    """The text of the tokens held back; offsets count its characters."""

    def __init__(self, strings: list[str], start: StartText | None) -> None:
        if not all(strings):
            raise ConfigError("stop contains an empty text, which would stop before the first token; remove it")
        if start is None:
            raise ConfigError(f"stop contains the text {strings[0]!r}, but there is no tokenizer; use token ids")
        self._strings, self._stream = strings, start()
        self._text = ""
        self._ends: list[int] = []  # where each token's text ends; fewer than tokens while a character is not whole
        self._tokens = 0

    def push(self, token: int) -> None:
        """Take a token."""
        self._tokens += 1
        self._add(self._stream.push(token))

    def finish(self) -> None:
        """Take what is left of characters that never became whole."""
        self._add(self._stream.finish())

    def find(self) -> int | None:
        """Return how many tokens end before the first stop string begins; None where there is none."""
        begin = first_stop(self._text, self._strings)
        return None if begin is None else self._ended(begin)

    def safe_tokens(self) -> int:
        """Return how many tokens no stop string can reach into."""
        return self._ended(len(self._text) - possible_stop(self._text, self._strings))

    def take(self, tokens: int, *, at_stop: bool) -> str:
        """Forget the first tokens; returns their text, and at a stop string all before it."""
        ended = self._ends[:tokens]
        end = ended[-1] if ended else 0
        if at_stop:
            end = first_stop(self._text, self._strings) or 0
        taken, self._text = self._text[:end], self._text[end:]
        self._ends = [other - end for other in self._ends[tokens:]]
        self._tokens -= tokens
        return taken

    def _add(self, piece: str) -> None:
        self._text += piece
        if self._stream.is_whole:  # then so are the characters of which tokens before had some bytes
            self._ends += [len(self._text)] * (self._tokens - len(self._ends))

    def _ended(self, offset: int) -> int:
        return sum(end <= offset for end in self._ends)


def _listed(given: Any) -> list[Any]:
    """Return what is given as a list; one text or number, also an array without axes, as a list of one."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        return [given]
    return list(given)


def _checked(stop: int | Sequence[int], vocab_size: int) -> list[int]:
    tokens = _listed(stop)
    valid = all(isinstance(t, (int, np.integer)) and not isinstance(t, bool) and 0 <= t < vocab_size for t in tokens)
    if not tokens or not valid:
        raise ConfigError(
            f"stop contains {stop!r}; each stop must be a text, a token id in 0 .. {vocab_size - 1}, or a list of such "
            "ids"
        )
    return [int(token) for token in tokens]


def _overlap(held: list[int], stop: list[int]) -> int:
    """Return the length of the longest end of `held` that begins `stop`, but is not all of it."""
    longest = min(len(held), len(stop) - 1)
    return next(n for n in range(longest, -1, -1) if held[len(held) - n :] == stop[:n])


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

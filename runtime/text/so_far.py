"""The text of a list of tokens that grows, decoded when somebody asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ortolan.errors import ConfigError
from ortolan.runtime.text.tokenizer import DetokenizerStream


class TextSoFar:
    """Decodes tokens as far as they are there, each once; any thread may ask."""

    def __init__(self, start: Callable[[], DetokenizerStream], before: Sequence[int] = ()) -> None:
        """Decode nothing yet.

        Args:
            start: starts to decode ids; raises ConfigError where there is no tokenizer.
            before: tokens that come before the list.
        """
        self._start, self._before = start, before
        self._stream: DetokenizerStream | None = None
        self._text = ""
        self._count = 0  # tokens of the list that are in the text
        self._lock = threading.Lock()

    def read(self, tokens: Sequence[int], count: int, *, is_last: bool) -> str | None:
        """Return the text of the first `count` tokens of the list; None where there is no tokenizer.

        It ends with a whole character; where no token follows, with all bytes that there are.
        """
        with self._lock:
            if self._stream is None:
                try:
                    self._stream = self._start()
                except ConfigError:
                    return None
                self._push(self._before)
            self._push(tokens[self._count : count])
            self._count = max(self._count, count)
            return self._text + self._stream.held if is_last else self._text

    def _push(self, tokens: Sequence[int]) -> None:
        assert self._stream is not None
        for token in tokens:
            self._text += self._stream.push(token)

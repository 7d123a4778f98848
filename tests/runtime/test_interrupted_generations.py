"""Interrupts at each line between what a generation has chosen and what its caller takes: no token is skipped."""

import contextlib
import sys

import pytest

from ortolan import ConfigError
from ortolan.runtime.generate.generation import Generation

COUNT = 8
CODES = {code: code.co_name for code in (Generation.__next__.__wrapped__.__code__, Generation._advance.__code__)}


class InterruptedLine:
    """Raises KeyboardInterrupt before line `number` of the calls of a generation, counted from 1."""

    def __init__(self, number):
        self.left, self.where = number, None

    def __enter__(self):
        sys.settrace(lambda frame, event, argument: self._trace if frame.f_code in CODES else None)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        self.left -= event == "line"
        if not self.left and self.where is None:
            self.where = CODES[frame.f_code]
            raise KeyboardInterrupt
        return self._trace


def interrupt_generation(generation, number):
    """Take tokens until an interrupt; returns the function of that line, None: there are fewer."""
    with InterruptedLine(number) as interrupt, contextlib.suppress(KeyboardInterrupt):
        list(generation)
    return interrupt.where


def resume(session, left):
    """Return what a generation has yielded and what follows in another one."""
    count = len(left.tokens)
    rest = session.resume()
    return left.tokens + list(rest), left.logprobs[:count] + rest.logprobs


def take_on(session, left):
    """Return what a generation yields in all."""
    list(left)
    return left.tokens, left.logprobs


@pytest.mark.parametrize("go_on", [resume, take_on])
def test_an_interrupt_at_any_line_loses_no_token(endless_full, open_session, draw_tokens, go_on):
    """Within `_advance` the token may be lost that was being chosen; then what follows is refused."""
    prompt, places, refused = draw_tokens(20), [], []
    whole = open_session(endless_full).generate(prompt, COUNT, logprobs=2)
    expected = list(whole), whole.logprobs
    held = [[*whole.tokens[2:5], whole.tokens[5] ^ 1], [whole.tokens[-1], 0]]  # several are shown at once then
    while None not in places:
        session = open_session(endless_full)
        left = session.generate(prompt, COUNT, logprobs=2, stop=held)
        places.append(interrupt_generation(left, len(places) + 1))
        assert left.tokens == expected[0][: len(left.tokens)]
        try:
            found = go_on(session, left)
        except ConfigError:
            refused.append(places[-1])
            continue
        assert found == expected
    assert {"__next__", "_advance"} < set(places)
    assert set(refused) == {"_advance"}

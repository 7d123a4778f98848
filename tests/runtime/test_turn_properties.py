"""Any turns leave a session as if its tokens had been read at once by a fresh one."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import on_fake_cuda
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity import relative_difference
from sessions import DEVICES
from tolerances import LOGITS_RELATIVE

from ortolan import Sampling
from ortolan.errors import CapacityError

LONGEST = 300
TOKENS = st.integers(0, 10**6)  # the seed of a turn's tokens
TURNS = st.one_of(
    st.tuples(st.just("prefill"), st.sampled_from([1, 2, 15, 16, 17, 60]), TOKENS),
    st.tuples(st.just("step"), st.sampled_from([1, 5]), TOKENS),
    st.tuples(st.just("generate"), st.sampled_from([1, 3, 20]), TOKENS, st.integers(0, 12), st.booleans()),
    st.tuples(st.just("resume"), st.integers(1, 6)),
    st.tuples(st.just("rewind"), st.sampled_from([0, 1, 4, 15, 40, 400])),
    st.tuples(st.just("fork"), st.booleans()),
    st.tuples(st.just("restore"), st.sampled_from([0, 1, 30])),
)


class Reference:
    """A session under test, and the tokens of which its sequence should consist."""

    def __init__(self, model, plain) -> None:
        self.model, self.plain = model, plain
        self.session, self.tokens = model.session(), list[int]()
        self.left: tuple[list[int], Sampling | None] | None = None  # of a generation: what is to come, and how

    def draw(self, count: int, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(3, 131, count).tolist()

    def check_logits(self, logits) -> None:
        assert relative_difference(logits, self.plain.session().prefill(self.tokens)) <= LOGITS_RELATIVE

    def prefill(self, count: int, seed: int) -> None:
        self.left, given = None, self.draw(count, seed)
        self.tokens += given
        self.check_logits(self.session.prefill(given))

    def step(self, count: int, seed: int) -> None:
        for token in self.draw(count, seed):
            self.left = None
            self.tokens.append(token)
            self.check_logits(self.session.step(token))

    def generate(self, count: int, seed: int, taken: int, is_random: bool) -> None:
        """Take some tokens of a generation, which is left as it is then."""
        sampling = Sampling(temperature=1.1, repetition_penalty=1.2, seed=seed) if is_random else None
        given = self.draw(count, seed)
        self.tokens += given
        to_come = list(self.plain.session().generate(self.tokens, 12, sampling))
        seen = list(itertools.islice(self.session.generate(given, 12, sampling), taken))
        assert seen == to_come[:taken]
        self.tokens += seen
        self.left = (to_come[taken:], sampling)

    def resume(self, count: int) -> None:
        """Go on with what is left of the last generation, if anything is, and nothing came between."""
        if self.left is None or not self.left[0]:
            return
        to_come, sampling = self.left
        count = min(count, len(to_come))
        seen = list(self.session.resume(count))
        assert seen == to_come[:count]
        self.tokens += seen
        self.left = (to_come[count:], sampling)

    def rewind(self, back: int) -> None:
        length = max(0, self.session.logical_length - back)
        self.left = None
        try:
            self.session.rewind(length)
        except CapacityError:  # a ring has overwritten it; nothing changed
            assert self.plain.manifest.layers[0].window > 0
            return
        del self.tokens[length:]

    def fork(self, use_fork: bool) -> None:
        """Go on with one of the two; the other one reads something else meanwhile."""
        other = self.session.fork()
        if use_fork:
            self.session, other = other, self.session
        other.prefill(self.draw(20, len(self.tokens)))

    def restore(self, rewind_tokens: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.session.save(Path(folder) / "session", rewind_tokens)
            self.session = self.model.restore(Path(folder) / "session")


@pytest.fixture(params=["full_model", "mixed_model", "paged_model", "paged_mixed_model", "sharing_model"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(TURNS, min_size=3, max_size=12))
def test_turns_leave_nothing_but_their_tokens(endless, monkeypatch, device, turns):
    reference = Reference(on_fake_cuda(endless, monkeypatch) if device == "device" else endless, endless)
    for kind, *options in turns:
        if len(reference.tokens) > LONGEST:
            break
        getattr(reference, kind)(*options)
        session = reference.session
        assert session.state.tokens == reference.tokens
        assert session.logical_length == len(reference.tokens) - len(session.state.pending)
        assert len(session.state.pending) <= 1
    question = reference.draw(7, 1)
    reference.tokens += question
    reference.check_logits(reference.session.prefill(question))

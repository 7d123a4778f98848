"""What is done to a session while its generation has steps under way past the last token that was taken."""

import numpy as np
import pytest
from fake_cuda import on_fake_cuda
from oracle_drafter import Oracle
from parity import relative_difference
from sessions import open_with_room
from tolerances import SAME_LOGITS

from ortolan import Sampling, SnapKv
from ortolan.errors import CapacityError, ConfigError
from ortolan.runtime.caches.plan import STEPS_AHEAD

SNAPKV = SnapKv(budget=40, window=8, sink=2)
SAMPLING = Sampling(temperature=1.2, top_k=30, repetition_penalty=1.2, seed=5)
PROMPT, COUNT = 130, 40


@pytest.fixture(params=["full_model", "mixed_model", "paged_model", "paged_mixed_model"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def placed(endless, monkeypatch):
    return on_fake_cuda(endless, monkeypatch)


def start(session, prompt, taken, sampling=SAMPLING):
    """Take tokens of a generation, so that steps are under way behind them; returns the stream and what was taken."""
    stream = session.generate(prompt, COUNT, sampling)
    return stream, [next(stream) for _ in range(taken)]


@pytest.mark.parametrize("taken", [1, 2, 7])
def test_as_many_steps_are_under_way_as_may_be(placed, draw_tokens, taken):
    session = placed.session()
    start(session, draw_tokens(PROMPT), taken)
    before = session.state.lengths.highest
    session.rewind(session.logical_length)
    assert session.state.lengths.highest - session.logical_length == (STEPS_AHEAD if taken > 2 else 0)
    assert before <= session.state.lengths.highest


@pytest.mark.parametrize("back", [0, 1, 5, 20, 60])
@pytest.mark.parametrize("taken", [1, 6])
def test_a_rewind_forgets_them(endless, placed, draw_tokens, taken, back):
    session = placed.session()
    stream, seen = start(session, draw_tokens(PROMPT), taken)
    everything = [*draw_tokens(PROMPT), *seen]
    length = len(everything) - 1 - back
    session.rewind(length)
    assert session.state.tokens == session.state.history == everything[:length]
    with pytest.raises(ConfigError, match="used otherwise"):
        next(stream)
    question = draw_tokens(9, seed=3)
    expected = endless.session().prefill([*everything[:length], *question])
    assert relative_difference(session.prefill(question), expected) <= SAME_LOGITS


def test_a_ring_counts_them_as_written(endless_mixed, monkeypatch, draw_tokens):
    """The shortest length that it can go back to is that of a session which read as many tokens."""
    model = on_fake_cuda(endless_mixed, monkeypatch)

    def shortest(session, length):
        while length > 3:
            try:
                session.feeder.check_rewind(length - 1)
            except CapacityError:
                return length
            length -= 1
        return length

    ahead, straight = model.session(), model.session()
    start(ahead, draw_tokens(300), 9)
    ahead.rewind(ahead.logical_length)
    straight.prefill(draw_tokens(ahead.state.lengths.highest))
    assert shortest(ahead, ahead.logical_length) == shortest(straight, straight.logical_length) > 3


@pytest.mark.parametrize("evicting", [False, True])
@pytest.mark.parametrize("taken", [1, 2, 6, COUNT])
def test_a_session_saved_meanwhile_goes_on_as_it_would(endless, placed, draw_tokens, tmp_path, taken, evicting):
    options = SNAPKV if evicting else None
    expected = list(endless.session(snapkv=options).generate(draw_tokens(PROMPT), COUNT, SAMPLING))
    session = open_with_room(placed, 20, snapkv=options)
    stream, seen = start(session, draw_tokens(PROMPT), taken)
    session.save(tmp_path / "session")
    assert seen + list(stream) == expected
    for model in (placed, endless):
        restored = model.restore(tmp_path / "session")
        assert restored.state.tokens == [*draw_tokens(PROMPT), *seen]
        assert restored.logical_length == PROMPT + taken - 1
        assert seen + list(restored.resume()) == expected
        assert restored.finish_reason == "length"
        assert restored.state.tokens == session.state.tokens


@pytest.mark.parametrize("evicting", [False, True])
def test_a_session_saved_meanwhile_reads_a_question_as_it_would(endless, placed, draw_tokens, tmp_path, evicting):
    """Steps under way took rows of captured queries and slots of rings; those are not in the file."""
    options = SNAPKV if evicting else None
    session, host = placed.session(snapkv=options), endless.session(snapkv=options)
    for each in (session, host):
        start(each, draw_tokens(PROMPT), 6)
    session.save(tmp_path / "session", rewind_tokens=5)
    question = draw_tokens(3, seed=2)
    expected = host.prefill(question)
    for each in (placed.restore(tmp_path / "session"), endless.restore(tmp_path / "session"), session):
        assert relative_difference(each.prefill(question), expected) <= SAME_LOGITS
        for layer in range(4):
            np.testing.assert_equal(each.kept_positions(layer), host.kept_positions(layer))


def test_scores_and_refused_calls_leave_them(endless, placed, draw_tokens):
    expected = list(endless.session().generate(draw_tokens(PROMPT), COUNT, SAMPLING))
    session = placed.session()
    stream, seen = start(session, draw_tokens(PROMPT), 5)
    for call in (lambda: session.score([5, 6]), lambda: session.prefill([-1]), lambda: session.rewind(999)):
        with pytest.raises(ConfigError, match=r"score|token|rewind"):
            call()
    session.memory_report()
    assert seen + list(stream) == expected


def test_a_draft_is_checked_while_tokens_are_taken(endless, placed, draw_tokens):
    """Whoever stops behind any token leaves a sequence of just the tokens that were taken."""
    prompt, question = draw_tokens(PROMPT), draw_tokens(9, seed=3)
    expected = list(endless.session().generate(prompt, COUNT))
    oracle = Oracle(tokens=4, right=((*prompt, *expected),), share=0.8)
    ahead = set()
    for taken in range(3, 14):
        session = placed.session()
        stream = session.generate(prompt, COUNT, speculation=oracle)
        assert [next(stream) for _ in range(taken)] == expected[:taken]
        read = session.logical_length
        session.rewind(read)
        ahead.add(session.state.lengths.highest - read)
        assert session.state.tokens == [*prompt, *expected[: taken - 1]][:read]
        straight = endless.session().prefill([*session.state.tokens, *question])
        assert relative_difference(session.prefill(question), straight) <= SAME_LOGITS
    assert max(ahead) > oracle.tokens  # a token and a draft, behind what is left of the draft before

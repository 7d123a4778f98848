"""How likely given tokens were: as the logits of single steps say."""

import numpy as np
import pytest
from fake_cuda import on_fake_cuda
from parity import relative_difference
from sessions import DEVICES, failing_step
from tolerances import LOGPROBS, SAME_LOGITS

from ortolan import SnapKv
from ortolan.errors import CapacityError, ConfigError, OrtolanError
from ortolan.runtime.steps.reader import SCORED_ROWS


@pytest.fixture(params=["full_model", "mixed_model", "paged_model"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=DEVICES)
def placed(request, endless, monkeypatch):
    return on_fake_cuda(endless, monkeypatch) if request.param == "device" else endless


def expected_logprobs(model, tokens) -> np.ndarray:
    """Return the log-softmax of the logits after each token but the last, [T - 1, V], from single steps."""
    session = model.session()
    logits = np.array([session.step(token) for token in tokens], np.float64)[:-1]
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def assert_scores(scored, tokens, expected, k):
    assert [each.token for each in scored] == list(tokens)
    for each, row in zip(scored, expected, strict=True):
        assert each.logprob == pytest.approx(row[each.token], abs=LOGPROBS)
        assert [value for _, value in each.top] == pytest.approx(np.sort(row)[::-1][:k], abs=LOGPROBS)
        assert [value for _, value in each.top] == pytest.approx([row[token] for token, _ in each.top], abs=LOGPROBS)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(
    ("count", "chunk_size"), [(1, None), (2, None), (16, None), (17, None), (40, 1), (40, 7), (100, None)]
)
def test_scores_are_those_of_single_steps(endless, placed, draw_tokens, count, chunk_size, k):
    tokens = draw_tokens(count)
    session = placed.session(chunk_size=chunk_size)
    scored = session.score(tokens, logprobs=k)
    assert_scores(scored, tokens[1:], expected_logprobs(endless, tokens), k)
    assert session.state.tokens == session.state.history == tokens
    expected = endless.session().prefill([*tokens, 5])
    assert relative_difference(session.step(5), expected) <= SAME_LOGITS


@pytest.mark.parametrize("count", [SCORED_ROWS, SCORED_ROWS + 1, SCORED_ROWS + 20])
def test_large_chunks_are_scored_in_pieces(endless_full, monkeypatch, draw_tokens, count):
    """The logits of a piece are in memory at once; the last piece may be a single token, with nothing to score."""
    tokens, read = draw_tokens(count), []
    expected = expected_logprobs(endless_full, tokens)
    for model in (endless_full, on_fake_cuda(endless_full, monkeypatch)):
        session = model.session(chunk_size=512)
        assert_scores(session.score(tokens, progress=read.append), tokens[1:], expected, 0)
    assert sum(read) == 2 * count
    assert max(read) == SCORED_ROWS


def test_a_text_is_scored_after_what_was_read(endless, placed, draw_tokens):
    tokens = draw_tokens(120)
    session = placed.session()
    session.prefill(tokens[:60])
    scored = session.score(tokens[60:90]) + session.score(tokens[90:])
    expected = expected_logprobs(endless, tokens)
    assert_scores(scored, [*tokens[61:90], *tokens[91:]], [*expected[60:89], *expected[90:]], 0)
    assert session.logical_length == 120


def test_scoring_evicts_nothing_and_feeds_nothing_that_waits(placed, draw_tokens):
    evicting, waiting = placed.session(snapkv=SnapKv(budget=40, window=8)), placed.session()
    stream = waiting.generate(draw_tokens(10), 5)
    token = next(stream)
    for session, problem in ((evicting, "without eviction"), (waiting, "waits to be read")):
        with pytest.raises(ConfigError, match=problem):
            session.score(draw_tokens(20))
    assert evicting.logical_length == 0
    assert waiting.state.pending == [token]
    assert len([token, *stream]) == 5


@pytest.mark.parametrize("bad", [[], [131], [-1], "text", [1.5]], ids=repr)
def test_bad_tokens_are_refused_before_anything_is_read(placed, bad):
    session = placed.session()
    with pytest.raises(ConfigError, match="token"):
        session.score(bad)
    assert session.logical_length == 0


@pytest.mark.parametrize("options", [{"logprobs": -1}, {"logprobs": 65}, {"progress": 5}], ids=repr)
def test_bad_options_are_refused_before_anything_is_read(placed, draw_tokens, options):
    session = placed.session()
    with pytest.raises(ConfigError, match=next(iter(options))):
        session.score(draw_tokens(5), **options)
    assert session.logical_length == 0


def test_a_text_beyond_the_context_is_refused_before_anything_is_read(placed, draw_tokens):
    session = placed.session(max_context=40)
    with pytest.raises(CapacityError, match="max_context = 40"):
        session.score(draw_tokens(41))
    assert session.logical_length == 0
    assert len(session.score(draw_tokens(40))) == 39


def test_a_step_that_fails_leaves_what_was_read_before_it(endless, placed, draw_tokens):
    session, tokens = placed.session(), draw_tokens(60)
    with failing_step(session, 3, OrtolanError("the decoder graph failed")), pytest.raises(OrtolanError):
        session.score(tokens)
    assert session.state.tokens == tokens[:32]
    scored = session.score(tokens[32:])
    assert_scores(scored, tokens[33:], expected_logprobs(endless, tokens)[32:], 0)

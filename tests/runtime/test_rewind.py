"""Going back in a sequence, and what rings and evictions no longer allow."""

import numpy as np
import pytest
from parity import relative_difference
from sessions import failing_step
from tolerances import SAME_LOGITS

from ortolan import SnapKv
from ortolan.errors import CapacityError, ConfigError, OrtolanError

SNAPKV = SnapKv(budget=40, window=8, sink=2)


@pytest.mark.parametrize("length", [0, 1, 31, 59, 60])
def test_rewinding_equals_never_having_gone_on(full_model, draw_tokens, length):
    prompt, other = draw_tokens(60), draw_tokens(25, seed=1)
    session = full_model.session()
    session.prefill(prompt)
    session.rewind(length)
    assert session.logical_length == session.physical_length(0) == length
    expected = full_model.session().prefill(prompt[:length] + other)
    assert relative_difference(session.prefill(other), expected) <= SAME_LOGITS


@pytest.mark.parametrize("length", range(90, 121, 3))
def test_a_ring_gives_the_right_answer_or_refuses(mixed_model, draw_tokens, length):
    """Rings of 64 slots, 2 sinks and a window of 20: 43 tokens back is the most."""
    prompt, other = draw_tokens(140), draw_tokens(30, seed=1)
    session = mixed_model.session()
    session.prefill(prompt)
    if length < 140 - 43:
        with pytest.raises(CapacityError, match="ring of layer 0"):
            session.rewind(length)
        assert session.logical_length == 140
        length = 140
    else:
        session.rewind(length)
    expected = mixed_model.session().prefill(prompt[:length] + other)
    assert relative_difference(session.prefill(other), expected) <= SAME_LOGITS


def test_rewinding_again_counts_from_what_the_ring_saw_last(mixed_model, draw_tokens):
    session = mixed_model.session()
    session.prefill(draw_tokens(140))
    session.rewind(100)
    session.prefill(draw_tokens(5))
    with pytest.raises(CapacityError, match="ring"):
        session.rewind(90)
    session.rewind(100)


@pytest.mark.parametrize("length", [-1, 11, 1.5, 3.0, None, True])
def test_lengths_out_of_range_are_refused(full_model, draw_tokens, length):
    session = full_model.session()
    session.prefill(draw_tokens(10))
    with pytest.raises(ConfigError, match=r"0 \.\. 10"):
        session.rewind(length)
    assert session.logical_length == 10


def test_rewinding_drops_the_token_that_was_not_fed(full_model, draw_tokens):
    session = full_model.session()
    next(session.generate(draw_tokens(10)))
    session.rewind(10)
    expected = full_model.session().prefill([*draw_tokens(10), 9])
    assert relative_difference(session.step(9), expected) <= SAME_LOGITS


def test_evicted_history_is_gone_and_later_history_is_not(full_model, draw_tokens):
    session = full_model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(100))
    for token in draw_tokens(6, seed=1):
        session.step(token)
    with pytest.raises(CapacityError, match="before 100 were evicted"):
        session.rewind(99)
    session.rewind(100)
    assert session.physical_length(0) == 40
    expected = full_model.session(snapkv=SNAPKV)
    expected.prefill(draw_tokens(100))
    assert relative_difference(session.step(9), expected.step(9)) <= SAME_LOGITS


def test_rewinding_to_the_start_forgets_evictions(full_model, draw_tokens):
    session = full_model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(100))
    session.rewind(0)
    assert session.kept_positions(0) is None
    expected = full_model.session(snapkv=SNAPKV)
    other = draw_tokens(200, seed=1)
    assert relative_difference(session.prefill(other), expected.prefill(other)) <= SAME_LOGITS
    np.testing.assert_array_equal(session.kept_positions(2), expected.kept_positions(2))


def fail_once(session, tokens: list[int]) -> None:
    """Feed tokens in a step that writes to the caches and then fails."""
    with (
        failing_step(session, 1, OrtolanError("the decoder graph failed")),
        pytest.raises(OrtolanError, match="failed"),
    ):
        session.prefill(tokens)


def test_a_failed_chunk_counts_for_what_a_ring_lost(mixed_model, draw_tokens):
    session = mixed_model.session()
    session.prefill(draw_tokens(140))
    fail_once(session, draw_tokens(16, seed=1))
    with pytest.raises(CapacityError, match="ring"):
        session.rewind(112)
    session.rewind(113)
    expected = mixed_model.session().prefill([*draw_tokens(140)[:113], 9])
    assert relative_difference(session.step(9), expected) <= SAME_LOGITS


def test_a_failed_chunk_counts_for_the_captured_queries(full_model, draw_tokens):
    session, straight = full_model.session(snapkv=SNAPKV), full_model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(38))
    fail_once(session, [5])
    fail_once(session, draw_tokens(7, seed=1))
    straight.prefill(draw_tokens(38))
    question = draw_tokens(3, seed=2)
    logits, expected = session.prefill(question), straight.prefill(question)
    assert relative_difference(logits, expected) <= SAME_LOGITS
    for layer in range(4):
        np.testing.assert_array_equal(session.kept_positions(layer), straight.kept_positions(layer))


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("length", [1, 2])
def test_a_sequence_goes_on_from_its_sinks(mixed_model, draw_tokens, tmp_path, length, restored):
    """What a ring has overwritten, or a file left out, is written anew before anything looks back on it."""
    prompt, other = draw_tokens(140), draw_tokens(90, seed=1)
    session = mixed_model.session()
    session.prefill(prompt)
    if restored:
        session.save(tmp_path / "session")
        session = mixed_model.restore(tmp_path / "session")
    session.rewind(length)
    for begin, end in ((0, 1), (1, 7), (7, 90)):
        logits = session.prefill(other[begin:end])
        expected = mixed_model.session().prefill(prompt[:length] + other[:end])
        assert relative_difference(logits, expected) <= SAME_LOGITS
    session.rewind(length + 85)

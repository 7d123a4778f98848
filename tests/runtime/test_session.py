"""Prefill, turns, refusals and generation on tiny models."""

import numpy as np
import pytest
from parity import relative_difference
from sessions import failing_step, numberless_step
from tolerances import SAME_LOGITS

from ortolan import Sampling, SnapKv
from ortolan.errors import CapacityError, ConfigError, NumericError, OrtolanError


def greedy(session, token_ids, count) -> list[int]:
    """Decode with step alone, without a stop at end-of-sequence."""
    tokens = [int(np.argmax(session.prefill(token_ids)))]
    while len(tokens) < count:
        tokens.append(int(np.argmax(session.step(tokens[-1]))))
    return tokens


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 50, 99])
def test_two_turns_equal_one(model, draw_tokens, cut):
    prompt = draw_tokens(100)
    expected = model.session().prefill(prompt)
    session = model.session()
    session.prefill(prompt[:cut])
    assert relative_difference(session.prefill(prompt[cut:]), expected) <= SAME_LOGITS
    assert session.logical_length == 100


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 512])
def test_chunks_do_not_matter(model, draw_tokens, chunk_size):
    prompt = draw_tokens(150)
    expected = model.session().prefill(prompt)
    session = model.session(chunk_size=chunk_size)
    assert relative_difference(session.prefill(prompt), expected) <= SAME_LOGITS


def test_sessions_of_one_model_do_not_meet(model, draw_tokens):
    one, two = model.session(), model.session()
    one.prefill(draw_tokens(30))
    two.prefill(draw_tokens(40, seed=1))
    expected = model.session().prefill(draw_tokens(31))
    assert relative_difference(one.step(draw_tokens(31)[-1]), expected) <= SAME_LOGITS


def test_returned_logits_stay_as_they_are(model, draw_tokens):
    session = model.session()
    logits = session.prefill(draw_tokens(5))
    before = logits.copy()
    session.step(9)
    np.testing.assert_array_equal(logits, before)
    assert logits.dtype == np.float32
    assert logits.shape == (model.manifest.vocab_size,)


BAD_TOKENS = [[], [[1, 2]], [1.5], [True], ["a"], [-1], [131], 5, [2**70], [[1], [2, 3]], [None]]


@pytest.mark.parametrize("bad", BAD_TOKENS, ids=str)
def test_bad_tokens_are_refused_before_anything_is_read(full_model, draw_tokens, bad):
    session = full_model.session()
    session.prefill(draw_tokens(10))
    with pytest.raises(ConfigError, match="token"):
        session.prefill(bad)
    assert session.logical_length == 10
    expected = full_model.session().prefill([*draw_tokens(10), 7])
    assert relative_difference(session.step(7), expected) <= SAME_LOGITS


def test_arrays_of_any_integer_type_are_taken(full_model, draw_tokens):
    expected = full_model.session().prefill(draw_tokens(9))
    for dtype in (np.uint8, np.int32, np.int64):
        tokens = np.array(draw_tokens(9), dtype)
        np.testing.assert_array_equal(full_model.session().prefill(tokens), expected)


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_read(full_model, draw_tokens):
    session = full_model.session(max_context=40)
    session.prefill(draw_tokens(40))
    with pytest.raises(CapacityError, match="max_context = 40"):
        session.step(3)
    with pytest.raises(CapacityError, match="max_context = 40"):
        full_model.session(max_context=40).prefill(draw_tokens(41))
    assert session.logical_length == 40


@pytest.mark.parametrize("layer", [-1, 4, 1.0, None])
def test_layers_out_of_range_are_refused(full_model, layer):
    session = full_model.session()
    for query in (session.physical_length, session.kept_positions, session.cache_capacity):
        with pytest.raises(ConfigError, match=r"0 \.\. 3"):
            query(layer)


def test_cache_bytes_are_those_of_the_plan(mixed_model, draw_tokens):
    session = mixed_model.session()
    assert session.cache_bytes == session.plan.bytes < session.plan.full_length_bytes
    session.prefill(draw_tokens(200))
    assert session.cache_bytes == session.plan.bytes
    assert [session.physical_length(layer) for layer in range(4)] == [64, 200, 64, 64]
    assert session.kept_positions(1) is None


def test_generate_equals_steps(endless, draw_tokens):
    expected = greedy(endless.session(), draw_tokens(30), 12)
    session = endless.session()
    assert list(session.generate(draw_tokens(30), max_new_tokens=12)) == expected
    assert session.finish_reason == "length"
    assert (session.stats.prefill_tokens, session.stats.decode_tokens) == (30, 11)
    assert session.stats.as_dict()["decode_tokens_per_second"] > 0


@pytest.mark.parametrize("taken", [1, 5, 12])
@pytest.mark.parametrize("close", [True, False])
def test_the_next_turn_follows_what_generate_yielded(endless, draw_tokens, taken, close):
    session = endless.session()
    tokens = session.generate(draw_tokens(30), max_new_tokens=12)
    seen = [next(tokens) for _ in range(taken)]
    if close:
        tokens.close()
    question = draw_tokens(8, seed=2)
    logits = session.prefill(question)
    expected = endless.session().prefill([*draw_tokens(30), *seen, *question])
    assert relative_difference(logits, expected) <= SAME_LOGITS
    assert session.logical_length == 30 + taken + 8


def test_a_generation_that_was_overtaken_says_so(endless, draw_tokens):
    session = endless.session()
    tokens = session.generate(draw_tokens(10))
    next(tokens)
    session.prefill([5])
    with pytest.raises(ConfigError, match="used otherwise"):
        next(tokens)
    assert session.finish_reason is None


def test_generation_ends_at_the_context(endless, draw_tokens):
    session = endless.session(max_context=20)
    tokens = list(session.generate(draw_tokens(16), max_new_tokens=100))
    assert len(tokens) == 5  # four are fed; the fifth follows the full context
    assert session.finish_reason == "context"
    assert session.logical_length == 20


def test_generation_ends_at_end_of_sequence_which_is_not_yielded(endless, draw_tokens):
    tokens = greedy(endless.session(), draw_tokens(30), 12)
    last = tokens[6]
    object.__setattr__(endless.manifest, "eos_token_ids", (last,))
    session = endless.session()
    assert list(session.generate(draw_tokens(30), max_new_tokens=12)) == tokens[: tokens.index(last)]
    assert session.finish_reason == "eos"
    assert session.logical_length == 30 + tokens.index(last)


def test_generation_reads_the_prompt_at_once_and_reports_it(endless, draw_tokens):
    session = endless.session()
    read = []
    session.generate(draw_tokens(40), progress=read.append)
    assert read == [16, 16, 8]
    assert session.logical_length == 40


@pytest.mark.parametrize("progress", [5, "print", [], 0])
def test_progress_that_is_no_function_is_refused_before_anything_is_read(endless, draw_tokens, progress):
    session = endless.session()
    for read in (session.prefill, session.generate):
        with pytest.raises(ConfigError, match="progress is"):
            read(draw_tokens(40), progress=progress)
    assert session.logical_length == 0


def test_equal_seeds_give_equal_tokens(endless, draw_tokens):
    def sample(seed: int) -> list[int]:
        options = Sampling(temperature=1.5, top_k=30, seed=seed)
        return list(endless.session().generate(draw_tokens(20), 20, options))

    assert sample(1) == sample(1) != sample(2)


@pytest.mark.parametrize("count", [0, -3, 2.5, None])
def test_a_count_of_tokens_that_is_none_is_refused_before_anything_is_read(full_model, draw_tokens, count):
    session = full_model.session()
    with pytest.raises(ConfigError, match="max_new_tokens"):
        session.generate(draw_tokens(5), max_new_tokens=count)
    assert session.logical_length == 0


def test_options_of_another_kind_are_refused_before_anything_is_read(full_model, draw_tokens):
    session = full_model.session()
    with pytest.raises(ConfigError, match=r"ortolan\.Sampling"):
        session.generate(draw_tokens(5), sampling=0.7)
    with pytest.raises(ConfigError, match=r"ortolan\.Eviction"):
        full_model.session(snapkv={"budget": 100})
    assert session.logical_length == 0


def test_numbers_of_numpy_are_numbers(endless, draw_tokens):
    sampling = Sampling(temperature=np.float32(0.5), top_k=np.int32(7), seed=np.int64(3))
    assert sampling == Sampling(temperature=0.5, top_k=7, seed=3)
    session = endless.session(np.int64(60), np.int32(16), SnapKv(budget=np.int64(30), window=np.uint8(8)))
    assert len(list(session.generate(draw_tokens(40), np.int64(4), sampling))) == 4
    session.rewind(np.int64(session.logical_length))
    assert type(session.logical_length) is int
    assert session.physical_length(np.int32(0)) == session.physical_length(0)


@pytest.mark.parametrize("kind", ["error", "nan"])
def test_a_failed_chunk_leaves_what_was_read_before_it(model, draw_tokens, kind):
    """Three chunks; the second fails after it wrote to the caches. The session goes on from the first."""
    session, prompt = model.session(), draw_tokens(40)
    if kind == "error":
        with failing_step(session, 2, OrtolanError("the decoder graph failed")), pytest.raises(OrtolanError):
            session.prefill(prompt)
    else:
        with numberless_step(session, 2), pytest.raises(NumericError):
            session.prefill(prompt)
    assert session.logical_length == 16
    logits = session.prefill(prompt[16:])
    assert relative_difference(logits, model.session().prefill(prompt)) <= SAME_LOGITS


def test_a_failed_step_of_generate_keeps_the_token(endless, draw_tokens):
    session = endless.session()
    tokens = session.generate(draw_tokens(10))
    token = next(tokens)
    with numberless_step(session, 1, np.inf), pytest.raises(NumericError, match="position 10"):
        next(tokens)
    expected = endless.session().prefill([*draw_tokens(10), token, 8])
    assert relative_difference(session.step(8), expected) <= SAME_LOGITS

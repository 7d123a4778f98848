"""The decode loop of device sessions on a device of NumPy arrays, against host sessions."""

import dataclasses

import numpy as np
import pytest
from fake_cuda import make_session
from parity import relative_difference
from tolerances import SAME_LOGITS

from ortolan import Eviction, Sampling, SnapKv
from ortolan.errors import CapacityError, ConfigError, NumericError, OrtolanError
from ortolan.policies import POLICIES
from ortolan.runtime.caches.plan import STEPS_AHEAD
from ortolan.runtime.device_loop import mark_seen, pack_rules

SNAPKV = SnapKv(budget=40, window=8, sink=2)


@pytest.fixture(params=["full", "mixed"])
def model(request):
    return request.getfixturevalue(f"{request.param}_model")


@pytest.fixture
def open_session(monkeypatch):
    def make(model, **options):
        return make_session(model, monkeypatch, **options)

    return make


def test_prefill_and_steps_agree_with_the_host(model, open_session, draw_tokens):
    session, host = open_session(model), model.session()
    assert relative_difference(session.prefill(draw_tokens(50)), host.prefill(draw_tokens(50))) <= SAME_LOGITS
    for token in draw_tokens(70, seed=1):
        assert relative_difference(session.step(token), host.step(token)) <= SAME_LOGITS
    assert session.logical_length == 120
    assert session.physical_length(1) == host.physical_length(1)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 30])
def test_generate_agrees_with_the_host(endless, open_session, draw_tokens, count):
    session, host = open_session(endless), endless.session()
    expected = list(host.generate(draw_tokens(30), count))
    assert list(session.generate(draw_tokens(30), count)) == expected
    assert session.finish_reason == "length"
    assert session.logical_length == host.logical_length
    assert session._history == host._history
    assert (session.stats.prefill_tokens, session.stats.decode_tokens) == (30, count - 1)


@pytest.mark.parametrize("taken", [1, 2, 5, 12])
@pytest.mark.parametrize("close", [True, False])
def test_the_next_turn_follows_what_generate_yielded(endless, open_session, draw_tokens, taken, close):
    """Steps that were under way past the last token taken are forgotten, also where a ring wrapped."""
    session = open_session(endless)
    tokens = session.generate(draw_tokens(130), max_new_tokens=12)
    seen = [next(tokens) for _ in range(taken)]
    if close:
        tokens.close()
    question = draw_tokens(8, seed=2)
    logits = session.prefill(question)
    expected = endless.session().prefill([*draw_tokens(130), *seen, *question])
    assert relative_difference(logits, expected) <= SAME_LOGITS
    assert session.logical_length == 130 + taken + 8
    assert session._lengths.highest >= session.logical_length


def test_steps_under_way_count_as_written(endless, open_session, draw_tokens):
    session = open_session(endless)
    tokens = session.generate(draw_tokens(30), max_new_tokens=20)
    for _ in range(5):
        next(tokens)
    assert session.logical_length == 34
    session.rewind(34)
    assert session._lengths.highest == 34 + STEPS_AHEAD


def test_a_generation_that_was_overtaken_says_so(endless, open_session, draw_tokens):
    session = open_session(endless)
    tokens = session.generate(draw_tokens(10))
    next(tokens)
    session.prefill([5])
    with pytest.raises(ConfigError, match="used otherwise"):
        next(tokens)
    assert session.finish_reason is None


def test_a_refused_call_does_not_disturb_a_generation(endless, open_session, draw_tokens):
    session, host = open_session(endless), endless.session()
    tokens = session.generate(draw_tokens(10), 6)
    seen = [next(tokens)]
    with pytest.raises(ConfigError, match="token"):
        session.prefill([-1])
    with pytest.raises(ConfigError, match="rewind"):
        session.rewind(99)
    assert seen + list(tokens) == list(host.generate(draw_tokens(10), 6))


def test_generation_ends_at_the_context(endless, open_session, draw_tokens):
    session = open_session(endless, max_context=20)
    assert len(list(session.generate(draw_tokens(16), max_new_tokens=100))) == 5
    assert session.finish_reason == "context"
    assert session.logical_length == 20


@pytest.mark.parametrize("end", [0, 1, 2, 6])
def test_generation_ends_at_end_of_sequence(endless, open_session, draw_tokens, end):
    tokens = list(endless.session().generate(draw_tokens(30), 12))
    object.__setattr__(endless.manifest, "eos_token_ids", (tokens[end],))
    session, host = open_session(endless), endless.session()
    expected = list(host.generate(draw_tokens(30), max_new_tokens=12))
    assert list(session.generate(draw_tokens(30), max_new_tokens=12)) == expected
    assert (session.finish_reason, session.logical_length) == ("eos", host.logical_length)
    logits, wanted = session.prefill(draw_tokens(9)), host.prefill(draw_tokens(9))
    assert relative_difference(logits, wanted) <= SAME_LOGITS


def test_decode_after_an_eviction_grows_the_caches(endless_full, open_session, draw_tokens):
    session, host = open_session(endless_full, snapkv=SNAPKV), endless_full.session(snapkv=SNAPKV)
    session.plan = dataclasses.replace(session.plan, growth_room=20)
    expected = list(host.generate(draw_tokens(100), 150))
    assert list(session.generate(draw_tokens(100), 150)) == expected
    np.testing.assert_array_equal(session.kept_positions(2), host.kept_positions(2))
    assert session.stats.evictions == 1
    assert session.stats.graph_captures == 2  # after the eviction, and after the growth
    assert [session.cache_capacity(0), session.physical_length(0)] == [256, 40 + 149]
    assert session._device.trims == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_under_each_policy_agree_with_the_host(endless, open_session, draw_tokens, policy):
    """Heads and layers that keep different numbers of positions advance together on the device."""
    options = Eviction(policy=policy, budget=40, window=8, sink=2)
    session, host = open_session(endless, snapkv=options), endless.session(snapkv=options)
    session.plan = dataclasses.replace(session.plan, growth_room=10)
    for turn, count in enumerate((100, 15, 1)):
        expected = list(host.generate(draw_tokens(count, seed=turn), 40))
        assert list(session.generate(draw_tokens(count, seed=turn), 40)) == expected
        for layer, held in host._lengths.physical.items():
            np.testing.assert_array_equal(session._lengths.physical[layer], held)
            np.testing.assert_array_equal(session.kept_positions(layer), host.kept_positions(layer))


@pytest.mark.parametrize("decoded", [3, 20])
def test_a_question_after_a_generation_evicts_as_on_the_host(endless_full, open_session, draw_tokens, decoded):
    """Steps under way took rows of captured queries; those are read again."""
    session, host = open_session(endless_full, snapkv=SNAPKV), endless_full.session(snapkv=SNAPKV)
    for each in (session, host):
        tokens = each.generate(draw_tokens(100), 60)
        for _ in range(decoded):
            next(tokens)
    logits, expected = session.prefill(draw_tokens(3, seed=2)), host.prefill(draw_tokens(3, seed=2))
    assert relative_difference(logits, expected) <= SAME_LOGITS
    for layer in range(4):
        np.testing.assert_array_equal(session.kept_positions(layer), host.kept_positions(layer))


def test_sampling_is_fixed_by_the_seed_whatever_cuts_the_chain(endless_full, open_session, draw_tokens):
    options = Sampling(temperature=1.5, top_k=30, repetition_penalty=1.2, seed=4)
    whole = list(open_session(endless_full, snapkv=SNAPKV).generate(draw_tokens(100), 100, options))
    session = open_session(endless_full, snapkv=SNAPKV)
    session.plan = dataclasses.replace(session.plan, growth_room=1)
    assert list(session.generate(draw_tokens(100), 100, options)) == whole


@pytest.mark.parametrize("kind", ["error", "nan"])
@pytest.mark.parametrize("failing", [0, 1, 5])
def test_a_failed_chunk_leaves_what_was_read_before_it(model, open_session, draw_tokens, monkeypatch, kind, failing):
    session = open_session(model)
    enqueue = session._stepper.enqueue_chunk

    def fail(prompt, chunk):
        enqueue(prompt, chunk)
        if chunk == failing and kind == "error":
            raise OrtolanError("the decoder graph failed")
        if chunk == failing:
            session._stepper.logits[:] = np.nan

    prompt = draw_tokens(110)
    read = []
    with monkeypatch.context() as patch:
        patch.setattr(session._stepper, "enqueue_chunk", fail)
        with pytest.raises(NumericError if kind == "nan" else OrtolanError):
            session.prefill(prompt, read.append)
    assert session.logical_length == sum(read) == 16 * failing
    logits = session.prefill(prompt[16 * failing :])
    assert relative_difference(logits, model.session().prefill(prompt)) <= SAME_LOGITS


@pytest.mark.parametrize("good", [1, 4])
def test_a_failed_step_of_generate_keeps_the_token(endless, open_session, draw_tokens, monkeypatch, good):
    session = open_session(endless)
    enqueue, steps = session._stepper.enqueue_step, []

    def fail():
        enqueue()
        steps.append(1)
        if len(steps) > good:
            session._stepper.logits[:] = np.inf

    with monkeypatch.context() as patch:
        patch.setattr(session._stepper, "enqueue_step", fail)
        with pytest.raises(NumericError):
            list(session.generate(draw_tokens(10)))
    assert session._pending
    expected = endless.session().prefill([*session._history, *session._pending, 8])
    assert session.logical_length == len(session._history)
    assert relative_difference(session.step(8), expected) <= SAME_LOGITS


def test_a_sequence_that_grows_past_a_rope_limit_is_read_again(open_session, tmp_path, draw_tokens):
    from families import FAMILIES, tiny_checkpoint

    import ortolan

    rope = FAMILIES["phi3"]["rope_parameters"] | {"original_max_position_embeddings": 64}
    checkpoint = tiny_checkpoint(
        "phi3", tmp_path / "hf", sliding_window=None, rope_parameters=rope, original_max_position_embeddings=64
    )
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=256, chunk_size=16)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    object.__setattr__(model.manifest, "eos_token_ids", ())
    session, host = open_session(model), model.session()
    assert list(session.generate(draw_tokens(50), 30)) == list(host.generate(draw_tokens(50), 30))
    assert session._history == host._history


def test_a_context_that_fits_no_memory_is_refused(full_model, open_session, monkeypatch):
    monkeypatch.setattr("fake_cuda.TOTAL_BYTES", 1000)
    with pytest.raises(CapacityError, match="no memory"):
        open_session(full_model)


def test_the_report_adds_up(full_model, open_session, draw_tokens):
    session = open_session(full_model)
    report = session.memory_report()
    assert report.cache_bytes == report.planned_cache_bytes == session.plan.bytes
    assert report.step_bytes >= 131 * 4
    assert report.device == "cuda:0"
    assert report.used_bytes == sum(
        (report.weights_bytes, report.cache_bytes, report.capture_bytes, report.step_bytes)
    ) + (report.other_session_bytes + report.arena_bytes)
    assert set(report.as_dict()) >= {"weights_bytes", "arena_bytes", "used_bytes"}


def test_rules_are_laid_out_for_the_kernel():
    options = [Sampling(), Sampling(temperature=0.5, top_k=2**40, top_p=0.9, min_p=0.1, seed=2**70 + 3)]
    rules = pack_rules(options)
    assert rules.dtype.itemsize == 32
    assert np.isinf(rules["inverse_temperature"][0])
    assert rules["inverse_temperature"][1] == 2
    assert rules["top_k"].tolist() == [0, 2**31 - 1]
    assert rules["seed"][1] == 3
    assert rules["tail_mass"][1] == pytest.approx(0.1)


def test_seen_tokens_are_marked():
    np.testing.assert_array_equal(mark_seen([[1, 1, 3], []], 5), [[0, 1, 0, 1, 0], [0] * 5])


@pytest.mark.parametrize("confirmed", [1, 3, 7])
def test_chunks_under_way_at_a_cancellation_count_as_written(model, open_session, draw_tokens, confirmed):
    session, counts = open_session(model), []

    def cancel(count: int) -> None:
        counts.append(count)
        if len(counts) == confirmed:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill(draw_tokens(8 * 16), progress=cancel)
    assert session.logical_length == sum(counts)
    assert session._lengths.highest > session.logical_length
    try:
        logits = session.prefill(draw_tokens(9, seed=1))
    except CapacityError:  # they took the ring's window
        assert model.manifest.layers[0].window > 0
        session.rewind(0)
        logits = session.prefill([*draw_tokens(8 * 16)[: sum(counts)], *draw_tokens(9, seed=1)])
    expected = model.session().prefill([*draw_tokens(8 * 16)[: sum(counts)], *draw_tokens(9, seed=1)])
    assert relative_difference(logits, expected) <= SAME_LOGITS

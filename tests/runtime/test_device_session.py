"""Sessions on a device of NumPy arrays, whose steps are under way ahead of what is taken, against host sessions."""

import contextlib

import numpy as np
import pytest
from fake_cuda import FakeSampler, make_session, on_fake_cuda
from parity import relative_difference
from sessions import failing_step, open_with_room
from tolerances import SAME_LOGITS

from ortolan import Eviction, Sampling, SnapKv
from ortolan.errors import CapacityError, ConfigError, NumericError, OrtolanError
from ortolan.policies import POLICIES
from ortolan.runtime.caches.plan import STEPS_AHEAD
from ortolan.runtime.steps import bucket

SNAPKV = SnapKv(budget=40, window=8, sink=2)


@pytest.fixture(params=["full", "mixed", "sharing"])
def model(request):
    return request.getfixturevalue(f"{request.param}_model")


@pytest.fixture
def open_session(monkeypatch):
    def make(model, **options):
        return make_session(model, monkeypatch, **options)

    return make


@contextlib.contextmanager
def spoilt_logits(number, value=np.nan):
    """Let the logits of step `number`, counted from 1, and of all later ones be no numbers; for a new session."""
    count, is_over = 0, False

    def make_sampler(device, logits, state):
        sampler = FakeSampler(device, logits, state)
        choose = sampler.choose

        def spoil_and_choose(*arguments):
            nonlocal count
            count += 1
            if count >= number and not is_over:
                logits[:] = value
            choose(*arguments)

        sampler.choose = spoil_and_choose
        return sampler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "DeviceSampler", make_sampler)
        yield
    is_over = True


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
    assert session.state.tokens == host.state.tokens
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
    assert session.state.lengths.highest >= session.logical_length


def test_steps_under_way_count_as_written(endless, open_session, draw_tokens):
    session = open_session(endless)
    tokens = session.generate(draw_tokens(30), max_new_tokens=20)
    for _ in range(5):
        next(tokens)
    assert session.logical_length == 34
    session.rewind(34)
    assert session.state.lengths.highest == 34 + STEPS_AHEAD


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


def test_decode_after_an_eviction_grows_the_caches(endless_full, monkeypatch, draw_tokens):
    model = on_fake_cuda(endless_full, monkeypatch)
    session, host = open_with_room(model, 20, snapkv=SNAPKV), endless_full.session(snapkv=SNAPKV)
    trims = model.device.cuda.trims
    expected = list(host.generate(draw_tokens(100), 150))
    assert list(session.generate(draw_tokens(100), 150)) == expected
    np.testing.assert_array_equal(session.kept_positions(2), host.kept_positions(2))
    assert session.stats.evictions == 1
    assert session.stats.graph_captures == 2  # after the eviction, and after the growth
    assert [session.cache_capacity(0), session.physical_length(0)] == [256, 40 + 149]
    assert model.device.cuda.trims == trims + 1


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_under_each_policy_agree_with_the_host(endless, monkeypatch, draw_tokens, policy):
    """Heads and layers that keep different numbers of positions advance together on the device."""
    options = Eviction(policy=policy, budget=40, window=8, sink=2)
    session = open_with_room(on_fake_cuda(endless, monkeypatch), 10, snapkv=options)
    host = endless.session(snapkv=options)
    for turn, count in enumerate((100, 15, 1)):
        expected = list(host.generate(draw_tokens(count, seed=turn), 40))
        assert list(session.generate(draw_tokens(count, seed=turn), 40)) == expected
        assert session.feeder.held() == host.feeder.held()
        for layer in range(4):
            np.testing.assert_array_equal(*(each.state.lengths.counts.get(layer, ()) for each in (session, host)))
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


def test_sampling_is_fixed_by_the_seed_whatever_cuts_the_chain(endless_full, monkeypatch, draw_tokens):
    options = Sampling(temperature=1.5, top_k=30, repetition_penalty=1.2, seed=4)
    whole = list(endless_full.session(snapkv=SNAPKV).generate(draw_tokens(100), 100, options))
    model = on_fake_cuda(endless_full, monkeypatch)
    for room in (1, 1000):
        session = open_with_room(model, room, snapkv=SNAPKV)
        assert list(session.generate(draw_tokens(100), 100, options)) == whole


@pytest.mark.parametrize("kind", ["error", "nan"])
@pytest.mark.parametrize("failing", [0, 1, 5])
def test_a_failed_chunk_leaves_what_was_read_before_it(model, open_session, draw_tokens, kind, failing):
    session, prompt, read = open_session(model), draw_tokens(110), []
    if kind == "error":
        with failing_step(session, failing + 1, OrtolanError("the decoder graph failed")), pytest.raises(OrtolanError):
            session.prefill(prompt, read.append)
    else:
        with spoilt_logits(failing + 1), pytest.raises(NumericError):
            session.prefill(prompt, read.append)
    assert session.logical_length == sum(read) == 16 * failing
    logits = session.prefill(prompt[16 * failing :])
    assert relative_difference(logits, model.session().prefill(prompt)) <= SAME_LOGITS


@pytest.mark.parametrize("good", [1, 4])
def test_a_failed_step_of_generate_keeps_the_token(endless, open_session, draw_tokens, good):
    session = open_session(endless)
    with spoilt_logits(good + 2, np.inf), pytest.raises(NumericError):
        list(session.generate(draw_tokens(10)))
    assert len(session.state.pending) == 1
    assert session.logical_length == len(session.state.history) == 10 + good
    expected = endless.session().prefill([*session.state.tokens, 8])
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
    assert session.state.tokens == host.state.tokens


def test_a_context_that_fits_no_memory_is_refused(full_model, open_session, monkeypatch):
    monkeypatch.setattr("fake_cuda.TOTAL_BYTES", 1000)
    with pytest.raises(CapacityError, match="too few; lower max_context"):
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
    assert session.state.lengths.highest > session.logical_length
    try:
        logits = session.prefill(draw_tokens(9, seed=1))
    except CapacityError:  # they took the ring's window
        assert model.manifest.layers[0].window > 0
        session.rewind(0)
        logits = session.prefill([*draw_tokens(8 * 16)[: sum(counts)], *draw_tokens(9, seed=1)])
    expected = model.session().prefill([*draw_tokens(8 * 16)[: sum(counts)], *draw_tokens(9, seed=1)])
    assert relative_difference(logits, expected) <= SAME_LOGITS

"""Reading that is cut short leaves the first `logical_length` tokens of the sequence, and nothing that waits behind."""

import numpy as np
import pytest
from fake_cuda import make_session
from families import tiny_checkpoint
from parity import relative_difference
from sessions import failing_step
from tolerances import SAME_LOGITS

import ortolan
from ortolan import SnapKv
from ortolan.errors import CapacityError, ConfigError, OrtolanError

LIMIT = 64
CHUNK = 16
SNAPKV = SnapKv(budget=64, window=32, sink=2)
ERRORS = [KeyboardInterrupt, OrtolanError]


@pytest.fixture(scope="module")
def dynamic_model(tmp_path_factory):
    """A model that rotates all keys anew past 64 tokens, without end-of-sequence tokens."""
    root = tmp_path_factory.mktemp("dynamic")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    checkpoint = tiny_checkpoint("llama", root / "hf", seed=5, rope_parameters=rope, max_position_embeddings=LIMIT)
    folder = ortolan.export(checkpoint, root / "model", max_context=128, chunk_size=CHUNK)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    assert model.manifest.rope_limits == (LIMIT, 128)
    object.__setattr__(model.manifest, "eos_token_ids", ())
    return model


@pytest.fixture(params=["host", "device"])
def open_session(request, monkeypatch):
    """Open sessions on the host, or on a device of NumPy arrays."""
    if request.param == "host":
        return lambda model, snapkv=None: model.session(chunk_size=CHUNK, snapkv=snapkv)
    return lambda model, snapkv=None: make_session(model, monkeypatch, chunk_size=CHUNK, snapkv=snapkv)


def assert_goes_on(session, everything, fresh):
    """Assert that what follows `logical_length` completes a sequence, as if it had been read at once."""
    read = session.logical_length
    assert session.state.tokens == everything[:read]
    logits = session.prefill(everything[read:])
    assert session.state.history == everything
    assert relative_difference(logits, fresh.prefill(everything)) <= SAME_LOGITS


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_generation_that_is_cut_short_at_a_rope_limit_is_not_resumed(
    dynamic_model, open_session, draw_tokens, number, error
):
    """Past the limit the whole sequence is read again: a part of it would be continued as if it were the whole."""
    session, prompt = open_session(dynamic_model), draw_tokens(60)
    stream = session.generate(prompt, 20)
    yielded = [next(stream) for _ in range(5)]
    assert (session.logical_length, session.state.pending) == (LIMIT, yielded[-1:])
    with failing_step(session, number, error), pytest.raises(error):
        next(stream)
    assert session.logical_length <= (number - 1) * CHUNK
    with pytest.raises(ConfigError, match="no generation can be resumed"):
        session.resume()
    assert_goes_on(session, [*prompt, *yielded], dynamic_model.session())


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_turn_that_is_cut_short_at_a_rope_limit_goes_on(dynamic_model, open_session, draw_tokens, number, error):
    session, prompt, turn = open_session(dynamic_model), draw_tokens(60), draw_tokens(20, seed=1)
    yielded = list(session.generate(prompt, 2))
    with failing_step(session, number, error), pytest.raises(error):
        session.prefill(turn)
    assert_goes_on(session, [*prompt, *yielded, *turn], dynamic_model.session())


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_queries_that_are_captured_again_can_be_cut_short(full_model, open_session, draw_tokens, number, error):
    """A rewind made captured queries stale; the turn that will evict first reads the tokens behind them again."""
    session, prompt, turn = open_session(full_model, SNAPKV), draw_tokens(60), draw_tokens(22, seed=9)
    session.prefill(prompt)
    for _ in range(40):
        session.step(9)
    session.rewind(40)
    yielded = list(session.generate([7, 8], 1))
    everything = [*prompt[:40], 7, 8, *yielded, *turn]
    with failing_step(session, number, error), pytest.raises(error):
        session.prefill(turn)
    assert session.logical_length < 43 or number == 3
    fresh = full_model.session(snapkv=SNAPKV)
    assert_goes_on(session, everything, fresh)
    assert session.stats.evictions == fresh.stats.evictions == 1
    for layer in range(4):
        np.testing.assert_array_equal(session.kept_positions(layer), fresh.kept_positions(layer))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("feed", ["prefill", "step", "generate"])
def test_a_token_that_waits_is_the_callers_again_where_its_turn_is_cut_short(
    endless_full, open_session, draw_tokens, feed, error
):
    session, prompt = open_session(endless_full), draw_tokens(20)
    yielded, turn = list(session.generate(prompt, 3)), draw_tokens(1 if feed == "step" else 30, seed=1)
    with failing_step(session, 1, error), pytest.raises(error):
        session.step(turn[0]) if feed == "step" else getattr(session, feed)(turn)
    assert session.logical_length == 22
    assert_goes_on(session, [*prompt, *yielded, *turn], endless_full.session())


def test_a_token_that_waits_still_does_where_a_turn_is_refused(dynamic_model, open_session, draw_tokens):
    snapkv = SnapKv(budget=32, window=8, sink=2)
    session = open_session(dynamic_model, snapkv)
    yielded = list(session.generate(draw_tokens(60), 2))
    for refused, kind in (([131], ConfigError), ([5] * 80, CapacityError), ([5] * 4, CapacityError)):
        with pytest.raises(kind):
            session.prefill(refused)
        assert session.state.pending == yielded[-1:]
    session.step(5)
    assert session.state.history[60:] == [*yielded, 5]


def test_a_step_that_fails_leaves_its_generation_to_be_resumed(endless_full, open_session, draw_tokens):
    """Nothing was taken back, so the token that waits is fed again."""
    expected = list(open_session(endless_full).generate(draw_tokens(20), 8))
    session = open_session(endless_full)
    stream = session.generate(draw_tokens(20), 8)
    first = [next(stream) for _ in range(3)]
    with failing_step(session, 1, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        next(stream)
    assert first + list(session.resume()) == expected


@pytest.mark.parametrize("counted", [False, True])
def test_an_interrupt_while_a_step_is_counted_skips_no_token(
    endless_full, open_session, draw_tokens, monkeypatch, counted
):
    """Before, the step is taken again; after, the token that it chose is lost, and that is said."""
    expected = list(open_session(endless_full).generate(draw_tokens(20), 8))
    session = open_session(endless_full)
    stream = session.generate(draw_tokens(20), 8)
    taken = [next(stream) for _ in range(3)]
    count = session.feeder.count

    def interrupt(tokens):
        if counted:
            count(tokens)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session.feeder, "count", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    if not counted:
        assert taken + list(stream) == expected
        return
    with pytest.raises(ConfigError, match="token that it chose is lost"):
        next(stream)
    assert session.state.tokens == session.state.history == [*draw_tokens(20), *taken]
    fresh = endless_full.session().prefill([*draw_tokens(20), *taken, 5])
    assert relative_difference(session.step(5), fresh) <= SAME_LOGITS


def test_a_token_that_is_lost_on_its_way_is_not_skipped(endless_full, open_session, draw_tokens, monkeypatch, tmp_path):
    """It was chosen, the one before it counts as read, and the logits are gone."""
    session = open_session(endless_full)
    stream = session.generate(draw_tokens(20), 8)
    yielded = [next(stream) for _ in range(3)]

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session.generation.turn, "accept", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    with pytest.raises(ConfigError, match="token that it chose is lost"):
        next(stream)
    session.save(tmp_path / "session")
    for each in (session, endless_full.restore(tmp_path / "session")):
        with pytest.raises(ConfigError, match="no generation can be resumed"):
            each.resume()
        assert each.state.tokens == each.state.history == [*draw_tokens(20), *yielded]
    expected = endless_full.session().prefill([*draw_tokens(20), *yielded, 5])
    assert relative_difference(session.step(5), expected) <= SAME_LOGITS

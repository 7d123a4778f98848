"""A fork goes on as its session would have, and neither sees what the other reads."""

import numpy as np
import pytest
from fake_cuda import on_fake_cuda
from parity import relative_difference
from sessions import DEVICES, open_with_room
from tolerances import SAME_LOGITS

from ortolan import Sampling, SnapKv
from ortolan.errors import CapacityError, ConfigError

SNAPKV = SnapKv(budget=40, window=8, sink=2)
MODELS = ["full_model", "mixed_model", "paged_model", "paged_mixed_model", "sharing_model", "paged_sharing_model"]


@pytest.fixture(params=MODELS)
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=DEVICES)
def placed(request, endless, monkeypatch):
    """The model, on the host or on a device of NumPy arrays."""
    return on_fake_cuda(endless, monkeypatch) if request.param == "device" else endless


def assert_apart(one, other, fresh, prefixes):
    """Assert that two sessions go on from what each has read, turn by turn, as if there were no other."""
    for turn, (a, b) in enumerate(zip(*prefixes, strict=True)):
        for session, tokens in ((one, a), (other, b)):
            everything = [*session.state.tokens, *tokens]
            assert relative_difference(session.prefill(tokens), fresh().prefill(everything)) <= SAME_LOGITS, turn
            assert session.state.history == everything


@pytest.mark.parametrize("length", [1, 20, 140])
def test_two_sequences_go_on_from_one(endless, placed, draw_tokens, length):
    """Also where rings have wrapped, and wrap again in each."""
    session = placed.session()
    session.prefill(draw_tokens(length))
    fork = session.fork()
    assert fork.state.history == draw_tokens(length)
    for layer in range(4):
        assert fork.physical_length(layer) == session.physical_length(layer)
    turns = [[draw_tokens(count, seed=seed) for count in (1, 30, 75, 1)] for seed in (1, 2)]
    assert_apart(session, fork, endless.session, turns)


@pytest.mark.parametrize("taken", [0, 1, 5, 20])
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.2, repetition_penalty=1.2, seed=6)])
def test_a_generation_goes_on_in_both(endless, placed, draw_tokens, taken, sampling):
    prompt, stop = draw_tokens(60), [[130, 5]]
    expected = list(endless.session().generate(prompt, 20, sampling))
    session = placed.session()
    stream = session.generate(prompt, 20, sampling, stop=stop, logprobs=2)
    seen = [next(stream) for _ in range(taken)]
    fork = session.fork()
    assert fork.finish_reason is None
    forked = fork.resume()
    first = [next(forked) for _ in range(min(3, 20 - taken))]
    assert seen + list(stream) == expected
    assert seen + first + list(forked) == expected
    assert session.finish_reason == fork.finish_reason == "length"
    assert [each.token for each in forked.logprobs] == expected[taken:]
    assert session.state.tokens == fork.state.tokens
    assert list(fork.resume(5)) == list(session.resume(5))


def test_steps_ahead_of_a_fork_count_as_written(placed, draw_tokens):
    session = placed.session()
    stream = session.generate(draw_tokens(130), 20)
    for _ in range(5):
        next(stream)
    fork = session.fork()
    assert fork.state.lengths.highest == 134 + session.feeder.stepper.depth
    assert fork.logical_length == session.logical_length == 134
    question = draw_tokens(30, seed=4)
    logits = fork.prefill(question)
    np.testing.assert_array_equal(session.prefill(question), logits)


@pytest.mark.parametrize("decoded", [0, 3, 40])
def test_a_fork_after_an_eviction_has_its_own_history_of_it(endless, placed, draw_tokens, decoded):
    """Caches may have grown since, and captured queries count for the next eviction of each."""
    sessions = [open_with_room(each, 20, snapkv=SNAPKV) for each in (placed, endless, endless)]
    for each in sessions:
        each.prefill(draw_tokens(100))
        for token in draw_tokens(decoded, seed=1):
            each.step(token)
    session, *straight = sessions
    fork = session.fork()
    pairs = list(zip((session, fork), straight, ((30, 2), (25, 3)), strict=True))
    for _ in range(2):
        for each, other, (count, seed) in pairs:
            logits = each.prefill(draw_tokens(count, seed=seed))
            assert relative_difference(logits, other.prefill(draw_tokens(count, seed=seed))) <= SAME_LOGITS
            for layer in range(4):
                np.testing.assert_equal(each.kept_positions(layer), other.kept_positions(layer))
            assert each.feeder.held() == other.feeder.held()
            assert each.state.lengths.evicted_at == other.state.lengths.evicted_at
    with pytest.raises(CapacityError):
        fork.rewind(fork.state.lengths.evicted_at - 1)
    fork.rewind(0)
    assert session.kept_positions(1) is not None
    assert relative_difference(session.step(9), straight[0].step(9)) <= SAME_LOGITS


def test_a_rewind_in_one_leaves_the_other(endless, placed, draw_tokens):
    session = placed.session()
    session.prefill(draw_tokens(60))
    fork = session.fork()
    fork.rewind(50)
    turns = [[draw_tokens(20, seed=1)], [draw_tokens(20, seed=2)]]
    assert_apart(session, fork, endless.session, turns)


def test_a_fork_is_saved_and_forked_again(endless, placed, draw_tokens, tmp_path):
    session = placed.session()
    next(session.generate(draw_tokens(60), 10))
    fork = session.fork().fork()
    fork.save(tmp_path / "session")
    expected = list(session.resume())
    assert list(fork.resume()) == list(placed.restore(tmp_path / "session").resume()) == expected


def test_a_session_that_reads_is_not_forked(placed, draw_tokens):
    session, problems = placed.session(), []

    def fork(count):
        with pytest.raises(ConfigError, match="the session is in use") as raised:
            session.fork()
        problems.append(raised)

    session.prefill(draw_tokens(40), progress=fork)
    assert len(problems) == 3
    session.fork()

"""Generations that are left, saved, interrupted, and resumed."""

import itertools

import numpy as np
import pytest
from saved_sessions import DEVICES, assert_same, place, with_end_tokens

from ortolan import Sampling, SnapKv
from ortolan.errors import ConfigError

SNAPKV = SnapKv(budget=40, window=8, sink=2)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["full", "mixed"])
def model(request, monkeypatch, device):
    """A model without end-of-sequence tokens, which random weights may choose at any time."""
    return place(with_end_tokens(request.getfixturevalue(f"{request.param}_model")), device, monkeypatch)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chat.session"


@pytest.mark.parametrize("snapkv", [None, SNAPKV])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, top_k=40, repetition_penalty=1.4)])
@pytest.mark.parametrize("taken", [0, 1, 2, 7, 12])
def test_a_generation_goes_on_where_it_was_left(model, path, draw_tokens, taken, sampling, snapkv):
    """A seed that was not given goes along; the session that was saved is not disturbed."""
    session = model.session(snapkv=snapkv)
    stream = session.generate(draw_tokens(90), 12, sampling)
    assert len(list(itertools.islice(stream, taken))) == taken
    session.save(path)
    expected = list(stream)
    assert len(expected) == 12 - taken
    restored = model.restore(path)
    assert list(restored.resume()) == expected
    assert restored.finish_reason == session.finish_reason == "length"
    assert_same(session, restored)
    np.testing.assert_array_equal(restored.prefill(draw_tokens(9)), session.prefill(draw_tokens(9)))


def test_a_generation_that_reached_its_length_can_be_made_longer(model, path, draw_tokens):
    sampling = Sampling(temperature=1.0, seed=3)
    expected = list(model.session().generate(draw_tokens(30), 20, sampling))
    session = model.session()
    first = list(session.generate(draw_tokens(30), 8, sampling))
    session.save(path)
    assert first + list(model.restore(path).resume(12)) == expected
    assert first + list(session.resume(12)) == expected
    assert list(session.resume()) == []
    assert session.finish_reason == "length"


def test_a_generation_that_is_resumed_is_over_for_its_old_iterator(model, draw_tokens):
    session = model.session()
    stream = session.generate(draw_tokens(20), 8)
    next(stream)
    other = session.resume()
    with pytest.raises(ConfigError, match="used otherwise"):
        next(stream)
    assert len(list(other)) == 7


@pytest.mark.parametrize("use", ["nothing", "prefill", "step", "rewind", "eos"])
def test_a_generation_that_is_over_is_not_resumed(model, path, draw_tokens, use):
    session = model.session()
    if use == "eos":
        model = with_end_tokens(model, [next(session.generate(draw_tokens(20)))])
        session = model.session()
        assert list(session.generate(draw_tokens(20))) == []
    elif use != "nothing":
        next(session.generate(draw_tokens(20)))
        {"prefill": lambda: session.prefill([5]), "step": lambda: session.step(5), "rewind": lambda: session.rewind(9)}[
            use
        ]()
    session.save(path)
    for each in (session, model.restore(path)):
        with pytest.raises(ConfigError, match="no generation can be resumed"):
            each.resume()
    with pytest.raises(ConfigError, match="max_new_tokens"):
        session.resume(0)


def test_a_generation_that_met_the_context_goes_on_in_a_longer_one(model, path, draw_tokens):
    expected = list(model.session().generate(draw_tokens(30), 40))
    session = model.session(max_context=50)
    first = list(session.generate(draw_tokens(30), 40))
    assert session.finish_reason == "context"
    session.save(path)
    assert list(model.restore(path).resume()) == []
    restored = model.restore(path, max_context=200)
    assert first + list(restored.resume()) == expected


def interrupt_after(call, number: int = 1):
    """Return a call that is interrupted once it is done for the given time."""
    counted = itertools.count(1)

    def interrupted(*arguments):
        result = call(*arguments)
        if next(counted) == number:
            raise KeyboardInterrupt
        return result

    return interrupted


def test_a_generation_that_was_interrupted_before_its_first_token(full_model, monkeypatch, path, draw_tokens):
    """The token is chosen with the prompt's last chunk, which was not waited for: nothing can be resumed."""
    model = place(full_model, "device", monkeypatch)
    session = model.session()
    device = session.feeder.caches.buffers
    with monkeypatch.context() as patch:
        patch.setattr(device, "wait", interrupt_after(device.wait))
        with pytest.raises(KeyboardInterrupt):
            session.generate(draw_tokens(20), 8)
    session.save(path)
    for each in (session, model.restore(path)):
        with pytest.raises(ConfigError, match="no generation"):
            each.resume()


@pytest.mark.parametrize("taken", [0, 1, 4])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("call", ["run", "wait"])
def test_a_generation_that_was_interrupted_between_tokens_goes_on(
    model, monkeypatch, device, path, draw_tokens, taken, number, call
):
    """Where a step was run, and where one is waited for; no token is lost, and none comes twice."""
    if call == "wait" and device == "host":
        pytest.skip("steps on the host are over when they return")
    sampling = Sampling(temperature=1.2, repetition_penalty=1.3, seed=5)
    expected = list(model.session().generate(draw_tokens(70), 12, sampling))
    session = model.session()
    stream = session.generate(draw_tokens(70), 12, sampling)
    found = list(itertools.islice(stream, taken))
    stepper, written = session.feeder.stepper, []
    run, target = stepper.run, stepper if call == "run" else session.feeder.caches.buffers

    def noting(rows):
        written.append(rows[0].logical + len(rows[0].tokens))
        return run(rows)

    with monkeypatch.context() as patch:
        patch.setattr(stepper, "run", noting)
        patch.setattr(target, call, interrupt_after(getattr(target, call), number))
        with pytest.raises(KeyboardInterrupt):
            found.extend(stream)
    session.save(path)
    assert found + list(model.restore(path).resume()) == expected
    if call == "run":
        assert session.state.lengths.highest == max(written)
    assert found + list(session.resume()) == expected

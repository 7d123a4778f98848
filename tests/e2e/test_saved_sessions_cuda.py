"""Saved sessions on a GPU go on bit for bit, and move to and from the host."""

import itertools
import random

import numpy as np
import pytest
from cuda_models import ELEMENTS, GRAPHS, draw_tokens, open_pair
from parity import relative_difference
from saved_sessions import assert_same, outcome, random_turn
from tolerances import LOGITS_RELATIVE

from ortolan import Eviction, Sampling, SnapKv
from ortolan.policies import POLICIES
from ortolan.runtime.caches import plan

pytestmark = pytest.mark.cuda

SNAPKV = SnapKv(budget=40, window=8, sink=2)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chat.session"


@pytest.fixture(autouse=True)
def _small_growth(monkeypatch):
    monkeypatch.setattr(plan, "CUDA_GROWTH_ROOM", 20)  # so that caches shrink and grow within a short context


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_random_turns_go_on_bit_for_bit(path, family, dtype, policy, graph):
    model, rng = open_pair(family, dtype, graph).device, random.Random(f"{family} {dtype} {policy}")
    session = model.session(snapkv=policy and Eviction(policy=policy, budget=40, window=8, sink=2))
    session.prefill(draw_tokens(120))
    for _ in range(3):
        outcome(random_turn(rng, rewinds=True), session)
    session.save(path, rewind_tokens=512)
    restored = model.restore(path)
    for _ in range(5):
        turn = random_turn(rng, rewinds=True)
        np.testing.assert_equal(outcome(turn, restored), outcome(turn, session))
        assert_same(session, restored)
        if session.logical_length > 350:
            break


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.2, top_p=0.9, repetition_penalty=1.3)])
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("taken", [0, 1, 2, 9])
def test_a_generation_goes_on_where_it_was_left(path, dtype, taken, sampling):
    """Steps under way at that time neither disturb the session nor come into the file."""
    model = open_pair("gemma3", dtype, "plain").device
    session = model.session(snapkv=SNAPKV)
    stream = session.generate(draw_tokens(150), 40, sampling)
    assert len(list(itertools.islice(stream, taken))) == taken
    session.save(path)
    expected = list(stream)
    assert len(expected) == 40 - taken
    restored, second = model.restore(path), model.restore(path)
    assert list(restored.resume()) == list(second.resume()) == expected
    np.testing.assert_array_equal(restored.prefill(draw_tokens(60)), session.prefill(draw_tokens(60)))
    assert_same(session, restored)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("source", ["host", "device"])
def test_a_session_moves_between_devices(path, family, source):
    pair = open_pair(family, "float32", "plain")
    origin, target = (pair.host, pair.device) if source == "host" else (pair.device, pair.host)
    session = origin.session(snapkv=SNAPKV)
    first = list(itertools.islice(session.generate(draw_tokens(150), 30), 5))
    session.save(path)
    expected = first + list(session.resume())
    restored = target.restore(path)
    assert first + list(restored.resume()) == expected
    rows = restored.prefill(draw_tokens(50, seed=1)), session.prefill(draw_tokens(50, seed=1))
    assert relative_difference(*rows) <= LOGITS_RELATIVE


def test_an_evicted_session_takes_as_little_memory_as_before(path):
    model = open_pair("llama", "bfloat16", "plain").device
    session = model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(400))
    session.save(path)
    restored = model.restore(path)
    assert restored.cache_bytes == session.cache_bytes < session.plan.bytes
    assert restored.memory_report().cache_bytes == session.memory_report().cache_bytes


def test_a_session_is_restored_on_another_thread(path):
    """The decode graph is captured anew there."""
    import threading

    model = open_pair("llama", "bfloat16", "plain").device
    session = model.session()
    first = list(itertools.islice(session.generate(draw_tokens(50), 20), 3))
    session.save(path)
    expected, found = list(session.resume()), []
    thread = threading.Thread(target=lambda: found.extend(model.restore(path).resume()))
    thread.start()
    thread.join()
    assert found == expected
    assert len(first + found) == 20

"""Options of SnapKV that go beyond a model's context: refused, or no more than they need."""

import dataclasses

import numpy as np
import pytest
from saved_sessions import DEVICES, assert_same, place

from ortolan import Engine, Eviction, SnapKv
from ortolan.errors import MAX_LENGTH, ConfigError

CONTEXT = 512  # of the models of conftest.py
WIDEST = 2 * CONTEXT + 1
SNAPKV = SnapKv(budget=40, window=8, sink=2)
EXPECTED = Eviction(policy="expected", budget=40, window=8, sink=2, queries=MAX_LENGTH)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.mark.parametrize("kernel", [WIDEST + 2, MAX_LENGTH])
@pytest.mark.parametrize("during_prefill", [False, True])
def test_a_pooling_wider_than_the_context_is_refused(full_model, monkeypatch, kernel, during_prefill):
    monkeypatch.setattr(full_model.evictions, "open", lambda _: pytest.fail("opened the eviction graph"))
    snapkv = dataclasses.replace(SNAPKV, kernel=kernel, during_prefill=during_prefill)
    for make in (full_model.plan, full_model.session):
        with pytest.raises(ConfigError, match=f"kernel is {kernel}; it must be at most {WIDEST}"):
            make(snapkv=snapkv)


def test_an_engine_refuses_such_a_pooling_when_it_is_asked(paged_model, draw_tokens):
    with Engine(paged_model, 2) as engine:
        with pytest.raises(ConfigError, match=f"at most {WIDEST}"):
            engine.submit(draw_tokens(90), snapkv=dataclasses.replace(SNAPKV, kernel=MAX_LENGTH))
        assert len(engine.submit(draw_tokens(90), 3, ignore_eos=True).result()) == 3


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_the_widest_pooling_scores_all_positions_alike(full_model, draw_tokens, pool):
    session = full_model.session(snapkv=dataclasses.replace(SNAPKV, kernel=WIDEST, pool=pool))
    session.prefill(draw_tokens(100))
    assert session.stats.evictions == 1
    if pool == "max":  # averages of so many differ by rounding
        lowest = [*range(SNAPKV.budget - SNAPKV.window), *range(100 - SNAPKV.window, 100)]
        np.testing.assert_array_equal(session.kept_positions(0)[0], lowest)


def test_no_more_queries_are_captured_than_the_context_has(full_model, monkeypatch, device, draw_tokens):
    model = place(full_model, device, monkeypatch)
    sessions = [model.session(300, snapkv=dataclasses.replace(EXPECTED, queries=q)) for q in (300, MAX_LENGTH)]
    reports = [session.memory_report() for session in sessions]
    assert reports[0].capture_bytes == reports[1].capture_bytes > 0
    logits = [session.prefill(draw_tokens(200)) for session in sessions]
    assert sessions[0].stats.evictions == 1
    np.testing.assert_array_equal(*logits)
    assert_same(*sessions)


def test_an_engine_captures_no_more_queries_than_its_context_has(paged_model, draw_tokens):
    with Engine(paged_model, 2, max_context=300) as engine:
        results = [
            engine.submit(
                draw_tokens(200), 20, ignore_eos=True, snapkv=dataclasses.replace(EXPECTED, queries=q)
            ).result()
            for q in (300, MAX_LENGTH)
        ]
        assert engine.stats().evictions == 2
    assert results[0] == results[1]


@pytest.mark.parametrize("context", [260, 512], ids=["shorter", "longer"])
def test_captured_queries_go_with_a_session_into_another_context(
    full_model, monkeypatch, device, draw_tokens, tmp_path, context
):
    """Rows are fewer or more there, and both hold all queries so far: those before the eviction score again."""
    model = place(full_model, device, monkeypatch)
    session = model.session(300, snapkv=EXPECTED)
    session.prefill(draw_tokens(100))
    session.save(tmp_path / "a")
    restored = model.restore(tmp_path / "a", max_context=context)
    for each in (session, restored):
        for token in draw_tokens(10, seed=1):
            each.step(token)
        each.rewind(100)
    again = [each.prefill(draw_tokens(50, seed=2)) for each in (session, restored)]
    np.testing.assert_array_equal(*again)
    assert (session.stats.evictions, restored.stats.evictions) == (2, 1)
    for layer in range(len(session.plan.layers)):
        np.testing.assert_array_equal(session.kept_positions(layer), restored.kept_positions(layer))

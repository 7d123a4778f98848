"""Saved sessions that are restored with other eviction options than their own."""

import dataclasses

import numpy as np
import pytest
from parity import relative_difference
from saved_sessions import DEVICES, place
from tolerances import SAME_LOGITS

from ortolan import Eviction, SnapKv
from ortolan.errors import CapacityError, ConfigError

SNAPKV = SnapKv(budget=40, window=8, sink=2)
TEXT, QUESTION, BUDGET = 200, 60, 230
EVERYTHING = 10**6  # rewind_tokens past any ring
SAVED = {
    "off": None,
    "few queries": SnapKv(budget=BUDGET, window=8, sink=2),
    "many queries": Eviction(policy="expected", budget=BUDGET, window=8, sink=2, queries=90),
}
RESTORED = {
    "snapkv": SnapKv(budget=BUDGET, window=32, sink=2),
    "max": SnapKv(budget=BUDGET, window=16, sink=2, pool="max"),
    "adakv": Eviction(policy="adakv", budget=BUDGET, window=16, sink=2),
    "expected": Eviction(policy="expected", budget=BUDGET, window=8, sink=2, queries=100),
    "streaming": Eviction(policy="streaming", budget=BUDGET, window=8, sink=2),
}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["full", "mixed"])
def model(request, monkeypatch, device):
    return place(request.getfixturevalue(f"{request.param}_model"), device, monkeypatch)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chat.session"


def evictable(model) -> list[int]:
    return [i for i, layer in enumerate(model.manifest.layers) if layer.evictable]


def expected(queries: int) -> Eviction:
    return Eviction(policy="expected", budget=40, window=8, sink=2, queries=queries)


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("name", RESTORED)
def test_it_evicts_as_if_it_had_always_had_them(model, path, draw_tokens, saved, name):
    """Before any eviction; queries that were not captured come from their tokens, which are read again."""
    session = model.session(snapkv=SAVED[saved])
    session.prefill(draw_tokens(TEXT))
    session.save(path, EVERYTHING)
    restored, straight = model.restore(path, eviction=RESTORED[name]), model.session(eviction=RESTORED[name])
    straight.prefill(draw_tokens(TEXT))
    assert restored.eviction == RESTORED[name]
    for question in (draw_tokens(QUESTION, seed=1), draw_tokens(5, seed=2)):
        assert relative_difference(restored.prefill(question), straight.prefill(question)) <= SAME_LOGITS
        for layer in evictable(model):
            np.testing.assert_array_equal(restored.kept_positions(layer), straight.kept_positions(layer))
            assert restored.physical_length(layer) == straight.physical_length(layer)
        assert relative_difference(restored.step(9), straight.step(9)) <= SAME_LOGITS
    assert restored.stats.evictions == straight.stats.evictions == 2


def test_queries_that_rings_cannot_capture_again_are_refused(mixed_model, path, draw_tokens):
    """Where none were captured, reading them again needs what their windows hold; a longer question brings its own."""
    session = mixed_model.session()
    session.prefill(draw_tokens(TEXT))
    session.save(path)
    restored = mixed_model.restore(path, snapkv=SnapKv(budget=BUDGET, window=32, sink=2))
    with pytest.raises(CapacityError, match="rewind_tokens"):
        restored.prefill(draw_tokens(31, seed=1))
    assert restored.logical_length == TEXT
    restored.prefill(draw_tokens(32, seed=1))
    assert restored.stats.evictions == 1


def test_another_budget_holds_from_the_next_eviction_on(model, path, draw_tokens):
    session = model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(100))
    session.save(path)
    for budget in (20, 60):
        restored = model.restore(path, snapkv=dataclasses.replace(SNAPKV, budget=budget))
        for layer in evictable(model):
            np.testing.assert_array_equal(restored.kept_positions(layer), session.kept_positions(layer))
        restored.prefill(draw_tokens(30, seed=1))
        assert {restored.physical_length(layer) for layer in evictable(model)} == {budget}


@pytest.mark.parametrize("queries", [8, 16, 50, 64, 130])
def test_captured_queries_lie_where_the_new_number_of_them_has_its_rows(model, path, draw_tokens, queries):
    """A position's query lies in the row of its remainder; those that were not saved count as missing, or are zeros."""
    session = model.session(snapkv=expected(64))
    session.prefill(draw_tokens(150))
    for token in draw_tokens(11, seed=1):
        session.step(token)
    session.save(path, EVERYTHING)
    restored = model.restore(path, eviction=expected(queries))
    kept = min(queries, 64)
    assert restored.state.lengths.captured_from <= 161 - kept
    assert queries <= 64 or restored.state.lengths.captured_from == 161 - 64
    for layer in evictable(model):
        for name, length in (("captures", 161), ("captured_at_eviction", 150)):
            old, new = (getattr(each.state, name)[layer][0] for each in (session, restored))
            positions, older = np.arange(length - kept, length), np.arange(length - queries, length - kept)
            np.testing.assert_array_equal(new[positions % queries], old[positions % 64])
            assert name == "captures" or not new[older % queries].any()
    for each in (session, restored):
        each.rewind(150)
        each.prefill([5, 6, 7])
    assert session.stats.evictions == 2
    assert restored.stats.evictions == 1
    assert np.isfinite(restored.step(5)).all()


def test_a_session_can_evict_during_prefill_from_then_on(model, path, draw_tokens):
    session = model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(100))
    session.save(path, EVERYTHING)
    restored = model.restore(path, snapkv=dataclasses.replace(SNAPKV, during_prefill=True))
    restored.prefill(draw_tokens(200, seed=1))
    assert restored.stats.evictions > 200 // 16 - 2
    assert restored.cache_bytes == restored.plan.bytes


def test_more_tokens_than_bounded_caches_hold_are_refused(model, path, draw_tokens):
    session = model.session()
    session.prefill(draw_tokens(100))
    session.save(path)
    with pytest.raises(ConfigError, match="holds 100 tokens"):
        model.restore(path, snapkv=dataclasses.replace(SNAPKV, during_prefill=True))


def test_one_of_the_two_names_is_given(full_model, path):
    full_model.session(snapkv=SNAPKV).save(path)
    assert full_model.restore(path).eviction == SNAPKV
    with pytest.raises(ConfigError, match="same option"):
        full_model.restore(path, snapkv=SNAPKV, eviction=SNAPKV)
    with pytest.raises(ConfigError, match="must be an ortolan"):
        full_model.restore(path, snapkv={"budget": 40})

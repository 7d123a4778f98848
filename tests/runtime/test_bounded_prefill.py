"""Eviction during prefill: what is held, what agrees, and what later turns and rewinds find."""

import dataclasses

import numpy as np
import pytest
from fake_cuda import make_session
from families import tiny_checkpoint
from masked_oracle import Visibility
from parity import relative_difference
from tolerances import LOGITS_RELATIVE, SAME_LOGITS

import ortolan
import ortolan.runtime.eviction.evicting as evicting_module
from ortolan import Eviction, SnapKv
from ortolan.errors import CapacityError, ConfigError

BUDGET, CHUNK = 40, 16
SNAPKV = SnapKv(budget=BUDGET, window=8, sink=2, during_prefill=True)
POLICIES = ("snapkv", "streaming", "expected")


def evictable(model) -> list[int]:
    return [i for i, layer in enumerate(model.manifest.layers) if layer.evictable]


def test_a_prompt_of_ten_budgets_is_held_in_a_budget_and_a_chunk(model, draw_tokens):
    session, plain = model.session(snapkv=SNAPKV), model.session()
    planned = model.plan(snapkv=SNAPKV)
    held, sizes = [], []

    def note(_):
        held.append(max(session.physical_length(i) for i in evictable(model)))
        sizes.append(session.cache_bytes)

    session.prefill(draw_tokens(10 * BUDGET), note)
    assert max(held) == BUDGET + CHUNK
    assert set(sizes) == {planned.bytes} == {session.cache_bytes} == {session.memory_report().planned_cache_bytes}
    saved = sum((512 - BUDGET - CHUNK) * planned.layers[i].slot_bytes for i in evictable(model))
    assert planned.bytes == plain.cache_bytes - saved
    assert session.stats.evictions == len(range(0, 10 * BUDGET, CHUNK)) - 2
    assert [session.physical_length(i) for i in evictable(model)] == [BUDGET] * len(evictable(model))
    assert session.logical_length == 10 * BUDGET


@pytest.mark.parametrize(("count", "evictions"), [(40, 0), (41, 1), (48, 1), (49, 2), (53, 2), (70, 3)])
def test_every_chunk_that_passes_the_budget_fires(model, open_session, draw_tokens, count, evictions):
    """Also where the caches had room for what remains."""
    session = open_session(model, snapkv=SNAPKV)
    session.prefill(draw_tokens(count))
    assert session.stats.evictions == evictions


def test_decoding_evicts_when_the_caches_are_full_and_not_before(model, open_session, draw_tokens):
    session, layer = open_session(model, snapkv=SNAPKV), evictable(model)[0]
    session.prefill(draw_tokens(100))
    before, capacity = session.stats.evictions, session.cache_capacity(layer)
    for count, token in enumerate(draw_tokens(40, seed=1), 1):
        session.step(token)
        assert session.physical_length(layer) == BUDGET + (count - 1) % CHUNK + 1
        assert session.stats.evictions - before == (count - 1) // CHUNK
    assert session.cache_capacity(layer) == capacity


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [41, 100, 200])
def test_a_chunk_that_holds_the_prompt_changes_nothing(model, open_session, draw_tokens, policy, count):
    """Then there is one eviction, after the prompt, as without the option; bit for bit."""
    options = Eviction(policy=policy, budget=BUDGET, window=8, sink=2, during_prefill=True)
    session = open_session(model, snapkv=options, chunk_size=200)
    usual = open_session(model, snapkv=dataclasses.replace(options, during_prefill=False), chunk_size=200)
    tokens = draw_tokens(count + 20)
    np.testing.assert_array_equal(session.prefill(tokens[:count]), usual.prefill(tokens[:count]))
    for layer in evictable(model):
        np.testing.assert_array_equal(session.kept_positions(layer), usual.kept_positions(layer))
    for token in tokens[count:]:
        np.testing.assert_array_equal(session.step(token), usual.step(token))
    assert session.stats.evictions == usual.stats.evictions == 1


def note_evictions(session, visibility):
    """Hide from the oracle what each eviction of the session takes, when it takes it."""
    lengths = session.state.lengths
    record = lengths.record_eviction

    def noting(keep, heads):
        record(keep, heads)
        visibility.note_eviction(session)

    lengths.record_eviction = noting


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_turns_agree_with_transformers(tmp_path, open_session, draw_tokens, family, policy):
    """Each query sees what was held when it was read, through turns, answers and odd last chunks."""
    checkpoint = tiny_checkpoint(family, tmp_path / "hf", seed=5, num_key_value_heads=2)
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=512, chunk_size=CHUNK)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    turns = [(10 * BUDGET + 3, 30), (21, 3), (1, 5)]
    length = sum(map(sum, turns))
    session, tokens, rows = (
        open_session(model, snapkv=Eviction(policy=policy, budget=BUDGET, window=8, sink=2, during_prefill=True)),
        draw_tokens(length),
        {},
    )
    visibility = Visibility(session, length)
    note_evictions(session, visibility)
    for prompt, decoded in turns:
        begin = session.logical_length
        rows[begin + prompt - 1] = session.prefill(tokens[begin : begin + prompt])
        for position in range(begin + prompt, begin + prompt + decoded):
            rows[position] = session.step(tokens[position])
    assert session.stats.evictions > 10 * BUDGET // CHUNK
    expected = visibility.logits(checkpoint, tokens)
    differences = [relative_difference(row, expected[position]) for position, row in rows.items()]
    assert max(differences) <= LOGITS_RELATIVE, differences


def test_generation_on_a_device_agrees_with_the_host(endless, monkeypatch, draw_tokens):
    session, host = make_session(endless, monkeypatch, snapkv=SNAPKV), endless.session(snapkv=SNAPKV)
    for turn, count in enumerate((200, 15, 1)):
        expected = list(host.generate(draw_tokens(count, seed=turn), 50))
        assert list(session.generate(draw_tokens(count, seed=turn), 50)) == expected
        for layer in evictable(endless):
            np.testing.assert_array_equal(session.kept_positions(layer), host.kept_positions(layer))
    assert session.stats.evictions == host.stats.evictions
    assert session.stats.graph_captures == 1, "the caches stay where they are, and with them decode's graph"


@pytest.mark.parametrize("back", [100, 104, 112])
def test_a_rewind_behind_the_last_eviction_forgets_the_answer(model, open_session, draw_tokens, back):
    """The answer's queries took rows of the prompt's, which the next eviction scores by."""
    session, straight = open_session(model, snapkv=SNAPKV), open_session(model, snapkv=SNAPKV)
    answer, question = draw_tokens(14, seed=1), draw_tokens(37, seed=2)
    session.prefill(draw_tokens(100))
    for token in answer:
        session.step(token)
    session.rewind(back)
    straight.prefill(draw_tokens(100))
    for token in answer[: back - 100]:
        straight.step(token)
    assert relative_difference(session.prefill(question), straight.prefill(question)) <= SAME_LOGITS
    assert session.stats.evictions == straight.stats.evictions
    for layer in evictable(model):
        np.testing.assert_array_equal(session.kept_positions(layer), straight.kept_positions(layer))
    with pytest.raises(CapacityError, match=r"evicted|overwritten"):  # where rings are, they may be named
        session.rewind(99)
    session.rewind(0)
    expected = open_session(model, snapkv=SNAPKV).prefill(question)
    assert relative_difference(session.prefill(question), expected) <= SAME_LOGITS


def test_a_prompt_after_a_long_answer_makes_room_first(model, open_session, draw_tokens):
    """13 tokens of an answer and a chunk of 16 do not fit behind the budget."""
    session, layer = open_session(model, snapkv=SNAPKV), evictable(model)[0]
    session.prefill(draw_tokens(100))
    for token in draw_tokens(13, seed=1):
        session.step(token)
    before = session.stats.evictions
    held = []
    session.prefill(draw_tokens(16, seed=2), lambda _: held.append(session.physical_length(layer)))
    assert session.stats.evictions == before + 2
    assert held == [BUDGET + CHUNK]


def test_a_context_below_budget_and_chunk_is_planned_as_it_is(model, draw_tokens):
    session = model.session(max_context=50, snapkv=SNAPKV)
    layer = evictable(model)[0]
    assert session.cache_capacity(layer) == 50
    session.prefill(draw_tokens(50))
    assert session.physical_length(layer) == BUDGET


def test_a_variant_of_rope_is_that_of_the_whole_prompt(tmp_path, open_session, draw_tokens, monkeypatch):
    """Chunks before the limit are read with the frequencies of what comes after it."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    checkpoint = tiny_checkpoint("llama", tmp_path / "hf", rope_parameters=rope, max_position_embeddings=64)
    with pytest.warns(UserWarning, match="max_position_embeddings"):
        folder = ortolan.export(checkpoint, tmp_path / "model", max_context=256, chunk_size=CHUNK)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    assert len(model.manifest.rope_limits) == 2
    session = open_session(
        model, snapkv=Eviction(policy="expected", budget=BUDGET, window=8, sink=2, during_prefill=True)
    )
    variants, evict = [], evicting_module.evict

    def noting(*arguments, **scores):
        variants.append((arguments[4], arguments[5]))
        return evict(*arguments, **scores)

    monkeypatch.setattr(evicting_module, "evict", noting)
    session.prefill(draw_tokens(100))
    assert variants[0] == (48, 1)
    assert {variant for _, variant in variants} == {1}


@pytest.mark.parametrize("name", ["full_model", "paged_model"])
def test_a_restored_session_keeps_to_its_own_bound(request, tmp_path, draw_tokens, name):
    """A smaller chunk makes a smaller bound, also where whole pages hold more."""
    model = request.getfixturevalue(name)
    session = model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(BUDGET))
    for token in draw_tokens(5, seed=1):
        session.step(token)
    session.save(tmp_path / "chat.session")
    with pytest.raises(ConfigError, match=r"holds 45 tokens .* 41 in the session"):
        model.restore(tmp_path / "chat.session", chunk_size=1)
    restored = model.restore(tmp_path / "chat.session", chunk_size=5)
    assert restored.physical_length(0) == restored.plan.bound == 45
    restored.step(7)
    assert restored.physical_length(0) == BUDGET + 1

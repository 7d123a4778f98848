"""Evictions on a GPU: bounded prefill, narrow caches, captured decode steps, and the memory that comes back."""

import dataclasses

import numpy as np
import pytest
from cuda_models import GRAPHS, draw_tokens, open_pair
from families import tiny_checkpoint
from kvpress_oracle import differ_by_ties
from parity import relative_difference
from snapkv_reference import pooled_scores, select
from tolerances import LOGITS_RELATIVE, SCORE_TIES

import ortolan
from ortolan import Eviction, SnapKv
from ortolan.element_types import element_type

pytestmark = pytest.mark.cuda

SNAPKV = SnapKv(budget=40, window=8, sink=2)
BOUNDED = dataclasses.replace(SNAPKV, during_prefill=True)


@pytest.fixture(params=GRAPHS)
def graph(request):
    return request.param


def evictable(model) -> list[int]:
    return [i for i, layer in enumerate(model.manifest.layers) if layer.evictable]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["snapkv", "streaming", "expected"])
def test_eviction_during_prefill_equals_the_hosts(family, policy, graph):
    pair = open_pair(family, "float32", graph)
    options = Eviction(policy=policy, budget=40, window=8, sink=2, during_prefill=True)
    session, host = pair.device.session(snapkv=options), pair.host.session(snapkv=options)
    planned = session.cache_bytes
    for turn, count in enumerate((300, 37, 1)):
        prompt = draw_tokens(count, seed=turn)
        assert relative_difference(session.prefill(prompt), host.prefill(prompt)) <= LOGITS_RELATIVE
        for token in draw_tokens(30, seed=turn + 10):
            assert relative_difference(session.step(token), host.step(token)) <= LOGITS_RELATIVE
        for layer in evictable(pair.host):
            np.testing.assert_array_equal(session.kept_positions(layer), host.kept_positions(layer))
        assert session.cache_bytes == planned
    assert session.stats.evictions == host.stats.evictions > 20
    assert session.stats.graph_captures == 1


def test_later_evictions_keep_the_captured_steps(graph):
    session = open_pair("llama", "bfloat16", graph).device.session(snapkv=SNAPKV)
    session.plan = dataclasses.replace(session.plan, growth_room=100)
    for turn, count in enumerate((300, 30, 50)):
        assert len(list(session.generate(draw_tokens(count, seed=turn), 10))) == 10
    assert session.stats.evictions == 3
    assert session.stats.graph_captures == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_caches_keep_what_their_values_say(dtype, graph):
    """Scores come from the rounded queries and keys, and the kept rows are moved bit for bit."""
    model = open_pair("llama", dtype, graph).device
    observer, session = (model.session(snapkv=dataclasses.replace(SNAPKV, budget=b, window=32)) for b in (300, 80))
    for each in (observer, session):
        each.prefill(draw_tokens(300))
    narrow = element_type(dtype).numpy

    def download(array):
        return session._device.download(array).view(narrow)

    structure = {"kernel": 5, "pool": "avg", "granularity": "kv_head", "group_reduce": "mean"}
    for i in evictable(model):
        full, moved = observer._caches.layers[i], session._caches.layers[i]
        capture, key = download(observer._caches.captures[i]), download(full.key)
        (scores,) = pooled_scores([(capture.astype(np.float32), key.astype(np.float32), np.array([300]))], **structure)
        for head, row in enumerate(session.kept_positions(i)):
            want = select(scores[0, head], 300, budget=80, window=32, sink=2)
            assert differ_by_ties([row], [want], scores[0, head : head + 1], SCORE_TIES)
            for part in ("key", "value"):
                np.testing.assert_array_equal(
                    download(getattr(moved, part))[0, head, :80].view(np.uint16),
                    download(getattr(full, part))[0, head, row].view(np.uint16),
                )


@pytest.mark.parametrize("during_prefill", [False, True])
def test_a_prompt_of_16k_tokens_is_held_in_an_eighth(tmp_path, during_prefill):
    """As bytes that the device's pool holds, whatever the session says of itself."""
    checkpoint = tiny_checkpoint("llama", tmp_path / "hf", seed=5, num_hidden_layers=2, max_position_embeddings=32768)
    model = ortolan.load(
        ortolan.export(checkpoint, tmp_path / "model", dtype="bfloat16", max_context=16_448), device="cuda"
    )
    pool = model._buffers
    before = pool.pool_bytes
    session = model.session(snapkv=SnapKv(budget=2048, during_prefill=during_prefill))
    slot_bytes = sum(layer.slot_bytes for layer in session.plan.layers)
    session.prefill(draw_tokens(16_384))
    pool.trim()
    overhead = 2 * session.memory_report().capture_bytes + session.memory_report().step_bytes + 2**20
    assert [session.physical_length(layer) for layer in range(2)] == [2048, 2048]
    slots = 2048 + session.plan.chunk_size if during_prefill else 16_384 // 8
    assert session.cache_bytes == slots * slot_bytes
    assert pool.pool_bytes - before <= session.cache_bytes + overhead
    rows = [session.step(token) for token in draw_tokens(20, seed=1)]
    assert all(np.isfinite(row).all() and np.std(row) > 0 for row in rows)


@pytest.mark.parametrize("snapkv", [None, SNAPKV, BOUNDED], ids=["off", "after", "during"])
@pytest.mark.parametrize("chunks", [1, 5])
def test_a_prompt_stopped_between_chunks_goes_on(snapkv, chunks, graph):
    model = open_pair("gemma3", "float32", graph).device
    session, straight = (model.session(snapkv=snapkv) for _ in range(2))
    prompt, read = draw_tokens(200), []

    def progress(count):
        read.append(count)
        if len(read) == chunks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill(prompt, progress)
    assert session.logical_length == sum(read)
    logits = session.prefill(prompt[sum(read) :])
    assert relative_difference(logits, straight.prefill(prompt)) <= LOGITS_RELATIVE
    assert relative_difference(session.step(5), straight.step(5)) <= LOGITS_RELATIVE


def test_nothing_is_captured_by_a_session_that_does_not_evict(graph):
    """A capture without rows launches no kernel."""
    session = open_pair("llama", "bfloat16", graph).device.session()
    session.prefill(draw_tokens(100))
    assert session.memory_report().capture_bytes == 0
    assert {capture.shape[1] for capture in session._caches.captures.values()} == {0}

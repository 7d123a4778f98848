"""Paged sessions on a GPU: bit for bit what contiguous ones give, with captured decode steps."""

import random

import numpy as np
import pytest
from cuda_models import ELEMENTS, GRAPHS, draw_tokens, open_device
from paged_sessions import pages_in_use, poison_free_pages, talk_in_step
from sessions import open_with_room

from ortolan import Eviction, SnapKv
from ortolan.contract import PAGE_SIZES
from ortolan.errors import CapacityError
from ortolan.policies import POLICIES

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("seed", range(8))
def test_paged_equals_contiguous_bit_for_bit(seed, graph, dtype):
    rng = random.Random(seed)
    family, sink = rng.choice(["llama", "gemma3", "qwen2"]), rng.choice([0, 4])
    sizes = (0, rng.choice(PAGE_SIZES))
    models = [open_device(family, dtype, graph, page_size=size, sink=sink) for size in sizes]
    evicts = any(layer.evictable for layer in models[0].manifest.layers)
    snapkv = (
        Eviction(budget=40, window=8, sink=2, policy=rng.choice(list(POLICIES)))
        if evicts and rng.random() < 0.7
        else None
    )
    room = rng.choice([0, 7, 200])
    sessions = [open_with_room(model, room, snapkv=snapkv, chunk_size=16) for model in models]
    assert talk_in_step(sessions, seed) > 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_growing_by_pages_keeps_the_captured_graph(dtype, page_size):
    """The graph reads the table's address: 400 decoded tokens take new pages, and no new capture."""
    models = [open_device("gemma3", dtype, "fused", page_size=size, sink=0) for size in (0, page_size)]
    contiguous, paged = models[0].session(), open_with_room(models[1], 0)
    expected, got = (list(session.generate(draw_tokens(20), 400)) for session in (contiguous, paged))
    assert got == expected
    assert paged.stats.graph_captures == 1
    assert paged.cache_capacity(1) == -(-419 // page_size) * page_size


def test_an_eviction_frees_pages_and_the_memory_adds_up():
    model = open_device("llama", "bfloat16", "fused", page_size=16, sink=0)
    session = open_with_room(model, 0, snapkv=SnapKv(budget=40, window=8, sink=2))
    session.prefill(draw_tokens(200))
    assert pages_in_use(session) == [3]
    poison_free_pages(session)
    assert np.isfinite(session.step(5)).all()
    report = session.memory_report()
    assert report.cache_bytes + report.free_page_bytes == report.planned_cache_bytes
    session.rewind(200)
    with pytest.raises(CapacityError):
        session.rewind(100)

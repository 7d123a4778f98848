"""An engine leaves room for attention's scratch memory, which the operator library computes."""

import dataclasses
from types import SimpleNamespace

import pytest
from fake_batch import make_manifest

from ortolan.errors import CapacityError
from ortolan.manifest import LayerInfo, cache_kinds
from ortolan.runtime.caches.plan import plan_pools
from ortolan.runtime.device.memory import DeviceMemory, check_pools, estimate_chunk_bytes
from ortolan.runtime.model import POOL_SHARE, Model
from ortolan.runtime.steps.cuts import ANYWHERE

SCRATCH = 2**30


def make_llama(windows=(-1,)):
    layers = tuple(LayerInfo(window=w, num_heads=32, num_kv_heads=8, head_size=128, evictable=False) for w in windows)
    return dataclasses.replace(
        make_manifest(rings=False),
        layers=layers,
        cache_kinds=cache_kinds(layers),
        dtype="bfloat16",
        cache_dtype="bfloat16",
        page_size=64,
        max_context=32768,
        rope_limits=(32768,),
    )


@pytest.fixture
def queries(monkeypatch):
    """Answer for a library with CUDA kernels, by the capacity alone, and keep what was asked."""
    asked = []
    monkeypatch.setattr(
        "ortolan.runtime.device.memory.decode_scratch_bytes",
        lambda query: asked.append(query) or SCRATCH * query.capacity // 32768,
    )
    return asked


def plan_on_cuda(manifest, free):
    """Plan an engine of a model on a device of which so much is free."""
    cuda = SimpleNamespace(shared_bytes_per_block=101376, trim=lambda: None, memory=lambda: (free, free))
    device = SimpleNamespace(name="cuda:0", cuda=cuda)
    model = SimpleNamespace(manifest=manifest, device=device, memory=DeviceMemory(device, manifest), cuts=ANYWHERE)
    return Model.plan_engine(model, 400, None, 512)


def test_pools_of_no_given_size_leave_room_for_it(queries):
    model, free = make_llama(), 20 * 2**30
    plan = plan_on_cuda(model, free)
    left = POOL_SHARE * (free - SCRATCH - estimate_chunk_bytes(model, plan))
    assert left - plan.kinds[0].page_bytes < plan.bytes <= left
    query = queries[0]
    assert (query.dtype, query.num_heads, query.num_kv_heads, query.head_size) == ("bfloat16", 32, 8, 128)
    assert (query.max_sequences, query.max_tokens, query.shared_bytes_per_block) == (400, 512, 101376)


def test_the_largest_layer_counts(queries):
    free = 20 * 2**30
    model = make_llama(windows=(1024, -1))
    plan = plan_on_cuda(model, free)
    assert {query.window for query in queries} == {1024, -1}
    assert plan.bytes <= POOL_SHARE * (free - SCRATCH - estimate_chunk_bytes(model, plan))


def test_pools_that_leave_no_room_for_it_are_refused():
    model = make_llama()
    plan = plan_pools(model, 4, None, 512, cuda=True)
    check_pools(plan, SCRATCH, (plan.bytes + SCRATCH, 2 * plan.bytes), "cuda:0")
    with pytest.raises(CapacityError, match=f"{SCRATCH} of attention's scratch memory.* 1 too few"):
        check_pools(plan, SCRATCH, (plan.bytes + SCRATCH - 1, 2 * plan.bytes), "cuda:0")

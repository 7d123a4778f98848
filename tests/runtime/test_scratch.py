"""How much decode attention may set down: never less than what any step of an engine asks for."""

import dataclasses
from types import SimpleNamespace

import pytest
from fake_batch import make_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortolan.errors import CapacityError
from ortolan.manifest import LayerInfo, cache_kinds
from ortolan.runtime.engine_plan import plan_engine
from ortolan.runtime.device.memory import check_pools, estimate_chunk_bytes
from ortolan.runtime.model import POOL_SHARE, Model
from ortolan.runtime.scratch import decode_rows, decode_scratch_bytes, tile_keys

H200, RTX_4090 = 232448, 101376  # shared memory of a block


def make_llama(max_context=131072, dtype="bfloat16", windows=(-1,)):
    layers = tuple(LayerInfo(window=w, num_kv_heads=8, head_size=128, evictable=False) for w in windows)
    return dataclasses.replace(
        make_manifest(rings=False),
        layers=layers,
        cache_kinds=cache_kinds(layers),
        num_heads=32,
        dtype=dtype,
        page_size=64,
        max_context=max_context,
        rope_limits=(max_context,),
    )


@settings(max_examples=500, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    group=st.integers(1, 40),
    entry_rows=st.sampled_from([8, 16]),
)
def test_rows_of_any_packing_have_room(tokens, group, entry_rows):
    entries = sum(-(-count * group // entry_rows) for count in tokens if count <= 16)
    assert entries * entry_rows <= decode_rows(len(tokens), sum(tokens), group)


@pytest.mark.parametrize(
    ("head_size", "shared_bytes", "keys"),
    [(64, H200, 256), (96, H200, 128), (128, H200, 128), (256, H200, 64), (512, H200, 32), (128, RTX_4090, 32)],
)
def test_tiles_are_those_of_the_kernels(head_size, shared_bytes, keys):
    layer = LayerInfo(window=-1, num_kv_heads=1, head_size=head_size, evictable=False)
    assert tile_keys(layer, shared_bytes) == keys


def test_many_long_sequences_are_counted_to_the_byte():
    model = make_llama()
    plan = plan_engine(model, 128, None, 512, cuda=True)
    rows, spans = 8 * (512 * 4 + 128 * 12), 131072 // 128 // 8 + 5
    assert decode_scratch_bytes(model, plan, H200) == rows * spans * (128 + 2) * 4
    assert decode_scratch_bytes(make_llama(dtype="float32"), plan, H200) == 0


def test_the_largest_layer_counts():
    model = make_llama(windows=(1024, -1))
    both = decode_scratch_bytes(model, plan_engine(model, 8, None, 512, cuda=True), H200)
    full = make_llama()
    assert both == decode_scratch_bytes(full, plan_engine(full, 8, None, 512, cuda=True), H200)
    rings = make_llama(windows=(1024,))
    assert decode_scratch_bytes(rings, plan_engine(rings, 8, None, 512, cuda=True), H200) < both / 10


def test_pools_that_leave_no_room_for_it_are_refused():
    model = make_llama(max_context=4096)
    plan = plan_engine(model, 4, None, 512, cuda=True)
    scratch = decode_scratch_bytes(model, plan, H200)
    check_pools(plan, scratch, (plan.bytes + scratch, 2 * plan.bytes), "cuda:0")
    with pytest.raises(CapacityError, match=f"{scratch} of attention's scratch memory.* 1 too few"):
        check_pools(plan, scratch, (plan.bytes + scratch - 1, 2 * plan.bytes), "cuda:0")


def test_pools_of_no_given_size_leave_room_for_it():
    model, free = make_llama(max_context=32768), 20 * 2**30
    device = SimpleNamespace(
        name="cuda:0", free_memory=lambda: (free, free), buffers=SimpleNamespace(shared_bytes_per_block=RTX_4090)
    )
    plan = Model.plan_engine(SimpleNamespace(manifest=model, _device=device), 400, None, 512)
    scratch = decode_scratch_bytes(model, plan, RTX_4090)
    assert scratch > 2**30
    left = POOL_SHARE * (free - scratch - estimate_chunk_bytes(model, plan))
    assert left - plan.kinds[0].page_bytes < plan.bytes <= left

"""The eviction graph keeps what SnapKV, restated in NumPy, keeps."""

import numpy as np
import onnx
import onnxruntime
import pytest
from snapkv_reference import pooled_scores, select

import ortolan.custom_ops
from ortolan.custom_ops import reference
from ortolan.errors import ConfigError
from ortolan.graphs import build_evict_model
from ortolan.manifest import LayerInfo, Manifest

SLOTS, WINDOW, HEADS, KV_HEADS, SIZE = 96, 8, 4, 2, 16


def manifest(evictable: bool = True) -> Manifest:
    full = LayerInfo(window=-1, num_kv_heads=KV_HEADS, head_size=SIZE, evictable=evictable)
    ring = LayerInfo(window=12, num_kv_heads=KV_HEADS, head_size=SIZE, evictable=False)
    return Manifest(
        architecture="test",
        dtype="float32",
        vocab_size=10,
        num_heads=HEADS,
        max_context=SLOTS,
        chunk_size=8,
        sink=0,
        snapkv_window=WINDOW,
        paged=False,
        layers=(full, ring, full),
        rope_limits=(SLOTS,),
    )


def draw_feeds(rng, lengths):
    feeds = {"budget": np.array([30]), "window": np.array([WINDOW]), "sink": np.array([3])}
    for layer in (0, 2):
        shape = (len(lengths), KV_HEADS, SLOTS, SIZE)
        feeds[f"layer.{layer}.capture"] = rng.standard_normal((len(lengths), WINDOW, HEADS, SIZE)).astype(np.float32)
        feeds[f"layer.{layer}.key_cache"] = rng.standard_normal(shape).astype(np.float32)
        feeds[f"layer.{layer}.value_cache"] = rng.standard_normal(shape).astype(np.float32)
        feeds[f"layer.{layer}.kv_len"] = np.repeat(np.array(lengths, np.int32)[:, None], KV_HEADS, axis=1)
    return feeds


def run(model, feeds):
    options = onnxruntime.SessionOptions()
    ortolan.custom_ops.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.mark.parametrize("granularity", ["kv_head", "layer", "model"])
@pytest.mark.parametrize(("kernel", "pool", "reduce"), [(5, "avg", "mean"), (7, "max", "max"), (1, "avg", "sum")])
def test_keep_lists_and_caches(granularity, kernel, pool, reduce):
    rng = np.random.default_rng(kernel)
    lengths = [90, 20]
    feeds = draw_feeds(rng, lengths)
    model = build_evict_model(manifest(), kernel=kernel, pool=pool, granularity=granularity, group_reduce=reduce)
    onnx.checker.check_model(model)
    results = run(model, feeds)
    names = ("capture", "key_cache", "kv_len")
    pooled = dict(
        zip(
            (0, 2),
            pooled_scores(
                [tuple(feeds[f"layer.{i}.{name}"] for name in names) for i in (0, 2)],
                kernel=kernel,
                pool=pool,
                granularity=granularity,
                group_reduce=reduce,
            ),
            strict=True,
        )
    )
    for i in (0, 2):
        keep = results[f"layer.{i}.keep"]
        for b, length in enumerate(lengths):
            for h in range(keep.shape[1]):
                want = select(pooled[i][b, h], length, budget=30, window=WINDOW, sink=3)
                np.testing.assert_array_equal(keep[b, h][keep[b, h] >= 0], want)
        np.testing.assert_array_equal(results[f"layer.{i}.kv_len_out"], np.minimum(feeds[f"layer.{i}.kv_len"], 30))
        caches = reference.kv_compact(feeds[f"layer.{i}.key_cache"], feeds[f"layer.{i}.value_cache"], keep)
        np.testing.assert_array_equal(results[f"layer.{i}.key_cache_out"], caches[0])
        np.testing.assert_array_equal(results[f"layer.{i}.value_cache_out"], caches[1])


def test_a_budget_beyond_the_cache_keeps_everything():
    feeds = draw_feeds(np.random.default_rng(0), [90]) | {"budget": np.array([500])}
    keep = run(build_evict_model(manifest()), feeds)["layer.0.keep"]
    np.testing.assert_array_equal(keep[0, 0][keep[0, 0] >= 0], np.arange(90))


def test_ties_keep_the_lower_position():
    feeds = draw_feeds(np.random.default_rng(0), [90])
    feeds["layer.0.capture"][:] = 0
    keep = run(build_evict_model(manifest(), kernel=1), feeds)["layer.0.keep"]
    np.testing.assert_array_equal(keep[0, 0], [*range(22), *range(82, 90)])


@pytest.mark.parametrize(
    "options",
    [{"kernel": 4}, {"kernel": 0}, {"pool": "median"}, {"granularity": "head"}, {"group_reduce": "min"}],
)
def test_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        build_evict_model(manifest(), **options)


def test_a_model_without_evictable_layers_is_refused():
    with pytest.raises(ConfigError, match="nothing can be evicted"):
        build_evict_model(manifest(evictable=False))

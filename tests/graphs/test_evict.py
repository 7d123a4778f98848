"""The eviction graph keeps what SnapKV, restated in NumPy, keeps."""

import dataclasses
import json

import numpy as np
import onnx
import pytest
from evict_cases import WINDOW, draw_feeds, manifest, run
from snapkv_reference import pooled_scores, select

from ortolan.custom_ops import reference
from ortolan.errors import ConfigError
from ortolan.graphs import build_evict_model
from ortolan.policies import STRUCTURE_METADATA, Eviction, SnapKv


@pytest.mark.parametrize("granularity", ["kv_head", "layer", "model"])
@pytest.mark.parametrize(("kernel", "pool", "reduce"), [(5, "avg", "mean"), (7, "max", "max"), (1, "avg", "sum")])
def test_keep_lists_and_caches(granularity, kernel, pool, reduce):
    rng = np.random.default_rng(kernel)
    lengths = [90, 20]
    feeds = draw_feeds(rng, lengths)
    model = build_evict_model(
        manifest(), SnapKv(kernel=kernel, pool=pool, granularity=granularity, group_reduce=reduce)
    )
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


@pytest.mark.parametrize(("layers", "selects"), [(1, 1), (2, 1), (8, 1), (9, 2), (18, 3)])
def test_layers_that_are_chosen_together_keep_what_each_keeps_alone(layers, selects):
    described = manifest()
    described = dataclasses.replace(described, layers=(described.layers[0],) * layers)
    model = build_evict_model(described)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node].count("KvSelect") == selects
    feeds = draw_feeds(np.random.default_rng(layers), [90, 20], range(layers))
    for layer in range(layers):
        feeds[f"layer.{layer}.kv_len"][0] -= layer
    together = run(model, feeds)
    single = build_evict_model(manifest())
    for layer in range(layers):
        alone = {"budget", "window", "sink"}
        parts = ("capture", "key_cache", "value_cache", "kv_len")
        own = {f"layer.{i}.{part}": feeds[f"layer.{layer}.{part}"] for i in (0, 2) for part in parts}
        expected = run(single, {**own, **{name: feeds[name] for name in alone}})
        for name in ("keep", "kv_len_out", "key_cache_out", "value_cache_out"):
            np.testing.assert_array_equal(together[f"layer.{layer}.{name}"], expected[f"layer.0.{name}"])


def test_a_budget_beyond_the_cache_keeps_everything():
    feeds = draw_feeds(np.random.default_rng(0), [90]) | {"budget": np.array([500])}
    keep = run(build_evict_model(manifest()), feeds)["layer.0.keep"]
    np.testing.assert_array_equal(keep[0, 0][keep[0, 0] >= 0], np.arange(90))


def test_ties_keep_the_lower_position():
    feeds = draw_feeds(np.random.default_rng(0), [90])
    feeds["layer.0.capture"][:] = 0
    keep = run(build_evict_model(manifest(), SnapKv(kernel=1)), feeds)["layer.0.keep"]
    np.testing.assert_array_equal(keep[0, 0], [*range(22), *range(82, 90)])


def test_a_graph_tells_the_options_that_shaped_it():
    for eviction in (Eviction(), SnapKv(kernel=7, budget=99), Eviction(policy="expected", group_reduce="max")):
        (recorded,) = (
            each.value
            for each in build_evict_model(manifest(), eviction).metadata_props
            if each.key == STRUCTURE_METADATA
        )
        assert json.loads(recorded) == eviction.structure
        assert eviction.structure["policy"] == eviction.policy


def test_a_model_without_evictable_layers_is_refused():
    with pytest.raises(ConfigError, match="no layer of this model can evict"):
        build_evict_model(manifest(evictable=False))

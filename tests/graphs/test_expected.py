"""The policy `expected` keeps what ExpectedAttention, restated in float64, keeps."""

import dataclasses

import numpy as np
import onnx
import pytest
from evict_cases import HEADS, INV_FREQ, KV_HEADS, SIZE, WINDOW, draw_feeds, manifest, run
from expected_reference import expected_scores
from snapkv_reference import select

from ortolan.errors import ConfigError
from ortolan.graphs import build_evict_model
from ortolan.policies import Eviction

BUDGET, SINK = 30, 3


def draw(lengths, rows=WINDOW, seed=0):
    """Feeds whose queries have means and spreads of their own, and whose empty slots hold NaN."""
    rng = np.random.default_rng(seed)
    feeds = draw_feeds(rng, lengths)
    for layer in (0, 2):
        capture = rng.standard_normal((len(lengths), rows, HEADS, SIZE)) * rng.uniform(0.2, 3, (HEADS, SIZE))
        feeds[f"layer.{layer}.capture"] = (capture + rng.standard_normal((HEADS, SIZE))).astype(np.float32)
        for sequence, length in enumerate(lengths):
            for name in ("key_cache", "value_cache"):
                feeds[f"layer.{layer}.{name}"][sequence, :, length:] = np.nan
            feeds[f"layer.{layer}.capture"][sequence, length:] = np.nan
    return feeds


def scores_of(feeds, layer, sequence, *, inv_freq=INV_FREQ, **options):
    length = int(feeds[f"layer.{layer}.kv_len"][sequence, 0])
    capture = feeds[f"layer.{layer}.capture"][sequence]
    first = max(length - len(capture), SINK)
    queries = np.stack([capture[p % len(capture)] for p in range(first, length)])
    keys, values = (feeds[f"layer.{layer}.{name}"][sequence, :, :length] for name in ("key_cache", "value_cache"))
    return expected_scores(queries, first, keys, values, inv_freq=np.array(inv_freq), sink=SINK, **options)


def assert_kept(results, feeds, lengths, *, granularity="kv_head", **options):
    totals = {(i, b): scores_of(feeds, i, b, **options) for i in (0, 2) for b in range(len(lengths))}
    if granularity != "kv_head":
        totals = {at: np.broadcast_to(s.sum(axis=0), s.shape) for at, s in totals.items()}
    if granularity == "model":
        totals = {(i, b): totals[0, b] + totals[2, b] for i, b in totals}
    for (layer, sequence), scores in totals.items():
        keep = results[f"layer.{layer}.keep"][sequence]
        for head in range(KV_HEADS):
            row = keep[min(head, len(keep) - 1)]
            want = select(scores[head], lengths[sequence], budget=BUDGET, window=WINDOW, sink=SINK)
            np.testing.assert_array_equal(row[row >= 0], want)


@pytest.mark.parametrize("rows", [WINDOW, 24, 96])
@pytest.mark.parametrize("group_reduce", ["mean", "max", "sum"])
def test_kept_positions_equal_the_restatement(rows, group_reduce):
    lengths = [90, 47, 20]
    feeds = draw(lengths, rows)
    model = build_evict_model(manifest(), Eviction(policy="expected", group_reduce=group_reduce))
    onnx.checker.check_model(model)
    assert_kept(run(model, feeds), feeds, lengths, group_reduce=group_reduce)


@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_heads_and_layers_may_share_a_list(granularity):
    feeds = draw([90, 70], 24)
    results = run(build_evict_model(manifest(), Eviction(policy="expected", granularity=granularity)), feeds)
    assert_kept(results, feeds, [90, 70], granularity=granularity)


@pytest.mark.parametrize("rope", [None, "rope"])
def test_heads_may_be_rotated_in_part_or_not_at_all(rope):
    feeds, part = draw([90], 24), INV_FREQ[: SIZE // 4]
    results = run(build_evict_model(manifest(rope=rope, variants=(part,)), Eviction(policy="expected")), feeds)
    assert_kept(results, feeds, [90], inv_freq=part if rope else ())


@pytest.mark.parametrize("variant", [0, 1])
def test_the_variant_in_use_rotates(variant):
    variants = (INV_FREQ, tuple(f / 3 for f in INV_FREQ))
    feeds = draw([90], 24)
    model = build_evict_model(manifest(variants=variants), Eviction(policy="expected"))
    results = run(model, feeds | {"rope_variant": np.array([variant])})
    assert_kept(results, feeds, [90], inv_freq=variants[variant])


def test_the_models_own_scale_counts():
    feeds = draw([90], 24)
    plain = manifest()
    described = dataclasses.replace(plain, layers=tuple(dataclasses.replace(v, scale=0.7) for v in plain.layers))
    results = run(build_evict_model(described, Eviction(policy="expected")), feeds)
    assert_kept(results, feeds, [90], scale=0.7)


def test_large_exponents_stay_numbers():
    feeds = draw([90], 24)
    for layer in (0, 2):
        feeds[f"layer.{layer}.capture"] *= 1000
    keep = run(build_evict_model(manifest(), Eviction(policy="expected")), feeds)["layer.0.keep"]
    assert (keep >= 0).all()
    assert (np.diff(keep, axis=2) > 0).all()


def test_a_folder_without_frequencies_is_refused():
    with pytest.raises(ConfigError, match=r"choose another policy.*converted model never has them"):
        build_evict_model(dataclasses.replace(manifest(), ropes=None), Eviction(policy="expected"))

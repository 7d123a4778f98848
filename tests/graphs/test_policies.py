"""Each eviction policy keeps what its paper, restated in NumPy, keeps."""

import numpy as np
import onnx
import pytest
from evict_cases import HEADS, KV_HEADS, SIZE, SLOTS, WINDOW, draw_feeds, manifest, run
from kvzip_reference import keep_shared
from snapkv_reference import pooled_scores, select
from tolerances import FLOAT32_SUMS

from ortolan.graphs import build_evict_model, build_score_model
from ortolan.policies import POLICIES, Eviction

BUDGET, SINK = 30, 3
LENGTHS = [90, 20]


def evict(policy, feeds, **options):
    model = build_evict_model(manifest(), Eviction(policy=policy, **options))
    onnx.checker.check_model(model)
    return run(model, feeds)


def kept(results, layer, sequence, head):
    keep = results[f"layer.{layer}.keep"]
    row = keep[sequence, min(head, keep.shape[1] - 1)]
    count = results[f"layer.{layer}.kv_len_out"][sequence, head]
    assert (row[count:] == -1).all()
    return row[:count]


def scores_of(feeds, layer, **options):
    inputs = tuple(feeds[f"layer.{layer}.{name}"] for name in ("capture", "key_cache", "kv_len"))
    settings = {"kernel": 5, "pool": "avg", "granularity": "kv_head", "group_reduce": "mean"} | options
    return pooled_scores([inputs], **settings)[0]


@pytest.mark.parametrize("granularity", ["kv_head", "layer", "model"])
def test_streaming_keeps_the_first_and_the_last(granularity):
    feeds = draw_feeds(np.random.default_rng(0), LENGTHS)
    results = evict("streaming", feeds, granularity=granularity)
    for layer in (0, 2):
        assert results[f"layer.{layer}.keep"].shape[1] == (KV_HEADS if granularity == "kv_head" else 1)
        for head in range(KV_HEADS):
            expected = [*range(SINK), *range(90 - (BUDGET - SINK), 90)]
            np.testing.assert_array_equal(kept(results, layer, 0, head), expected)
            np.testing.assert_array_equal(kept(results, layer, 1, head), np.arange(20))


@pytest.mark.parametrize("granularity", ["kv_head", "layer"])
def test_pyramid_gives_early_layers_more(granularity):
    feeds = draw_feeds(np.random.default_rng(1), LENGTHS)
    results = evict("pyramidkv", feeds, granularity=granularity)
    rest = BUDGET - WINDOW
    smallest = rest // 20
    budgets = {0: WINDOW + 2 * rest - smallest, 2: max(WINDOW + smallest, WINDOW + SINK)}
    for layer, budget in budgets.items():
        scores = scores_of(feeds, layer, granularity=granularity)
        for sequence, length in enumerate(LENGTHS):
            for head in range(KV_HEADS):
                score = scores[sequence, min(head, scores.shape[1] - 1)]
                want = select(score, length, budget=budget, window=WINDOW, sink=SINK)
                np.testing.assert_array_equal(kept(results, layer, sequence, head), want)


def adakv_reference(scores, length):
    """Restate algorithm 1: every head's own best fifth of the budget, then the best of all heads together."""
    forced = [j for j in range(length) if j < SINK or j >= length - WINDOW]
    if length <= BUDGET:
        return [np.arange(length)] * KV_HEADS
    own = []
    for head in range(KV_HEADS):
        rest = sorted((j for j in range(length) if j not in forced), key=lambda j: (-scores[head, j], j))
        own.append({*forced, *rest[: max(BUDGET * 20 // 100 - len(forced), 0)]})
    open_bids = [(-scores[head, j], head, j) for head in range(KV_HEADS) for j in range(length) if j not in own[head]]
    for _, head, j in sorted(open_bids)[: KV_HEADS * BUDGET - sum(map(len, own))]:
        own[head].add(j)
    return [np.array(sorted(positions)) for positions in own]


@pytest.mark.parametrize("seed", range(4))
def test_adakv_lets_heads_share_a_budget(seed):
    rng = np.random.default_rng(seed)
    feeds = draw_feeds(rng, [90])
    feeds["layer.0.capture"][:, :, : HEADS // KV_HEADS] *= 4  # the first kv head's queries are sharp
    results = evict("adakv", feeds)
    for layer in (0, 2):
        expected = adakv_reference(scores_of(feeds, layer)[0], 90)
        for head in range(KV_HEADS):
            np.testing.assert_array_equal(kept(results, layer, 0, head), expected[head])
        assert sum(map(len, expected)) == KV_HEADS * BUDGET
    assert results["layer.0.kv_len_out"][0, 0] != results["layer.0.kv_len_out"][0, 1]


def test_adakv_safeguards_the_head_that_scores_nothing():
    feeds = draw_feeds(np.random.default_rng(0), [90])
    feeds["budget"] = np.array([60])
    feeds["layer.0.capture"][:, :, : HEADS // KV_HEADS] *= 30
    counts = evict("adakv", feeds)["layer.0.kv_len_out"][0]
    assert counts.sum() == 120
    assert counts.min() >= 12


def test_adakv_in_a_batch_equals_each_sequence_alone():
    feeds = draw_feeds(np.random.default_rng(3), [90, 20, 64])
    batch = evict("adakv", feeds)
    for sequence in range(3):
        alone = evict("adakv", {k: v if v.ndim == 1 else v[sequence : sequence + 1] for k, v in feeds.items()})
        for layer in (0, 2):
            for head in range(KV_HEADS):
                np.testing.assert_array_equal(kept(batch, layer, sequence, head), kept(alone, layer, 0, head))


@pytest.mark.parametrize("seed", range(4))
def test_kvzip_keeps_the_best_scores_of_all_heads(seed):
    feeds = draw_feeds(np.random.default_rng(seed), LENGTHS)
    feeds["layer.0.score"][:, 0] *= 2  # one head outbids the other
    results = evict("kvzip", feeds)
    for layer in (0, 2):
        for sequence, length in enumerate(LENGTHS):
            scores = feeds[f"layer.{layer}.score"][sequence, :, :length]
            expected = keep_shared(scores, budget=BUDGET, window=WINDOW, sink=SINK)
            for head in range(KV_HEADS):
                np.testing.assert_array_equal(kept(results, layer, sequence, head), expected[head])
    assert results["layer.0.kv_len_out"][0].sum() == KV_HEADS * BUDGET
    assert results["layer.0.kv_len_out"][0, 0] > BUDGET > results["layer.0.kv_len_out"][0, 1]


def test_kvzip_keeps_the_lower_position_of_equals():
    feeds = draw_feeds(np.random.default_rng(0), [90])
    feeds["layer.0.score"] = np.round(feeds["layer.0.score"], 1)  # many ties
    results, expected = (
        evict("kvzip", feeds),
        keep_shared(feeds["layer.0.score"][0, :, :90], budget=BUDGET, window=WINDOW, sink=SINK),
    )
    for head in range(KV_HEADS):
        np.testing.assert_array_equal(kept(results, 0, 0, head), expected[head])


def test_kvzip_scores_by_the_largest_weight_of_any_query_and_any_piece():
    feeds = draw_feeds(np.random.default_rng(0), LENGTHS)
    model = build_score_model(manifest(), Eviction(policy="kvzip"))
    onnx.checker.check_model(model)
    results = run(model, feeds)
    for layer in (0, 2):
        capture, keys, kv_len, earlier = (
            feeds[f"layer.{layer}.{name}"] for name in ("capture", "key_cache", "kv_len", "score")
        )
        for sequence, length in enumerate(LENGTHS):
            rows = np.arange(length - WINDOW, length) % WINDOW
            queries = capture[sequence, rows].reshape(WINDOW, KV_HEADS, -1, SIZE)
            logits = np.einsum("nhgd,hkd->hgnk", queries, keys[sequence, :, :length]) / np.sqrt(SIZE)
            logits[:, :, ~np.tri(WINDOW, length, length - WINDOW, dtype=bool)] = -np.inf
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            largest = (weights / weights.sum(axis=-1, keepdims=True)).max(axis=(1, 2))
            largest[:, length - WINDOW :] = 0  # the window itself
            got = results[f"layer.{layer}.score_out"][sequence]
            np.testing.assert_allclose(
                got[:, :length], np.maximum(largest, earlier[sequence, :, :length]), rtol=FLOAT32_SUMS
            )
        assert (kv_len[:, 0] == LENGTHS).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_beyond_the_cache_keeps_everything(policy):
    feeds = draw_feeds(np.random.default_rng(0), [90]) | {"budget": np.array([20 * SLOTS])}
    results = evict(policy, feeds)
    for head in range(KV_HEADS):
        np.testing.assert_array_equal(kept(results, 0, 0, head), np.arange(90))


@pytest.mark.parametrize("policy", POLICIES)
def test_empty_and_short_sequences_of_a_batch_keep_all_they_hold(policy):
    """Some sequences evict and some do not; slots that hold nothing hold NaN."""
    lengths = [0, 1, WINDOW - 1, BUDGET, 90]
    feeds = draw_feeds(np.random.default_rng(0), lengths)
    for layer in (0, 2):
        for sequence, length in enumerate(lengths):
            for name in ("key_cache", "value_cache"):
                feeds[f"layer.{layer}.{name}"][sequence, :, length:] = np.nan
            feeds[f"layer.{layer}.capture"][sequence, length:] = np.nan
    results = evict(policy, feeds)
    for layer in (0, 2):
        for head in range(KV_HEADS):
            for sequence in range(3):
                np.testing.assert_array_equal(kept(results, layer, sequence, head), np.arange(lengths[sequence]))
        counts = results[f"layer.{layer}.kv_len_out"]
        assert (counts[4] < 90).all()
        for name in ("key_cache", "value_cache"):
            for sequence in range(5):
                for head in range(KV_HEADS):
                    held = results[f"layer.{layer}.{name}_out"][sequence, head, : counts[sequence, head]]
                    assert np.isfinite(held).all()

"""The reference itself, against answers that need no reference."""

import numpy as np
import pytest
import torch

from ortolan.custom_ops import reference

START = np.array([0, 6], np.int32)
NONE = np.array([0], np.int32)


def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def test_full_attention_is_torchs():
    query, keys, values = draw(6, 4, 8), draw(1, 2, 6, 8) * 0.7, draw(1, 2, 6, 8) * 1.3
    output, lse = reference.swa_attention(query, keys, values, START, NONE)
    q, k, v = torch.tensor(query).transpose(0, 1)[None], torch.tensor(keys), torch.tensor(values)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert np.allclose(output, expected[0].transpose(0, 1).numpy(), rtol=0, atol=1e-14)
    scores = q[0] @ k[0].repeat_interleave(2, 0).mT / 8**0.5
    masked = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    assert np.allclose(lse, masked.logsumexp(-1).numpy(), rtol=0, atol=1e-14)


def test_learned_sink_is_one_more_key_without_a_value():
    query, keys, values = draw(1, 1, 8), draw(1, 1, 1, 8), draw(1, 1, 1, 8)
    start = np.array([0, 1], np.int32)
    sink = np.array([0.5], np.float32)
    output, lse = reference.swa_attention(query, keys, values, start, NONE, sink_logits=sink)
    logit = (query[0, 0] @ keys[0, 0, 0]) / 8**0.5
    weight = np.exp(logit) / (np.exp(logit) + np.exp(0.5))
    assert np.allclose(output[0, 0], weight * values[0, 0, 0])
    assert lse[0, 0] == pytest.approx(np.log(np.exp(logit) + np.exp(0.5)))


@pytest.mark.parametrize(
    ("position", "window", "sink", "expected"),
    [
        (4, -1, 0, [0, 1, 2, 3, 4]),
        (4, 1, 0, [4]),
        (4, 3, 0, [2, 3, 4]),
        (4, 2, 1, [0, 3, 4]),
        (4, 4, 2, [0, 1, 2, 3, 4]),
        (1, 1, 8, [0, 1]),
        (0, 3, 2, [0]),
    ],
)
def test_visible_positions(position, window, sink, expected):
    assert reference.visible_positions(position, window, sink) == expected


def test_slots_repeat_after_the_sinks_only():
    assert [reference.slot_of(p, 5, 2) for p in range(10)] == [0, 1, 2, 3, 4, 2, 3, 4, 2, 3]
    assert [reference.slot_of(p, 4, 0) for p in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_ring_holds_the_last_positions():
    rows = np.arange(9.0).reshape(9, 1, 1)
    empty = np.full((1, 1, 5, 1), np.nan)
    keys, values = reference.ring_kv_append(rows, -rows, empty, empty, np.array([0, 9]), NONE, sink=2)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 8, 6, 7]
    assert values[0, 0, :, 0].tolist() == [0, -1, -8, -6, -7]
    assert np.isnan(empty).all()


def test_capture_keeps_the_last_rows():
    query = np.arange(1.0, 6.0).reshape(5, 1, 1)
    captured = reference.snapkv_capture(query, np.zeros((1, 3, 1, 1)), np.array([0, 5]), np.array([2]))
    assert captured.ravel().tolist() == [5, 3, 4]  # positions 6, 4, 5


def test_score_of_one_query_is_its_softmax():
    query, keys = draw(1, 1, 1, 8), draw(1, 1, 5, 8)[:, :, ::-1]
    score = reference.snapkv_score(query, keys, np.array([5]))
    weights = torch.softmax(torch.tensor(keys[0, 0] @ query[0, 0, 0] / 8**0.5), 0).numpy()
    assert np.allclose(score[0, 0], [*weights[:4], 0])


def test_compaction_moves_kept_rows_to_the_front():
    keys = np.arange(6.0).reshape(1, 1, 6, 1)
    moved, _ = reference.kv_compact(keys, keys, np.array([[[1, 3, 5, -1]]]))
    assert moved[0, 0, :, 0].tolist() == [1, 3, 5, 3, 4, 5]

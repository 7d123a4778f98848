"""The reference itself, against answers that need no reference."""

import devices
import numpy as np
import pytest
import torch
from attention_matrix import MatrixCase, sequence_rows
from matrix_oracle import oracle
from tolerances import FLOAT64

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
    assert np.allclose(output, expected[0].transpose(0, 1).numpy(), rtol=0, atol=FLOAT64)
    scores = q[0] @ k[0].repeat_interleave(2, 0).mT / 8**0.5
    masked = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    assert np.allclose(lse, masked.logsumexp(-1).numpy(), rtol=0, atol=FLOAT64)


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


@pytest.mark.parametrize(("window", "sink"), [(-1, 0), (8, 0), (8, 3), (1, 20)])
def test_the_matrixs_oracle_is_the_reference(window, sink):
    case = MatrixCase(window=window, sink=sink, group=4, head_size=64, length=40, chunks="whole", batch="one")
    rows = sequence_rows(case, np.dtype(np.float32), 0)
    keys, values = (np.swapaxes(x, 0, 1)[None] for x in (rows.key, rows.value))
    start = np.array([0, 40], np.int32)
    wanted = reference.swa_attention(rows.query, keys, values, start, NONE, window=window, sink=sink)
    for positions in (np.arange(40), np.array([0, 7, 8, 9, 39])):
        output, lse = oracle(case, rows, positions, np.float64)
        np.testing.assert_allclose(output, wanted[0][positions], rtol=0, atol=FLOAT64)
        np.testing.assert_allclose(lse, wanted[1][:, positions], rtol=0, atol=FLOAT64)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["cuda-float16", "cuda-bfloat16"])
@pytest.mark.parametrize("window", [-1, 32])
def test_the_matrixs_oracle_on_a_gpu_is_that_on_the_host(name, window):
    case = MatrixCase(window=window, sink=8, group=8, head_size=128, length=600, chunks="whole", batch="one")
    rows = sequence_rows(case, devices.TARGETS[name].element, 0)
    on_host = oracle(case, rows, np.arange(600), np.float64)
    with devices.using(devices.TARGETS[name]):
        on_gpu = oracle(case, rows, np.arange(600), np.float64)
    for got, wanted in zip(on_gpu, on_host, strict=True):
        np.testing.assert_allclose(got.get(), wanted, rtol=0, atol=FLOAT64)


@pytest.mark.parametrize("name", ["cpu-float32", pytest.param("cuda-float16", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("element", [np.dtype(np.float16), devices.BFLOAT16], ids=str)
def test_rounding_is_that_of_the_types(name, element):
    values = (draw(4096) * 2.0 ** np.arange(-8, 8).repeat(256)).astype(np.float32)
    wanted = values.astype(element).astype(np.float32)
    with devices.using(devices.TARGETS[name]):
        arrays = (
            devices.rounded(devices.widen(values, np.float32), element),
            devices.widen(values.astype(element), np.float32),
        )
        for array in arrays:
            np.testing.assert_array_equal(array if name.startswith("cpu") else array.get(), wanted)

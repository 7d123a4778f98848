"""CUDA decode merges partial sums by blocks or by warps, whichever takes less: to the same bits."""

import devices
import numpy as np
import pytest
from attention_cases import Feeds, Shape, assert_each_is_as_alone, draw_feeds, run_attention

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("cuda_target")]


def assert_same_when_told(shape: Shape, feeds: Feeds) -> None:
    """Only a step that is told how many tokens a sequence has at most knows that rows fit into one tile each."""
    told = {**feeds, "max_query_len": np.array([max(shape.tokens)], np.int32)}
    for actual, expected in zip(run_attention(shape, told), run_attention(shape, feeds), strict=True):
        devices.assert_same_bits(actual, expected)


def multiprocessors() -> int:
    import cupy

    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])


@pytest.mark.parametrize("options", [{}, {"window": 1100, "sink": 5}], ids=["all keys", "window"])
@pytest.mark.parametrize("lengths", ["short", "even", "random", "per head"])
@pytest.mark.parametrize(
    ("head_size", "group", "sequences", "capacity"),
    [(64, 16, 40, 18432), (96, 8, 80, 2304), (128, 8, 80, 4608), (128, 16, 40, 9216), (256, 16, 40, 4608)],
)
def test_one_token_of_many_sequences(head_size, group, sequences, capacity, lengths, options):
    """Up to nine spans of keys, whole or cut in up to three; some sequences have no token, one has all slots."""
    rng = np.random.default_rng(1)
    most = {"short": 600}.get(lengths, capacity - 1)
    past = [most] * sequences if lengths == "even" else rng.integers(0, most, sequences).tolist()
    tokens = [1] * sequences if lengths == "even" else [int(b % 9 != 4) for b in range(sequences)]
    shape = Shape(
        tokens=tokens,
        past=[most, *past[1:]],
        per_head_past=[[n] for n in past] if lengths == "per head" else None,
        heads=group,
        kv_heads=1,
        head_size=head_size,
        capacity=capacity,
        **options,
    )
    assert_same_when_told(shape, draw_feeds(shape))


@pytest.mark.parametrize("tokens", [2, 5, 16])
@pytest.mark.parametrize("head_size", [64, 128, 256, 512])
def test_a_few_tokens_of_many_sequences(head_size, tokens):
    rng = np.random.default_rng(2)
    counts = [tokens, *rng.integers(0, tokens + 1, 39).tolist()]
    shape = Shape(
        tokens=counts,
        past=rng.integers(0, 2304 - 16, 40).tolist(),
        heads=8,
        kv_heads=2,
        head_size=head_size,
        capacity=2304,
    )
    assert_same_when_told(shape, draw_feeds(shape))


@pytest.mark.parametrize("tokens", [3, 7, 16])  # rows of an entry: 12, 28, 64
@pytest.mark.parametrize("lengths", ["short", "even", "random"])
@pytest.mark.parametrize("sequences", [66, 132, 140, 200])
def test_pieces_of_whole_spans(sequences, lengths, tokens):
    """Where spans can be shared out evenly, a block's piece ends where one does: to the bits of a sequence alone."""
    capacity = {"short": 700, "even": 1000, "random": 2304}[lengths]
    most = capacity - tokens
    rng = np.random.default_rng(3)
    past = rng.integers(0, most, sequences).tolist() if lengths == "random" else [most] * sequences
    shape = Shape(tokens=[tokens] * sequences, past=past, heads=4, kv_heads=1, head_size=128, capacity=capacity)
    feeds = draw_feeds(shape) | {"max_query_len": np.array([tokens], np.int32)}
    assert_each_is_as_alone(shape, feeds, run_attention(shape, feeds), [0, sequences // 2, sequences - 1])


@pytest.mark.parametrize(
    "lengths",
    [(1000, 1000), (300, 300), (1, 1), (800, 1000), (1, 1000), (1025, 1025), (900, 1100)],
    ids=lambda lengths: f"{lengths[0]} to {lengths[1]}",
)
@pytest.mark.parametrize(("head_size", "kv_heads"), [(64, 2), (96, 1), (128, 1), (128, 3), (256, 2)])
@pytest.mark.parametrize("blocks", [0.95, 1, 1.02, 1.9, 2])
def test_blocks_of_whole_entries(blocks, head_size, kv_heads, lengths):
    """Where each sequence has one span of keys, of about the same length, a block has whole ones to itself."""
    sequences = round(blocks * multiprocessors() / kv_heads)
    past = np.random.default_rng(4).integers(lengths[0] - 1, lengths[1], sequences).tolist()
    shape = Shape(
        tokens=[1] * sequences,
        past=past,
        heads=4 * kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        capacity=lengths[1] + 100,
    )
    feeds = draw_feeds(shape)
    assert_each_is_as_alone(shape, feeds, run_attention(shape, feeds), [0, 1, sequences // 2, sequences - 1])


@pytest.mark.parametrize(
    ("head_size", "heads", "kv_heads", "past"),
    [(256, 36, 9, 65 * 512), (512, 8, 1, 8192 - 1), (512, 8, 1, 3 * 8192 + 70), (512, 8, 1, 4 * 8192 + 129)],
)
def test_more_spans_than_a_round_holds(head_size, heads, kv_heads, past):
    """Rows of 16 tokens are those of a token at a time, which other blocks merge, or those of a cluster.

    Spans have 512 keys, and 128 of heads with 512 elements; a round has 64 spans.
    """
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "capacity": past + 16}
    shape = Shape(tokens=[16], past=[past], **sizes)
    feeds = draw_feeds(shape)
    output, lse = run_attention(shape, feeds)
    for token in (0, 7, 15):
        one = Shape(tokens=[1], past=[past + token], **sizes)
        alone = {
            **feeds,
            "query": feeds["query"][token : token + 1],
            "query_start": np.array([0, 1], np.int32),
            "past_len": np.array([past + token], np.int32),
        }
        actual, actual_lse = run_attention(one, alone)
        devices.assert_same_bits(actual, output[token : token + 1])
        devices.assert_same_bits(actual_lse, lse[:, token : token + 1])

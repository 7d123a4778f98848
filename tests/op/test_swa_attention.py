"""SwaAttention through ONNX Runtime against the float64 reference."""

import dataclasses

import devices
import numpy as np
import pytest
from attention_cases import (
    Shape,
    attention_feeds,
    expected_attention,
    plain_attention,
    run_attention,
)
from tolerances import FLOAT32, FLOAT32_SUMS, assert_as_good_as_plain

WINDOW = 20
CHUNKS = {"1": 1, "W-1": WINDOW - 1, "W": WINDOW, "W+1": WINDOW + 1, "2W+3": 2 * WINDOW + 3}
HEAD_SIZES = (8, 24, 64, 72, 80, 96, 112, 128, 136, 192, 224, 256, 512)


pytestmark = pytest.mark.usefixtures("target")


def check(shape: Shape, seed: int = 0) -> None:
    feeds = attention_feeds(shape, seed)
    for actual, plain, expected in zip(
        run_attention(shape, feeds),
        plain_attention(shape, feeds),
        expected_attention(shape, feeds),
        strict=True,
    ):
        assert_as_good_as_plain(actual, plain, expected)


@pytest.mark.parametrize("sink", [0, 1, 8])
@pytest.mark.parametrize("past", [0, 7, WINDOW + 1, 150])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_window_grid(chunk, past, sink):
    check(Shape(tokens=[CHUNKS[chunk]], past=[past], window=WINDOW, sink=sink))


@pytest.mark.parametrize("past", [0, 3, 64, 130])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65])
def test_full_attention(tokens, past):
    check(Shape(tokens=[tokens], past=[past]))


@pytest.mark.parametrize(
    "tokens",
    [(17, 15), (33, 0, 0), (16, 16, 17), (0, 17, 17, 0), (64, 0, 1, 65, 17), (16,) * 4 + (17,) * 3, (1,) * 40],
)
def test_steps_of_few_tokens_reach_every_sequence(tokens):
    check(Shape(tokens=tokens, past=[9 * b for b in range(len(tokens))], head_size=64))
    check(Shape(tokens=tokens, past=[300 * b for b in range(len(tokens))], head_size=96))
    check(Shape(tokens=tokens, past=[9 * b for b in range(len(tokens))], head_size=128, window=WINDOW, sink=3))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_head_sizes(head_size, isa):
    check(Shape(tokens=[5, 1], past=[66, 3], head_size=head_size))
    check(Shape(tokens=[7], past=[150], head_size=head_size, window=WINDOW, sink=3))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_head_sizes_of_prompts(head_size):
    """More than 16 tokens; rows of the last tiles, of pages and at the wrap are copied one by one."""
    if devices.current() == "cpu":
        pytest.skip("the CPU kernels have one family for any number of tokens")
    check(Shape(tokens=[70, 5, 33], past=[0, 9, 130], head_size=head_size, heads=4, kv_heads=1, sink_logits=True))
    check(Shape(tokens=[40], past=[300], head_size=head_size, window=50, sink=3))
    check(Shape(tokens=[100], past=[300], head_size=head_size, window=50, sink=3))
    check(Shape(tokens=[90, 20], past=[60, 0], head_size=head_size, page_slots=16, options={"softcap": 20.0}))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
def test_grouped_heads(group, isa):
    check(Shape(tokens=[6], past=[70], heads=2 * group, window=WINDOW, sink=4))


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"scale": 1.5}, {"scale": 3.0, "softcap": 30.0}])
@pytest.mark.parametrize("sink_logits", [False, True])
@pytest.mark.parametrize("window", [-1, WINDOW])
def test_options(options, sink_logits, window, isa):
    check(Shape(tokens=[9, 4], past=[0, 90], window=window, sink=2, options=options, sink_logits=sink_logits))


def test_learned_sinks_of_any_size():
    shape = Shape(tokens=[5], past=[40], sink_logits=True)
    for logit in (-1e4, -80.0, 0.0, 80.0, 1e4):
        feeds = attention_feeds(shape) | {"sink_logits": np.full(4, logit, np.float32)}
        for actual, plain, expected in zip(
            run_attention(shape, feeds),
            plain_attention(shape, feeds),
            expected_attention(shape, feeds),
            strict=True,
        ):
            assert_as_good_as_plain(actual, plain, expected)


@pytest.mark.parametrize(("logit", "lse"), [(None, -np.inf), (-np.inf, -np.inf), (2.5, 2.5)])
def test_logits_of_minus_infinity_weigh_nothing(logit, lse):
    shape = Shape(tokens=[2, 1], past=[3, 70], sink_logits=logit is not None)
    feeds = attention_feeds(shape)
    feeds["query"] = np.ones_like(feeds["query"])
    feeds["key_cache"] = np.where(np.isnan(feeds["key_cache"]), np.nan, -np.inf).astype(devices.element())
    if logit is not None:
        feeds["sink_logits"] = np.full(4, logit, np.float32)
    output, got = run_attention(shape, feeds)
    assert not output.any()
    np.testing.assert_allclose(got, np.full((4, 3), lse), rtol=FLOAT32)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("hidden", [slice(0, 64), slice(64, 128), slice(0, 1030)])
def test_values_behind_logits_of_minus_infinity_stay_out(hidden, tokens):
    """All keys of a tile or of a span weigh nothing, and those around it do."""
    shape = Shape(tokens=[tokens], past=[1500])
    feeds = attention_feeds(shape)
    feeds["query"] = np.abs(feeds["query"])
    feeds["key_cache"][:, :, hidden, 0] = -np.inf
    for actual, plain, expected in zip(
        run_attention(shape, feeds),
        plain_attention(shape, feeds),
        expected_attention(shape, feeds),
        strict=True,
    ):
        assert_as_good_as_plain(actual, plain, expected)


@pytest.mark.parametrize("where", ["query", "key_cache"])
@pytest.mark.parametrize(("tokens", "past"), [(1, 70), (2, 3), (1, 2100), (40, 100)])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_nan_shows_in_all_that_sees_it(where, tokens, past, softcap):
    """Comparisons pass over NaN, so that a maximum alone would take it for nothing seen."""
    if devices.current() != "cpu":
        pytest.skip("a promise of the CPU kernels alone")
    shape = Shape(tokens=[tokens], past=[past], options={"softcap": softcap})
    feeds = attention_feeds(shape)
    seen = np.s_[0] if where == "query" else np.s_[:, :, 0]
    feeds[where][seen] = np.nan
    output, lse = run_attention(shape, feeds)
    rows = slice(0, 1) if where == "query" else slice(None)
    assert np.isnan(output[rows]).all()
    assert np.isnan(lse[:, rows]).all()
    assert np.isfinite(output[1:]).all() or where == "key_cache"


def test_a_learned_sink_of_minus_infinity_is_none():
    shape = Shape(tokens=[3], past=[70], sink_logits=True)
    feeds = attention_feeds(shape) | {"sink_logits": np.full(4, -np.inf, np.float32)}
    without = {name: array for name, array in feeds.items() if name != "sink_logits"}
    for actual, expected in zip(run_attention(shape, feeds), run_attention(shape, without), strict=True):
        assert np.array_equal(actual, expected)


def test_learned_sink_joins_once_however_the_keys_are_split():
    """Keys of zeros make every logit 0: the denominator is the count of keys plus one exp(0)."""
    shape = Shape(tokens=[1], past=[2100], heads=1, kv_heads=1, head_size=8, sink_logits=True)
    feeds = attention_feeds(shape) | {"sink_logits": np.zeros(1, np.float32)}
    feeds["key_cache"] = np.zeros_like(feeds["key_cache"])
    assert run_attention(shape, feeds)[1][0, 0] == pytest.approx(np.log(2102), abs=FLOAT32_SUMS)


@pytest.mark.parametrize("past", [1023, 1024, 1025, 2100])
@pytest.mark.parametrize("tokens", [1, 3])
def test_keys_across_spans(past, tokens, isa):
    check(Shape(tokens=[tokens], past=[past], heads=2, kv_heads=1, head_size=8))


@pytest.mark.parametrize("window", [64, 100, 1030])
def test_windows_across_tiles_and_spans(window):
    check(Shape(tokens=[3], past=[2000], window=window, sink=5, heads=2, kv_heads=1, head_size=8))


@pytest.mark.parametrize("capacity", [29, 31, 37, 63, 64, 65, 127])
@pytest.mark.parametrize("past", [28, 29, 57, 63, 64, 130])
def test_wrap_at_any_slot(capacity, past):
    check(Shape(tokens=[6], past=[past], window=WINDOW, sink=3, capacity=capacity, head_size=8))


@pytest.mark.parametrize(
    ("size", "window", "past"),
    [
        (64, 128, (300, 400, 5000, 5001, 5150)),
        (128, 128, (129, 700, 5000)),
        (256, 512, (511, 600, 5000, 32868)),  # the last: spans of two rounds
    ],
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_steps_in_rings_shorter_than_a_tile_or_a_little_longer_than_their_window(size, window, past, tokens):
    for after in past:
        shape = Shape(tokens=[tokens], past=[after], window=window, sink=4, capacity=window + 30, head_size=size)
        check(dataclasses.replace(shape, heads=16, kv_heads=2, sink_logits=True))


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("past", [255, 256, 1023, 2047, 4090, 4096])
def test_one_token_whose_blocks_hold_up_to_two_tiles_or_more(size, past):
    check(Shape(tokens=[1], past=[past], capacity=4608, heads=8, kv_heads=2, head_size=size))


@pytest.mark.parametrize("window", [-1, WINDOW])
def test_packed_batch_of_many_lengths(window):
    check(Shape(tokens=[3, 0, 1, 44, 0, 9], past=[0, 12, 101, 0, 0, 64], window=window, sink=2))


def test_no_tokens_at_all():
    output, lse = run_attention(shape := Shape(tokens=[0, 0], past=[3, 0]), attention_feeds(shape))
    assert output.shape == (0, 4, 16)
    assert lse.shape == (4, 0)


@pytest.mark.parametrize("window", [-1, WINDOW])
def test_lengths_per_kv_head(window):
    check(Shape(tokens=[3, 1], per_head_past=[[10, 75], [64, 0]], window=window, sink=2))


@pytest.mark.parametrize("page_slots", [16, 32])
@pytest.mark.parametrize(("window", "sink"), [(-1, 0), (WINDOW, 0), (WINDOW, 5)])
def test_paged_equals_contiguous_bit_for_bit(page_slots, window, sink):
    shape = Shape(tokens=[9, 1, 4], past=[0, 131, 70], window=window, sink=sink)
    paged = dataclasses.replace(shape, page_slots=page_slots)
    feeds, paged_feeds = attention_feeds(shape, 1), attention_feeds(paged, 1)
    assert np.array_equal(feeds["query"], paged_feeds["query"])
    for actual, expected in zip(run_attention(paged, paged_feeds), run_attention(shape, feeds), strict=True):
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize("page_slots", [3, 16])
@pytest.mark.parametrize("gone", [-1, 10**6])
def test_pages_that_no_query_sees_are_not_followed(page_slots, gone):
    """Pages past the last token are gone, and all of a sequence without tokens in this step.

    On the CPU those between sinks and window too; on a GPU whole tiles are copied.
    """
    shape = Shape(tokens=[4, 0], past=[200, 9], window=WINDOW, sink=5, capacity=230, page_slots=page_slots)
    feeds = attention_feeds(shape)
    clean = run_attention(shape, feeds)
    table = feeds["block_table"].copy()
    if devices.current() == "cpu":
        table[0, -(-5 // page_slots) : (200 - WINDOW + 1) // page_slots] = gone
    table[0, -(-204 // page_slots) :] = gone
    table[1] = gone
    for actual, expected in zip(run_attention(shape, feeds | {"block_table": table}), clean, strict=True):
        assert np.array_equal(actual, expected)


def uniform_lse(shape: Shape) -> np.ndarray:
    """Run with keys of zeros: the log-sum-exp of a query is the log of how many keys it sees, [Hq, T]."""
    feeds = attention_feeds(shape)
    feeds["key_cache"] = np.where(np.isnan(feeds["key_cache"]), np.nan, 0).astype(devices.element())
    return run_attention(shape, feeds)[1]


@pytest.mark.parametrize("sink", [0, 1, 8])
def test_window_counts_the_querys_own_key(sink):
    lse = uniform_lse(Shape(tokens=[60], past=[0], window=WINDOW, sink=sink, capacity=100))
    seen = [len({j for j in range(i + 1) if j > i - WINDOW or j < sink}) for i in range(60)]
    assert np.array_equal(np.rint(np.exp(lse[0])), seen)


def test_sinks_in_the_future_stay_hidden():
    """Tokens 3.. of the chunk are poisoned, among them sinks; queries 0..2 must not notice.

    Other queries of the chunk see them, and a matrix product multiplies what one query does not see by 0: the poison
    is NaN where rows are taken one by one, and finite on a GPU.
    """
    poison = np.nan if devices.current() == "cpu" else 1e4
    shape = Shape(tokens=[12], past=[0], window=4, sink=8, capacity=32)
    feeds = attention_feeds(shape)
    clean = run_attention(shape, feeds)
    poisoned = {**feeds, "key_cache": feeds["key_cache"].copy(), "value_cache": feeds["value_cache"].copy()}
    for name in ("key_cache", "value_cache"):
        poisoned[name][:, :, 3:] = poison
    output, lse = run_attention(shape, poisoned)
    assert np.array_equal(output[:3], clean[0][:3])
    assert np.array_equal(lse[:, :3], clean[1][:, :3])


def test_stale_slots_stay_hidden(isa):
    """Positions that the ring still holds but the window has left are poisoned."""
    shape = Shape(tokens=[3], past=[200], window=WINDOW, sink=3, capacity=90)
    feeds = attention_feeds(shape)
    clean = run_attention(shape, feeds)
    seen = {j for i in range(200, 203) for j in range(i + 1) if j > i - WINDOW or j < 3}
    seen_slots = {j if j < 3 else 3 + (j - 3) % 87 for j in seen}
    for name in ("key_cache", "value_cache"):
        feeds[name] = feeds[name].copy()
        feeds[name][:, :, [s for s in range(90) if s not in seen_slots]] = np.nan
    for actual, expected in zip(run_attention(shape, feeds), clean, strict=True):
        assert np.array_equal(actual, expected)


def test_values_follow_keys_across_the_jump_from_sinks_to_window(isa):
    """Each query copies the key of one visible position, so its output must be that position's value."""
    shape = Shape(
        tokens=[1], past=[300], heads=1, kv_heads=1, head_size=64, window=70, sink=70, options={"scale": 40.0}
    )
    feeds = attention_feeds(shape)
    for position in [*range(0, 70, 7), 69, *range(231, 301, 9)]:
        slot = position if position < 70 else 70 + (position - 70) % (shape.slots - 70)
        feeds["query"] = feeds["key_cache"][:, :, slot].copy()
        output, _ = run_attention(shape, feeds)
        assert np.allclose(output[0, 0], feeds["value_cache"][0, 0, slot], atol=FLOAT32), position


def test_offsets_past_two_to_the_31_elements():
    """The pool is mapped, not touched: only the rows of its last page are ever written or read."""
    page_elements = 1 << 16
    pages = (1 << 31) // page_elements + 3
    pools = [np.zeros((pages, 1, 1024, 64), np.float16) for _ in range(2)]
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 1, 1, 40, 64)).astype(np.float16)
    for pool, source in zip(pools, rows, strict=True):
        pool[pages - 1, :, :40] = source[0]
    shape = Shape(
        tokens=[4],
        past=[36],
        heads=2,
        kv_heads=1,
        head_size=64,
        capacity=1024,
        page_slots=1024,
        dtype=np.float16,
    )
    feeds = {
        "query": rng.standard_normal((4, 2, 64)).astype(np.float16),
        "query_start": np.array([0, 4], np.int32),
        "past_len": np.array([36], np.int32),
        "key_cache": pools[0],
        "value_cache": pools[1],
        "block_table": np.array([[pages - 1]], np.int32),
    }
    small = {
        **feeds,
        "key_cache": pools[0][-1:],
        "value_cache": pools[1][-1:],
        "block_table": np.zeros((1, 1), np.int32),
    }
    for actual, expected in zip(run_attention(shape, feeds), run_attention(shape, small), strict=True):
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize("magnitude", [1e-4, 30.0, 1e4])
def test_logits_of_any_magnitude(magnitude, isa):
    shape = Shape(tokens=[6], past=[90], options={"scale": magnitude})
    output, lse = run_attention(shape, feeds := attention_feeds(shape))
    expected, expected_lse = expected_attention(shape, feeds)
    plain, plain_lse = plain_attention(shape, feeds)
    assert_as_good_as_plain(output, plain, expected)
    assert_as_good_as_plain(lse, plain_lse, expected_lse)

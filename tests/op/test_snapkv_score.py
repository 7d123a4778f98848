"""SnapKvScore through ONNX Runtime against the float64 reference."""

import devices
import numpy as np
import pytest
from attention_cases import run_cached
from tolerances import FLOAT32, LARGEST_FACTOR, assert_as_good_as_plain

from ortolan.custom_ops import reference

pytestmark = pytest.mark.usefixtures("target")


def draw(kv_len, *, rows=8, heads=4, kv_heads=2, size=16, slots=0, seed=0):
    """Draw captured queries and a key cache whose slots at and past kv_len hold NaN."""
    rng = np.random.default_rng(seed)
    lengths = np.array(kv_len, np.int32)
    slots = slots or max(int(lengths.max()), 1)
    keys = rng.standard_normal((len(lengths), kv_heads, slots, size)).astype(devices.element())
    per_head = np.broadcast_to(lengths.reshape(len(lengths), -1), (len(lengths), kv_heads))
    keys[np.arange(slots) >= per_head[..., None]] = np.nan
    capture = rng.standard_normal((len(lengths), rows, heads, size)).astype(devices.element())
    return {"capture": capture, "key_cache": keys, "kv_len": lengths}


def plain_score(feeds, *, group_reduce="mean", query_reduce="mean", scale=0.0, softcap=0.0):
    """Score in float32 NumPy, all captured queries of a head at once."""
    capture, pool = (feeds[k].astype(np.float32) for k in ("capture", "key_cache"))
    sequences, rows, _, size = capture.shape
    kv_heads = pool.shape[1]
    score = np.zeros((sequences, kv_heads, pool.shape[2]), np.float32)
    lengths = np.broadcast_to(feeds["kv_len"].reshape(sequences, -1), (sequences, kv_heads))
    for (b, h), length in np.ndenumerate(lengths):
        positions = np.arange(length - min(rows, length), length)
        if not len(positions):
            continue
        queries = capture[b, positions % rows].reshape(len(positions), kv_heads, -1, size)[:, h]
        z = np.einsum("ngd,kd->gnk", queries, pool[b, h, :length]) * np.float32(scale or size**-0.5)
        if softcap:
            z = np.float32(softcap) * np.tanh(z / np.float32(softcap))
        z = np.where(np.arange(length) <= positions[:, None], z, -np.inf)
        weights = np.exp(z - z.max(axis=-1, keepdims=True))
        of_heads = getattr(np, query_reduce)(weights / weights.sum(axis=-1, keepdims=True), axis=1)
        score[b, h, : positions[0]] = getattr(np, group_reduce)(of_heads, axis=0)[: positions[0]]
    return score


def check(feeds, **attributes):
    (actual,) = run_cached("SnapKvScore", feeds, **attributes)
    factor = LARGEST_FACTOR if attributes.get("query_reduce") == "max" else 1.0
    expected = reference.snapkv_score(**feeds, **attributes)
    assert_as_good_as_plain(actual, plain_score(feeds, **attributes), expected, factor=factor)
    return actual


@pytest.mark.parametrize("kv_len", [1, 7, 8, 9, 19, 64, 65, 72, 130])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_lengths_around_the_window_and_the_tile(kv_len, rows):
    check(draw([kv_len], rows=rows, slots=kv_len + 3))


@pytest.mark.parametrize("head_size", [8, 24, 64, 80, 96, 128, 256, 512])
def test_head_sizes(head_size, isa):
    check(draw([90], size=head_size))


@pytest.mark.parametrize(("size", "rows"), [(256, 320), (512, 300)])
def test_more_queries_than_one_block_can_hold(size, rows):
    check(draw([60], size=size, rows=rows, heads=64, kv_heads=1, slots=340))
    check(draw([rows + 3], size=size, rows=rows, heads=64, kv_heads=1))


@pytest.mark.parametrize("group_reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_group_reduce(group, group_reduce, isa):
    check(draw([100, 70], heads=2 * group), group_reduce=group_reduce)


@pytest.mark.parametrize("group_reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("size", [16, 64, 128, 256])
def test_the_largest_over_queries(size, group, group_reduce, isa):
    """Head sizes and groups of every kernel, with a window that fills the rows of none of them."""
    feeds = draw([100, 70, 0, 5], size=size, rows=33, heads=2 * group)
    check(feeds, query_reduce="max", group_reduce=group_reduce)


@pytest.mark.parametrize("rows", [1, 8, 64, 65, 130])
@pytest.mark.parametrize("kv_len", [64, 65, 131, 1100])
@pytest.mark.parametrize("size", [64, 128, 512])
def test_the_largest_over_queries_of_any_window_and_length(size, kv_len, rows):
    feeds = draw([kv_len], size=size, rows=rows, heads=4, slots=kv_len + 3)
    check(feeds, query_reduce="max", group_reduce="max", scale=0.3, softcap=15.0)


def test_the_largest_of_the_pieces_is_that_of_all_queries():
    """What single queries score, each at its own place, and their largest, is what they score together."""
    feeds = draw([200], rows=1, heads=2)
    many = draw([200], rows=4, heads=2, seed=1)
    feeds["key_cache"] = many["key_cache"]
    (together,) = run_cached("SnapKvScore", many, query_reduce="max", group_reduce="max")
    alone = []
    for position in range(196, 200):
        feeds["capture"] = many["capture"][:, position % 4 : position % 4 + 1]
        feeds["kv_len"] = np.array([position + 1], np.int32)
        alone.append(run_cached("SnapKvScore", feeds, query_reduce="max", group_reduce="max")[0][..., :196])
    np.testing.assert_allclose(together[..., :196], np.max(alone, axis=0), rtol=FLOAT32)


@pytest.mark.parametrize("size", [16, 64, 128])
def test_the_largest_of_equal_runs_has_equal_bits(size):
    feeds = draw([2500], size=size)
    (first,) = run_cached("SnapKvScore", feeds, query_reduce="max")
    for _ in range(3):
        assert np.array_equal(run_cached("SnapKvScore", feeds, query_reduce="max")[0], first)


@pytest.mark.parametrize("attributes", [{"scale": 1.5}, {"softcap": 2.0}, {"scale": 4.0, "softcap": 20.0}])
def test_scale_and_softcap(attributes, isa):
    check(draw([90]), **attributes)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("rows", [1, 33, 64, 65])
@pytest.mark.parametrize("size", [64, 128])
def test_groups_and_windows_of_common_head_sizes(size, rows, group):
    check(draw([127, 300, 1], size=size, rows=rows, heads=group, kv_heads=1, slots=301), group_reduce="max")


@pytest.mark.parametrize("kv_len", [63, 64, 65, 128, 192, 193, 2500])
@pytest.mark.parametrize("size", [64, 128])
def test_lengths_around_tiles_of_common_head_sizes(size, kv_len):
    check(draw([kv_len], size=size, rows=64, heads=8, slots=kv_len + 5), scale=0.3, softcap=15.0)


def test_batch_of_many_lengths():
    check(draw([3, 0, 100, 8, 64]))
    check(draw([3, 0, 100, 8, 64], size=64))


def test_lengths_per_kv_head():
    check(draw([[3, 100], [64, 0]]))


@pytest.mark.parametrize("kv_len", [1023, 1024, 1025, 2100])
def test_spans(kv_len, isa):
    check(draw([kv_len], size=8, heads=2, kv_heads=1))


@pytest.mark.parametrize("rows", [8, 32])
def test_window_and_empty_positions_score_zero(rows):
    actual = check(draw([50, 20], rows=rows, slots=70))
    for sequence, length in enumerate([50, 20]):
        scored = max(length - rows, 0)
        assert (actual[sequence, :, scored:] == 0).all()
        assert (actual[sequence, :, :scored] > 0).all()


def test_a_row_belongs_to_the_position_with_its_remainder():
    """Only the newest query has weight on key 2; it lies in row (kv_len - 1) mod Wq, wherever that is."""
    for kv_len in (20, 21, 27):
        feeds = draw([kv_len], rows=8, heads=1, kv_heads=1)
        feeds["capture"][:] = 0
        row = (kv_len - 1) % 8
        feeds["capture"][0, row, 0] = feeds["key_cache"][0, 0, 2] * 50
        actual = check(feeds)
        assert actual[0, 0, 2] > 1 / 8
        assert actual[0, 0, 2] < 1 / 8 + 1 / (kv_len - 8)


def test_every_query_sees_its_own_key_and_no_later_one():
    """With keys of zeros a query's probability is one over the number of keys it sees."""
    feeds = draw([40], rows=8, heads=1, kv_heads=1)
    feeds["key_cache"][:] = 0
    (actual,) = run_cached("SnapKvScore", feeds)
    assert actual[0, 0, 0] == pytest.approx(np.mean([1 / (p + 1) for p in range(32, 40)]), rel=FLOAT32)


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("page_slots", [4, 16, 32])
def test_paged_equals_contiguous_bit_for_bit(page_slots, size):
    feeds = draw([96, 33], slots=96, size=size)
    pages = 96 // page_slots
    table = np.random.default_rng(1).permutation(2 * pages + 2)[: 2 * pages].reshape(2, pages).astype(np.int32)
    pool = np.full((2 * pages + 2, 2, page_slots, size), np.nan, devices.element())
    for (b, m), page in np.ndenumerate(table):
        pool[page] = feeds["key_cache"][b, :, m * page_slots : (m + 1) * page_slots]
    (contiguous,) = run_cached("SnapKvScore", feeds)
    (paged,) = run_cached("SnapKvScore", {**feeds, "key_cache": pool, "block_table": table})
    assert np.array_equal(paged, contiguous)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_equal_runs_give_equal_bits(size):
    feeds = draw([2500], size=size)
    (first,) = run_cached("SnapKvScore", feeds)
    for _ in range(5):
        assert np.array_equal(run_cached("SnapKvScore", feeds)[0], first)


@pytest.mark.parametrize("size", [16, 64, 128])
def test_a_sequence_alone_equals_it_in_a_batch(size):
    feeds = draw([200, 77, 30], size=size)
    (batch,) = run_cached("SnapKvScore", feeds)
    for b in range(3):
        (alone,) = run_cached("SnapKvScore", {k: v[b : b + 1] for k, v in feeds.items()})
        assert np.array_equal(alone[0], batch[b])


def test_probabilities_of_one_query_sum_to_less_than_one():
    """What is missing from 1 is the weight on the window itself."""
    feeds = draw([300], rows=1, heads=2, kv_heads=2)
    (actual,) = run_cached("SnapKvScore", feeds)
    assert (actual.sum(axis=-1) < 1).all()
    assert (actual.sum(axis=-1) > 0.9).all()

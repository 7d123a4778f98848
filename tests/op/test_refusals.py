"""Every rule of the operators that can be broken is refused, by node, port and rule."""

import devices
import numpy as np
import pytest
from harness import attention_inputs, empty_caches, open_session, random_batch, run_op

BATCH = random_batch(np.random.default_rng(0), [4, 2], [0, 3])


def attention(**changes):
    caches = [np.zeros_like(c) for c in empty_caches(2, 2, 32, 16)]
    return {**attention_inputs(BATCH, caches), **changes}


def append(**changes):
    feeds = attention(**{k: v for k, v in changes.items() if k not in ("key", "value")})
    del feeds["query"]
    return {"key": BATCH.key, "value": BATCH.value, **feeds, **changes}


ATTENTION_INPUTS = {
    "S + window W": (attention(), {"window": 30, "sink": 4}),
    "more than capacity": (attention(past_len=np.array([40, 0], np.int32)), {}),
    "'query_start' must rise": (attention(query_start=np.array([0, 5, 4], np.int32)), {}),
    "at least 0": (attention(past_len=np.array([-1, 0], np.int32)), {}),
    "past_len' has shape": (attention(past_len=np.zeros(3, np.int32)), {}),
    "multiple of 8": (
        attention(
            query=BATCH.query[..., :12],
            **dict.fromkeys(("key_cache", "value_cache"), np.zeros((2, 2, 32, 12), np.float32)),
        ),
        {},
    ),
    "multiple of Hkv": (attention(query=BATCH.query[:, :3]), {}),
    "value_cache' has shape": (attention(value_cache=np.zeros((2, 2, 31, 16), np.float32)), {}),
    "names page 9": (attention(block_table=np.full((2, 1), 9, np.int32)), {}),
    "names page -1": (attention(block_table=np.full((2, 1), -1, np.int32)), {}),
    "capacity C = 64 must be between 1 and M * P = 32": (attention(), {"capacity": 64}),
    "N >= B": (
        attention(**dict.fromkeys(("key_cache", "value_cache"), np.zeros((1, 2, 32, 16), np.float32))),
        {},
    ),
    "sink_logits' has shape": (attention(sink_logits=np.zeros(3, np.float32)), {}),
    "prefix_end' has shape": (attention(prefix_end=np.zeros(3, np.int32)), {}),
    "'prefix_end' holds -1": (attention(prefix_end=np.array([0, -1], np.int32)), {}),
    "needs causal = 1": (attention(prefix_end=np.zeros(2, np.int32)), {"causal": 0}),
    "need the prefix's first ones": (
        attention(past_len=np.array([40, 0], np.int32), prefix_end=np.array([41, 0], np.int32)),
        {"window": 8},
    ),
    "'max_query_len' is -2; it must be at least 0": (attention(max_query_len=np.array([-2], np.int32)), {}),
    "'max_query_len' has shape [2]; expected [1]": (attention(max_query_len=np.array([9, 9], np.int32)), {}),
    "'max_query_len' has shape []; expected [1]": (attention(max_query_len=np.array(9, np.int32)), {}),
    "sequence 0 has 4 tokens in the step, more than input 'max_query_len' = 3; it must be at least the most tokens": (
        attention(max_query_len=np.array([3], np.int32)),
        {},
    ),
}


@pytest.mark.parametrize("message", ATTENTION_INPUTS)
def test_attention_refuses_inputs(message):
    feeds, attributes = ATTENTION_INPUTS[message]
    with pytest.raises(Exception, match="INVALID_ARGUMENT") as error:
        run_op("SwaAttention", feeds, **attributes)
    assert message in str(error.value)
    assert "test/SwaAttention" in str(error.value)


def test_attention_refuses_a_bound_of_another_type():
    with pytest.raises(Exception, match=r"max_query_len|tensor\(int64\)") as error:
        run_op("SwaAttention", attention(max_query_len=np.array([4], np.int64)))
    assert "test/SwaAttention" in str(error.value)


def test_attention_refuses_a_chunk_that_overwrote_its_window():
    feeds = attention(past_len=np.array([40, 0], np.int32))
    with pytest.raises(Exception, match=r"C must be at least S \+ W - 1 \+ T_b = 33"):
        run_op("SwaAttention", feeds, window=30)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"window": 0}, "window W = 0"),
        ({"window": -2}, "window W = -2"),
        ({"sink": -1}, "sink S = -1"),
        ({"capacity": -5}, "capacity C = -5"),
        ({"capacity": 10, "window": 8, "sink": 4}, "capacity C = 10"),
        ({"capacity": 4, "sink": 4}, "capacity C = 4 must be more than sink S = 4"),
        ({"scale": -1.0}, "scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"causal": 2}, "causal = 2 is not allowed; allowed: 0 or 1"),
        ({"causal": -1}, "causal = -1"),
    ],
)
def test_attributes_are_refused_when_the_session_is_made(attributes, message):
    with pytest.raises(Exception, match="test/SwaAttention") as error:
        open_session("SwaAttention", attention(), attributes)
    assert message in str(error.value)


def test_score_refuses_reductions_and_lengths():
    feeds = {
        "capture": np.zeros((1, 4, 4, 16), np.float32),
        "key_cache": np.zeros((1, 2, 32, 16), np.float32),
        "kv_len": np.array([33], np.int32),
    }
    with pytest.raises(Exception, match="allowed: 'mean', 'max' or 'sum'"):
        open_session("SnapKvScore", feeds, {"group_reduce": "median"})
    with pytest.raises(Exception, match="more than the cache's capacity"):
        run_op("SnapKvScore", feeds)


@pytest.mark.parametrize(("entry", "sink"), [(0, 4), (3, 4), (3, 0)])
def test_attention_refuses_a_page_that_some_query_sees(entry, sink):
    table = np.array([[0, 1, 2, 3], [4, 5, 6, 7]], np.int32)
    table[1, entry] = 8
    caches = dict.fromkeys(("key_cache", "value_cache"), np.zeros((8, 2, 16, 16), np.float32))
    feeds = attention(past_len=np.array([0, 54], np.int32), block_table=table, **caches)
    with pytest.raises(Exception, match=r"names page 8 for sequence 1; a page must be between 0 and N - 1 = 7"):
        run_op("SwaAttention", feeds, window=6, sink=sink)


@pytest.mark.parametrize(("past", "entry"), [(12, 3), (30, 0)])
def test_append_refuses_a_page_that_it_writes(past, entry):
    table = np.arange(8, dtype=np.int32).reshape(2, 4)
    table[0, entry] = -1
    caches = dict.fromkeys(("key_cache", "value_cache"), np.zeros((8, 2, 4, 16), np.float32))
    with pytest.raises(Exception, match="names page -1 for sequence 0"):
        run_op("RingKvAppend", append(past_len=np.array([past, 0], np.int32), block_table=table, **caches))


@pytest.mark.parametrize("keep", [[3, 2], [1, 1], [0, 32], [-1, 4], [-2, 3]])
def test_compaction_refuses_bad_lists(keep):
    cache = np.ones((1, 2, 32, 16), np.float32)
    feeds = {"key_cache": cache, "value_cache": cache, "keep": np.array([[keep]], np.int32)}
    with pytest.raises(Exception, match="must be strictly ascending and less than C = 32"):
        run_op("KvCompact", feeds)


@pytest.mark.parametrize("table", [[9, 1, 2], [0, 1, 9]])
def test_compaction_refuses_a_page_that_it_moves(table):
    cache = np.ones((3, 2, 16, 16), np.float32)
    feeds = {"key_cache": cache, "value_cache": cache, "keep": np.array([[[40]]], np.int32)}
    with pytest.raises(Exception, match="names page 9 for sequence 0"):
        run_op("KvCompact", feeds | {"block_table": np.array([table], np.int32)})


def test_append_refuses_sinks_that_fill_the_cache_and_other_shapes():
    with pytest.raises(Exception, match="must be more than sink S = 32"):
        run_op("RingKvAppend", append(), sink=32)
    with pytest.raises(Exception, match="input 'key' has shape"):
        run_op("RingKvAppend", append(key=BATCH.key[:, :1]))


def test_capture_refuses_another_batch():
    feeds = {
        "query": BATCH.query,
        "capture": np.zeros((3, 4, 4, 16), np.float32),
        "query_start": BATCH.query_start,
        "past_len": BATCH.past_len,
    }
    with pytest.raises(Exception, match="with B = 2"):
        run_op("SnapKvCapture", feeds)


def packed_feeds(operator):
    """Draw feeds of an operator that takes packed rows, in the element type of the target."""
    element = devices.element()
    batch = random_batch(np.random.default_rng(0), [4, 2], [0, 3])
    caches = dict(zip(("key_cache", "value_cache"), empty_caches(2, 2, 32, 16), strict=True))
    rows = {"query_start": batch.query_start, "past_len": batch.past_len}
    return {
        "SwaAttention": {"query": batch.query, **caches, **rows},
        "RingKvAppend": {"key": batch.key, "value": batch.value, **caches, **rows},
        "SnapKvCapture": {"query": batch.query, "capture": np.zeros((2, 4, 4, 16), element), **rows},
    }[operator]


PACKED = ["SwaAttention", "RingKvAppend", "SnapKvCapture"]


@pytest.mark.parametrize("operator", PACKED)
def test_tokens_of_no_sequence_are_refused_on_every_device(target, operator):
    feeds = packed_feeds(operator) | {"query_start": np.zeros(1, np.int32), "past_len": np.zeros(0, np.int32)}
    if "capture" in feeds:
        feeds["capture"] = feeds["capture"][:0]
    with pytest.raises(Exception, match=f"{operator} node") as error:
        run_op(operator, feeds)
    assert "'query_start' must rise from 0 to T = 6; it has 1 element, which means 0 sequences" in str(error.value)
    assert f"test/{operator}" in str(error.value)


@pytest.mark.parametrize("operator", PACKED)
def test_row_boundaries_that_are_none_are_refused_on_every_device(target, operator):
    feeds = packed_feeds(operator) | {"query_start": np.zeros(0, np.int32), "past_len": np.zeros(0, np.int32)}
    with pytest.raises(Exception, match=f"{operator} node") as error:
        run_op(operator, feeds)
    assert "'query_start' has shape [0]; expected [B+1] with B >= 0" in str(error.value)


def test_no_tokens_of_no_sequence_are_taken(target):
    feeds = packed_feeds("SwaAttention")
    empty = {"query": feeds["query"][:0], "query_start": np.zeros(1, np.int32), "past_len": np.zeros(0, np.int32)}
    output, lse = run_op("SwaAttention", feeds | empty)
    assert output.shape == (0, 4, 16)
    assert lse.shape == (4, 0)

"""A cache output never changes what others still read: constants, the caller's arrays, values with other readers.

ONNX Runtime plans buffers in the same way for each provider; here it plans them for the CPU.
"""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from harness import open_session

import ortolan.custom_ops
from ortolan.custom_ops import reference

LEVELS = (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
SHAPE = (1, 2, 16, 8)  # of the caches
ROWS = np.array([0, 3], np.int32)
PAST = np.array([4], np.int32)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


FEEDS = {"key": draw(3, 2, 8), "value": draw(3, 2, 8) + 1, "rows": ROWS, "past": PAST}


def run(body: str, outputs: str, *feeds: dict[str, np.ndarray], level=LEVELS[1]) -> list[np.ndarray]:
    """Run a graph in ONNX's text form once for each of the feeds, which are its inputs; returns the last results."""
    types = {np.dtype(np.float32): "float", np.dtype(np.int32): "int32", np.dtype(np.int64): "int64"}
    inputs = ", ".join(f"{types[v.dtype]}[{','.join(map(str, v.shape))}] {k}" for k, v in feeds[0].items())
    header = '<ir_version: 10, opset_import: ["" : 23, "ortolan" : 1]>'
    model = onnx.parser.parse_model(f"{header}\nshared ({inputs}) => ({outputs}) {body}")
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    ortolan.custom_ops.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for each in feeds:
        results = session.run(None, each)
    return results


def appended(cache: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return reference.ring_kv_append(rows, rows, cache, cache, ROWS, PAST)[0]


@pytest.mark.parametrize("level", LEVELS)
def test_equal_empty_caches_do_not_become_one(level):
    """ONNX Runtime merges nodes that compute the same."""
    body = """{
        empty_keys = ConstantOfShape(shape)
        empty_values = ConstantOfShape(shape)
        keys, values = ortolan.RingKvAppend(key, value, empty_keys, empty_values, rows, past)
        keys_out = Neg(keys)
        values_out = Neg(values)
    }"""
    feeds = FEEDS | {"shape": np.array(SHAPE, np.int64)}
    shape = ",".join(map(str, SHAPE))
    outputs = f"float[{shape}] keys_out, float[{shape}] values_out"
    for actual, rows in zip(run(body, outputs, feeds, level=level), (FEEDS["key"], FEEDS["value"]), strict=True):
        np.testing.assert_array_equal(actual, -appended(np.zeros(SHAPE, np.float32), rows))


@pytest.mark.parametrize("level", LEVELS)
def test_a_constant_cache_stays_constant(level):
    """A later run finds nothing of an earlier one."""
    zeros = ",".join(["0"] * int(np.prod(SHAPE)))
    body = f"""<float[1,2,16,8] cache = {{{zeros}}}> {{
        keys, values = ortolan.RingKvAppend(key, value, cache, cache, rows, past)
        sum = Add(keys, values)
    }}"""
    elsewhere = FEEDS | {"past": PAST + 5}
    result = run(body, "float[1,2,16,8] sum", elsewhere, FEEDS, level=level)[0]
    empty = np.zeros(SHAPE, np.float32)
    np.testing.assert_array_equal(result, appended(empty, FEEDS["key"]) + appended(empty, FEEDS["value"]))


@pytest.mark.parametrize("level", LEVELS)
def test_the_old_cache_can_be_read_later(level):
    body = """{
        keys, values = ortolan.RingKvAppend(key, value, key_cache, value_cache, rows, past)
        changed = Sub(keys, key_cache)
    }"""
    caches = {"key_cache": draw(*SHAPE), "value_cache": draw(*SHAPE)}
    before = {name: cache.copy() for name, cache in caches.items()}
    changed = run(body, "float[1,2,16,8] changed", FEEDS | caches, level=level)[0]
    np.testing.assert_array_equal(changed, appended(before["key_cache"], FEEDS["key"]) - before["key_cache"])
    for name, cache in caches.items():
        np.testing.assert_array_equal(cache, before[name])  # the caller's own


def test_compacted_and_captured_rows_leave_the_old_ones():
    body = """{
        kept, others = ortolan.KvCompact(key_cache, value_cache, keep)
        queries = ortolan.SnapKvCapture(query, capture, rows, past)
        moved = Sub(kept, key_cache)
        captured = Sub(queries, capture)
    }"""
    feeds = {
        "key_cache": draw(*SHAPE),
        "value_cache": draw(*SHAPE),
        "keep": np.array([[[2, 5]]], np.int32),
        "query": draw(3, 4, 8),
        "capture": draw(1, 4, 4, 8),
        "rows": ROWS,
        "past": PAST,
    }
    cache, captured = feeds["key_cache"], feeds["capture"]
    expected_moves = np.zeros(SHAPE, np.float32)
    expected_moves[:, :, :2] = cache[:, :, [2, 5]] - cache[:, :, :2]
    expected_rows = reference.snapkv_capture(feeds["query"], captured, ROWS, PAST) - captured
    moved, rows = run(body, "float[1,2,16,8] moved, float[1,4,4,8] captured", feeds)
    np.testing.assert_array_equal(moved, expected_moves)
    np.testing.assert_array_equal(rows, expected_rows)


@pytest.mark.parametrize("operator", ["RingKvAppend", "KvCompact"])
def test_caches_that_lie_in_one_buffer_are_refused(operator):
    feeds = {"key_cache": draw(*SHAPE), "value_cache": draw(*SHAPE)}
    if operator == "RingKvAppend":
        feeds = {"key": FEEDS["key"], "value": FEEDS["value"]} | feeds | {"query_start": ROWS, "past_len": PAST}
    else:
        feeds |= {"keep": np.array([[[2, 5]]], np.int32)}
    session = open_session(operator, feeds, {})
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in ("key_cache_out", "value_cache_out"):
        binding.bind_ortvalue_output(name, values["key_cache"])
    with pytest.raises(Exception, match=f"{operator} node"):
        session.run_with_iobinding(binding)
    both = ort.OrtValue.ortvalue_from_numpy(np.zeros(SHAPE, np.float32))
    for name in ("key_cache_out", "value_cache_out"):
        binding.bind_ortvalue_output(name, both)
    with pytest.raises(Exception, match="'key_cache_out' and 'value_cache_out' share a buffer"):
        session.run_with_iobinding(binding)

"""The result never depends on binding: an output that would lie over what its node still reads is refused."""

import itertools

import numpy as np
import onnxruntime as ort
import pytest
from harness import open_session, output_types
from recurrent_cases import DeltaCase, delta_tokens, fresh_states

rng = np.random.default_rng(0)
CACHES = {name: rng.standard_normal((2, 2, 16, 8), np.float32) for name in ("key_cache", "value_cache")}
STEP = {"query_start": np.array([0, 2, 3], np.int32), "past_len": np.array([4, 0], np.int32)}
TABLE = {"block_table": np.array([[0], [1]], np.int32)}
ROWS = {name: rng.standard_normal((3, 2, 8), np.float32) for name in ("key", "value")}
TABLE_ROWS = np.array([2, 0], np.int32)
DELTA_STATES = fresh_states(DeltaCase()) | {"state_len": np.array([0, 0, 4], np.int32)}
QUERY = {"query": rng.standard_normal((3, 4, 8), np.float32)}
NODES = {
    "RingKvAppend": ROWS | CACHES | STEP | TABLE,
    "SwaAttention": QUERY | CACHES | STEP | TABLE,
    "SnapKvCapture": QUERY | {"capture": np.zeros((2, 4, 4, 8), np.float32)} | STEP,
    "SnapKvScore": {
        "capture": rng.standard_normal((2, 4, 4, 8), np.float32),
        "key_cache": CACHES["key_cache"],
        "kv_len": np.array([16, 9], np.int32),
    }
    | TABLE,
    "KvSelect": {"score": rng.random((2, 2, 16), np.float32), "kv_len": np.array([[16, 9], [3, 0]], np.int32)}
    | {name: np.array([size], np.int64) for name, size in (("budget", 8), ("window", 2), ("sink", 1))},
    "CausalConv": {
        "x": rng.standard_normal((3, 8), np.float32),
        "weight": rng.standard_normal((8, 4), np.float32),
        "conv_state": rng.standard_normal((2, 19, 8), np.float32),
    }
    | STEP,
    "GatedDeltaRule": delta_tokens(DeltaCase(), 3) | DELTA_STATES | STEP | {"state_slot": TABLE_ROWS},
    "KvCompact": CACHES | {"keep": np.array([[[1, 5, 9]], [[0, 2, -1]]], np.int32)} | TABLE,
}
PAIRS = [
    (operator, output, source)
    for operator, feeds in NODES.items()
    for output, source in itertools.product(output_types(operator, feeds, {}), feeds)
]


def bind_inside(session: ort.InferenceSession, feeds: dict[str, np.ndarray], output: str, source: str):
    """Bind an output, and an input to memory that begins 8 bytes later."""
    shape, dtype = output_types(operator_of(session), feeds, {})[output]
    size, begin = int(np.prod(shape)) * dtype.itemsize, 8
    memory = np.zeros(max(size, feeds[source].nbytes) + begin, np.uint8)
    inside = memory[begin : begin + feeds[source].nbytes].view(feeds[source].dtype).reshape(feeds[source].shape)
    inside[...] = feeds[source]
    binding = session.io_binding()
    for name, array in (feeds | {source: inside}).items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for name in output_types(operator_of(session), feeds, {}):
        if name == output:
            binding.bind_output(name, "cpu", 0, dtype, shape, memory.ctypes.data)
        else:
            binding.bind_output(name)
    return binding, inside


def operator_of(session: ort.InferenceSession) -> str:
    return next(name for name, feeds in NODES.items() if [each.name for each in session.get_inputs()] == list(feeds))


@pytest.mark.parametrize(("operator", "output", "source"), PAIRS)
def test_an_output_over_an_input_is_refused(operator, output, source):
    feeds = {name: array.copy() for name, array in NODES[operator].items()}
    session = open_session(operator, feeds, {})
    binding, inside = bind_inside(session, feeds, output, source)
    with pytest.raises(Exception, match=rf"{operator} node (.|\n)*'{output}' shares the buffer of input '{source}'"):
        session.run_with_iobinding(binding)
    np.testing.assert_array_equal(inside, NODES[operator][source])


@pytest.mark.parametrize("operator", ["RingKvAppend", "KvCompact", "SnapKvCapture"])
def test_integers_inside_a_cache_that_is_written_in_place_are_refused(operator):
    """The cache is bound to its own buffer, as it should be; an input's integers lie in that buffer, too."""
    feeds = {name: array.copy() for name, array in NODES[operator].items()}
    cache, integers = {
        "RingKvAppend": ("key_cache", "past_len"),
        "KvCompact": ("value_cache", "keep"),
        "SnapKvCapture": ("capture", "query_start"),
    }[operator]
    words = feeds[cache].reshape(-1).view(np.int32)[: feeds[integers].size]
    words[:] = feeds[integers].reshape(-1)
    feeds[integers] = words.reshape(feeds[integers].shape)
    session = open_session(operator, feeds, {})
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for name, (shape, dtype) in output_types(operator, feeds, {}).items():
        array = feeds[name.removesuffix("_out")]
        binding.bind_output(name, "cpu", 0, dtype, shape, array.ctypes.data)
    with pytest.raises(Exception, match=rf"'{cache}_out' shares the buffer of input '{integers}'"):
        session.run_with_iobinding(binding)


@pytest.mark.parametrize(
    ("operator", "first", "second"), [("SwaAttention", "output", "lse"), ("KvSelect", "keep", "kept_len")]
)
def test_two_outputs_in_one_buffer_are_refused(operator, first, second):
    feeds = NODES[operator]
    session = open_session(operator, feeds, {})
    binding, memory = session.io_binding(), np.zeros(4096, np.uint8)
    for name, array in feeds.items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for place, (name, (shape, dtype)) in enumerate(output_types(operator, feeds, {}).items()):
        binding.bind_output(name, "cpu", 0, dtype, shape, memory[place * 4 :].ctypes.data)
    with pytest.raises(Exception, match=f"outputs '{first}' and '{second}' share a buffer"):
        session.run_with_iobinding(binding)

"""A cache may pass 2^31 elements: offsets are 64-bit in every operator that has one."""

import resource

import numpy as np
import onnxruntime as ort
import pytest
from attention_cases import Shape, expected_attention, plain_attention
from harness import open_session
from tolerances import assert_as_good_as_plain

HEAD_SIZE = 256
FIRST_FAR_SLOT = 2**31 // HEAD_SIZE  # the row that starts at element 2^31
SLOTS = FIRST_FAR_SLOT + 8


@pytest.fixture
def far_caches():
    """Two float16 caches [1, 1, SLOTS, 256]; their memory is only taken where a test touches it."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < 2**35:
        pytest.skip(f"the address space is limited to {limit} bytes, less than two caches of 4 GiB need")
    try:
        caches = [np.zeros((1, 1, SLOTS, HEAD_SIZE), np.float16) for _ in range(2)]
    except MemoryError:
        pytest.skip("this machine does not reserve memory that is not yet touched")
    return dict(zip(("key_cache", "value_cache"), caches, strict=True))


def run_bound(name: str, feeds: dict[str, np.ndarray], aliases: dict[str, str], **attributes: int) -> dict:
    """Run without copying an input; `aliases` binds outputs to the buffers of inputs."""
    session = open_session(name, feeds, attributes)
    binding = session.io_binding()
    values = {k: ort.OrtValue.ortvalue_from_numpy(v) for k, v in feeds.items()}
    for key, value in values.items():
        binding.bind_ortvalue_input(key, value)
    outputs = [output.name for output in session.get_outputs()]
    for output in outputs:
        if output in aliases:
            binding.bind_ortvalue_output(output, values[aliases[output]])
        else:
            binding.bind_output(output)
    session.run_with_iobinding(binding)
    results = dict(zip(outputs, binding.get_outputs(), strict=True))
    return {k: v.numpy() for k, v in results.items() if k not in aliases}


IN_PLACE = {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}


def test_append_attention_and_compaction_past_two_to_the_31(far_caches):
    rng = np.random.default_rng(0)
    rows = {k: rng.standard_normal((6, 1, HEAD_SIZE)).astype(np.float16) for k in ("key", "value", "query")}
    past = FIRST_FAR_SLOT - 2
    lengths = {"query_start": np.array([0, 6], np.int32), "past_len": np.array([past], np.int32)}
    append = {"key": rows["key"], "value": rows["value"], **far_caches, **lengths}
    run_bound("RingKvAppend", append, IN_PLACE)
    for cache, row in (("key_cache", "key"), ("value_cache", "value")):
        np.testing.assert_array_equal(far_caches[cache][0, 0, past : past + 6], rows[row][:, 0])
        assert not far_caches[cache][0, 0, past + 6 :].any()
        assert not far_caches[cache][0, 0, :8].any(), "an offset was truncated to 32 bits"

    attend = {"query": rows["query"], **far_caches, **lengths}
    output = run_bound("SwaAttention", attend, {}, window=3)["output"]
    near = {k: v[:, :, past - 2 :].copy() for k, v in far_caches.items()}  # the same step, two positions long
    start = {"query_start": lengths["query_start"], "past_len": np.array([2], np.int32)}
    feeds = {"query": rows["query"], **near, **start}
    shape = Shape(tokens=(6,), past=(2,), heads=1, kv_heads=1, head_size=HEAD_SIZE, window=3, capacity=10)
    expected = expected_attention(shape, feeds)[0]
    assert_as_good_as_plain(output, plain_attention(shape, feeds)[0], expected)

    keep = np.array([[[past + 1, past + 2, past + 4]]], np.int32)
    run_bound("KvCompact", {**far_caches, "keep": keep}, IN_PLACE)
    for cache, row in (("key_cache", "key"), ("value_cache", "value")):
        np.testing.assert_array_equal(far_caches[cache][0, 0, :3], rows[row][[1, 2, 4], 0])

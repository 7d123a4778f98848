"""Numbers that the library is asked for, and structures that it shares with Python."""

import ctypes
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ortolan.custom_ops import library_info
from ortolan.custom_ops.library import checked_structure
from ortolan.custom_ops.queries import DecodeScratchQuery, decode_scratch_bytes
from ortolan.errors import ConfigError, OpLibraryError

H200, RTX_4090 = 232448, 101376  # shared memory of a block
needs_cuda_build = pytest.mark.skipif(
    "cuda" not in library_info().providers, reason="the operator library was built without CUDA kernels"
)


def make_query(**changes):
    llama = {"dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8, "head_size": 128, "capacity": 131072}
    step = {"max_sequences": 128, "max_tokens": 512, "shared_bytes_per_block": H200}
    return DecodeScratchQuery(**(llama | step | changes))


@needs_cuda_build
def test_many_long_sequences_are_counted_to_the_byte():
    rows = 8 * (512 * 4 + 128 * 12)  # of tokens, and what the last of a sequence's tiles of 16 lacks
    spans = (131072 // 128 + 4) // 8 + 4
    cut_spans = 132 * 8 * 16  # rows of spans that two blocks share
    tables = (4 * (8 * 224 + 1 + 224 + 128) + 255) // 256 * 256
    query = make_query(num_multiprocessors=132, compute_capability=80)
    assert decode_scratch_bytes(query) == (rows * spans + cut_spans) * 130 * 4 + tables


@needs_cuda_build
@settings(max_examples=300, deadline=None)
@given(
    group=st.integers(1, 40),
    kv_heads=st.sampled_from([1, 2, 8]),
    head_size=st.sampled_from([64, 96, 128, 256, 512]),
    sequences=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    tokens=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    shared_bytes=st.sampled_from([H200, RTX_4090]),
)
@example(group=4, kv_heads=8, head_size=128, sequences=(254, 318), tokens=(4675, 6830), shared_bytes=H200)
@example(group=3, kv_heads=1, head_size=96, sequences=(1791, 2801), tokens=(22878, 32163), shared_bytes=H200)
def test_the_largest_step_has_room_for_every_smaller_one(group, kv_heads, head_size, sequences, tokens, shared_bytes):
    """The answer for a step counts that step itself, so a larger answer for larger steps covers it."""

    def ask(most_sequences, most_tokens):
        heads = {"num_heads": group * kv_heads, "num_kv_heads": kv_heads, "head_size": head_size, "capacity": 4096}
        step = {"max_sequences": most_sequences, "max_tokens": most_tokens, "shared_bytes_per_block": shared_bytes}
        return decode_scratch_bytes(make_query(**heads, **step))

    assert ask(min(sequences), min(tokens)) <= ask(max(sequences), max(tokens))


@needs_cuda_build
def test_float32_needs_none_and_rings_little():
    assert decode_scratch_bytes(make_query(dtype="float32")) == 0
    ring = decode_scratch_bytes(make_query(capacity=1536, window=1024))
    assert 0 < ring < decode_scratch_bytes(make_query()) / 10
    assert decode_scratch_bytes(make_query(shared_bytes_per_block=RTX_4090)) > decode_scratch_bytes(make_query())


@pytest.mark.skipif("cuda" in library_info().providers, reason="the operator library has CUDA kernels")
def test_a_library_without_cuda_kernels_cannot_answer():
    with pytest.raises(OpLibraryError, match="has no CUDA kernels; install a CUDA build"):
        decode_scratch_bytes(make_query())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float32, float16, bfloat16"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1; it must be at least 1"),
        ({"num_heads": 12}, "num_heads is 12; it must be a multiple of 8 kv heads"),
    ],
)
def test_what_no_layer_has_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_query(**changes)


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int64), ("second", ctypes.c_int64))


class SizeFunction:
    """A function of a library as ctypes gives it: types may be set, and a call returns a number."""

    def __init__(self, size):
        self.size = size

    def __call__(self):
        return self.size


def test_structures_of_another_size_are_refused():
    assert checked_structure(SimpleNamespace(pair_bytes=SizeFunction(16)), "pair_bytes", Pair) is Pair
    with pytest.raises(OpLibraryError, match="Pair has 16 bytes in Python and 24 in the operator library"):
        checked_structure(SimpleNamespace(pair_bytes=SizeFunction(24)), "pair_bytes", Pair)
    with pytest.raises(OpLibraryError, match="no function pair_bytes; reinstall"):
        checked_structure(SimpleNamespace(), "pair_bytes", Pair)

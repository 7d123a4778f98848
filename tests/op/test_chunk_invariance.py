"""A token's attention has the same bits however its prompt was cut and whatever shares its batch.

On CUDA 16-bit types have three families of kernels, chosen by how many tokens a sequence has in a step; within each the
bits are the same.
"""

import itertools
from dataclasses import dataclass, field

import devices
import numpy as np
import pytest
from attention_cases import run_cached
from harness import empty_caches
from hypothesis import given, settings
from hypothesis import strategies as st


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One attention layer: its sizes, and the attributes of its two operators."""

    window: int = -1
    sink: int = 0
    capacity: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    dtype: np.dtype = field(default_factory=devices.element)


# On CUDA decode takes a sequence with at most so many tokens, and the kernels of short chunks one with at most so many.
DECODE_TOKENS, SHORT_TOKENS = 16, 64


def families(layer: Layer) -> dict[str, tuple[int, int]]:
    """Return sizes of chunks, smallest and largest, that one family takes, up to what the layer's ring allows."""
    if devices.current() == "cpu" or devices.element() == np.float32:
        return {"all": (1, 43)}
    some = {"decode": (1, DECODE_TOKENS), "few": (DECODE_TOKENS + 1, 43)}
    return some | {"prefill": (SHORT_TOKENS + 1, 2 * SHORT_TOKENS)} if layer.capacity >= 512 else some


pytestmark = pytest.mark.usefixtures("target")


def draw_prompt(layer: Layer, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw the queries [T, Hq, D], keys and values [T, Hkv, D] of one prompt."""
    rng = np.random.default_rng(seed)
    heads = {"query": layer.heads, "key": layer.kv_heads, "value": layer.kv_heads}
    return {k: rng.standard_normal((tokens, n, layer.head_size)).astype(layer.dtype) for k, n in heads.items()}


class Cache:
    """The caches of a batch, advanced step by step through RingKvAppend and SwaAttention."""

    def __init__(self, layer: Layer, sequences: int = 1) -> None:
        self.layer = layer
        self.past = np.zeros(sequences, np.int32)
        self.pools = empty_caches(sequences, layer.kv_heads, layer.capacity, layer.head_size, layer.dtype)

    def step(self, rows: list[dict[str, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Feed one chunk per sequence; returns output [T_b, Hq, D] and lse [Hq, T_b] of each."""
        counts = [len(r["query"]) for r in rows]
        start = np.cumsum([0, *counts]).astype(np.int32)
        packed = {k: np.concatenate([r[k] for r in rows]) for k in ("query", "key", "value")}
        lengths = {"query_start": start, "past_len": self.past.copy()}
        caches = dict(zip(("key_cache", "value_cache"), self.pools, strict=True))
        append = {"key": packed["key"], "value": packed["value"], **caches, **lengths}
        self.pools = run_cached("RingKvAppend", append, sink=self.layer.sink)
        caches = dict(zip(("key_cache", "value_cache"), self.pools, strict=True))
        attend = {"query": packed["query"], **caches, **lengths}
        output, lse = run_cached("SwaAttention", attend, window=self.layer.window, sink=self.layer.sink)
        self.past += np.array(counts, np.int32)
        return [(output[a:b], lse[:, a:b]) for a, b in itertools.pairwise(start)]


def run_chunks(layer: Layer, prompt: dict[str, np.ndarray], chunks: list[int]) -> list[np.ndarray]:
    """Feed one prompt in chunks: output, lse, key cache, value cache."""
    cache, results, first = Cache(layer), [], 0
    assert sum(chunks) == len(prompt["query"])
    for count in chunks:
        results += cache.step([{k: v[first : first + count] for k, v in prompt.items()}])
        first += count
    return [
        np.concatenate([r[0] for r in results]),
        np.concatenate([r[1] for r in results], axis=1),
        *cache.pools,
    ]


def assert_same_bits(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(actual, expected, strict=True):
        devices.assert_same_bits(a, b)


def cut(tokens: int, chunk: int, smallest: int = 1) -> list[int]:
    """Cut into chunks of one size; the last may be shorter, but not than `smallest`."""
    chunks = [min(chunk, tokens - first) for first in range(0, tokens, chunk)]
    if chunks[-1] < smallest:
        rest = chunks[-2] + chunks[-1]
        chunks[-2:] = [rest] if rest < 2 * smallest else [rest - smallest, smallest]
    return chunks


def layers() -> dict[str, Layer]:
    """Return the layers to test, of the element type that is tested now."""
    return {
        "full": Layer(),
        "window": Layer(window=20),
        "ring": Layer(window=20, sink=3, capacity=23 + 42),
        "ring of whole tiles": Layer(window=20, capacity=128, head_size=64),
        "head size 24": Layer(window=33, sink=1, head_size=24, heads=6, kv_heads=1),
        "head size 8, groups of 8": Layer(heads=8, kv_heads=1, head_size=8),
        "head size 64": Layer(head_size=64),
        "head size 128, window": Layer(head_size=128, window=50, sink=5),
        "head size 80": Layer(head_size=80, heads=4, kv_heads=4),
        "head size 96, window": Layer(head_size=96, window=50, sink=5),
        "head size 192": Layer(head_size=192, heads=2, kv_heads=1),
        "head size 256": Layer(head_size=256, heads=2, kv_heads=1),
        "head size 512": Layer(head_size=512, heads=2, kv_heads=1),
        "head size 112": Layer(head_size=112),
        "head size 192, ring": Layer(head_size=192, heads=2, kv_heads=1, window=20, sink=3, capacity=23 + 42),
        "head size 512, groups of 8": Layer(head_size=512, heads=8, kv_heads=1),
    }


LAYER_NAMES = sorted(layers())


@pytest.mark.parametrize("name", LAYER_NAMES)
def test_any_fixed_chunk(name, isa):
    layer = layers()[name]
    prompt = draw_prompt(layer, 150)
    for smallest, largest in families(layer).values():
        expected = run_chunks(layer, prompt, cut(150, largest, smallest))
        for chunk in (1, 2, 7, 19, 20, 21, 38, 70):
            if smallest <= chunk <= largest:
                assert_same_bits(run_chunks(layer, prompt, cut(150, chunk, smallest)), expected)


def test_one_block_equals_one_by_one_across_spans():
    layer = Layer(capacity=2200, heads=2, kv_heads=1, head_size=8)
    prompt = draw_prompt(layer, 2200)
    whole = run_chunks(layer, prompt, [2200])
    assert_same_bits(run_chunks(layer, prompt, [1020, 1000, 180]), whole)
    if len(families(layer)) == 1:
        assert_same_bits(run_chunks(layer, prompt, [1020, *[1] * 8, 1000, *[1] * 172]), whole)


def test_decode_in_steps_equals_decode_at_once_across_spans():
    layer = Layer(capacity=1100, heads=4, kv_heads=1, head_size=64)
    prompt = draw_prompt(layer, 1100)
    at_once = run_chunks(layer, prompt, [1000, *[10] * 10])
    assert_same_bits(run_chunks(layer, prompt, [1000, *[1] * 100]), at_once)
    assert_same_bits(run_chunks(layer, prompt, [1000, *[4] * 25]), at_once)


@pytest.mark.parametrize("window", [512, 1024])
def test_a_long_context_in_a_ring_of_wide_heads(window):
    """The rings of Gemma 4: 9,216 tokens, of which the last 1,024 come one by one, 16 by 16, or in chunks."""
    layer = Layer(window=window, capacity=window + 1024, heads=2, kv_heads=1, head_size=256)
    prompt = draw_prompt(layer, 9216)
    decoded = [run_chunks(layer, prompt, [1024] * 8 + ways) for ways in ([1] * 1024, [DECODE_TOKENS] * 64)]
    read = [run_chunks(layer, prompt, ways) for ways in ([1024] * 9, [512] * 18)]
    assert_same_bits(decoded[0], decoded[1])
    assert_same_bits(read[0], read[1])
    if len(families(layer)) == 1:
        assert_same_bits(decoded[0], read[0])


@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 192, 256, 512])
@pytest.mark.parametrize("tokens", [2, 4, 8, 16])
def test_a_step_of_tokens_equals_as_many_steps_of_one(size, tokens):
    """What speculation verifies in one step has the bits of plain decoding: one tree of sums for 1 to 16 tokens."""
    layer = Layer(capacity=1200, heads=8, kv_heads=2, head_size=size)
    prompt = draw_prompt(layer, 1000 + tokens)
    at_once = run_chunks(layer, prompt, [1000, tokens])
    assert_same_bits(run_chunks(layer, prompt, [1000, *[1] * tokens]), at_once)


@pytest.mark.parametrize("window", [-1, 300])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_steps_of_few_tokens_are_cut_in_any_way(size, group, window):
    """However many query rows a kv head gets, and whatever kernel takes them, a token's bits stay."""
    sink = 4 if window > 0 else 0
    layer = Layer(window=window, sink=sink, capacity=1400, heads=group, kv_heads=1, head_size=size)
    prompt = draw_prompt(layer, 538)
    one_by_one = run_chunks(layer, prompt, [500, *[1] * 38])
    assert_same_bits(run_chunks(layer, prompt, [500, 2, 3, 4, 5, 8, 16]), one_by_one)
    assert_same_bits(run_chunks(layer, prompt, [500, 16, 7, 15]), one_by_one)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_few_tokens_of_many_kv_heads_after_a_long_context(size):
    """Too many tiles for a cluster each: a second kernel merges what the blocks have summed."""
    if devices.current() == "cpu":
        pytest.skip("the CPU has one kernel for any number of tokens")
    layer = Layer(capacity=2600, heads=32, kv_heads=16, head_size=size)
    prompt = draw_prompt(layer, 2534)
    one_by_one = run_chunks(layer, prompt, [2000, 500, *[1] * 34])
    assert_same_bits(run_chunks(layer, prompt, [2000, 500, 2, 4, 5, 7, 16]), one_by_one)


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[int, list[float]]:
    """Draw which family, and where in its range of sizes each chunk lies."""
    return draw(st.integers(0, 2)), draw(st.lists(st.floats(0, 1), min_size=3, max_size=40))


def chunks_of(tokens: int, smallest: int, largest: int, sizes: list[float]) -> list[int]:
    """Cut into chunks whose sizes lie in smallest .. largest, as drawn; `sizes` repeats."""
    chunks, left = [], tokens
    for size in itertools.cycle(sizes):
        chunk = smallest + round(size * (largest - smallest))
        if left <= largest or left - chunk < smallest:
            break
        chunks.append(chunk)
        left -= chunk
    return [*chunks, *cut(left, largest, smallest)]


@settings(max_examples=25, deadline=None)
@given(chunking=chunkings(), name=st.sampled_from(LAYER_NAMES), seed=st.integers(0, 3))
def test_any_chunking(chunking, name, seed):
    family, sizes = chunking
    layer = layers()[name]
    ranges = list(families(layer).values())
    smallest, largest = ranges[family % len(ranges)]
    prompt = draw_prompt(layer, 150, seed)
    expected = run_chunks(layer, prompt, cut(150, largest, smallest))
    assert_same_bits(run_chunks(layer, prompt, chunks_of(150, smallest, largest, sizes)), expected)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 43), min_size=2, max_size=5),
    steps=st.integers(1, 4),
    name=st.sampled_from(LAYER_NAMES),
)
def test_a_sequence_alone_equals_it_in_a_batch(lengths, steps, name):
    layer = layers()[name]
    batch, alone = Cache(layer, len(lengths)), [Cache(layer) for _ in lengths]
    for step in range(steps):
        counts = [length if step == 0 else (length + step * (b + 1)) % 3 for b, length in enumerate(lengths)]
        rows = [draw_prompt(layer, count, 100 * step + b) for b, count in enumerate(counts)]
        for together, cache, row in zip(batch.step(rows), alone, rows, strict=True):
            assert_same_bits(list(together), list(cache.step([row])[0]))
    for pool in range(2):
        assert_same_bits([c.pools[pool][0] for c in alone], list(batch.pools[pool]))


def test_threads_do_not_change_bits():
    """Decode of one sequence splits its keys over threads; 40 sequences at once do not."""
    layer = Layer(capacity=1100, heads=2, kv_heads=1, head_size=8)
    prompt = draw_prompt(layer, 1100)
    head, tail = ({k: v[s] for k, v in prompt.items()} for s in (slice(0, 1099), slice(1099, 1100)))
    alone = Cache(layer)
    alone.step([head])
    batch = Cache(layer, 40)
    batch.step([head] * 40)
    expected = alone.step([tail])[0]
    for result in batch.step([tail] * 40):
        assert_same_bits(list(result), list(expected))


@pytest.mark.parametrize(
    ("sequences", "size", "capacity", "kv_heads", "group"),
    [
        (24, 64, 4096, 8, 2),
        (24, 128, 2048, 8, 2),
        (24, 128, 1000, 8, 4),
        (24, 64, 2200, 2, 8),
        (24, 256, 900, 1, 4),
        (24, 128, 700, 1, 12),
        (40, 128, 300, 8, 16),
        (60, 64, 520, 8, 8),
    ],
)
def test_a_long_batch_equals_its_sequences_alone(sequences, size, capacity, kv_heads, group):
    """Decode cuts a batch's keys into one piece a multiprocessor, elsewhere than the keys of one sequence.

    Where a sequence alone has few tiles of keys, a cluster of blocks sums and combines each head's. Many sequences of
    many heads leave less shared memory for tiles of keys.
    """
    if devices.current() == "cpu" or devices.element() == np.float32:
        pytest.skip("only the 16-bit CUDA kernels cut by what the batch holds")
    rng = np.random.default_rng(0)
    history = rng.standard_normal((2, kv_heads, capacity, size), np.float32).astype(devices.element())
    keys, values = (np.stack([np.roll(h, b, axis=1) for b in range(sequences)]) for h in history)
    past = capacity - 1 - rng.integers(0, capacity // 4, sequences).astype(np.int32)
    query = rng.standard_normal((sequences, group * kv_heads, size)).astype(devices.element())

    def attend(first: int, end: int) -> list[np.ndarray]:
        start = np.arange(end - first + 1, dtype=np.int32)
        caches = {"key_cache": keys[first:end], "value_cache": values[first:end]}
        feeds = {"query": query[first:end], **caches, "query_start": start, "past_len": past[first:end]}
        return run_cached("SwaAttention", feeds, window=-1, sink=0)

    output, lse = attend(0, sequences)
    for _ in range(3):
        assert_same_bits(attend(0, sequences), [output, lse])
    for b in (0, 11, sequences - 1):
        assert_same_bits(attend(b, b + 1), [output[b : b + 1], lse[:, b : b + 1]])

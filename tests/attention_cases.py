"""Builds steps of attention whose caches went through the reference's append, and runs them everywhere."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import devices
import numpy as np
import onnxruntime as ort
from harness import build_model, empty_caches, open_session, run_session

import ortolan.custom_ops
from ortolan.custom_ops import reference

ISA_NAMES = ("plain", "avx2", "avx512", "avx512_vnni")


def limit_isa(name: str) -> bool:
    """Let the CPU kernels use at most this instruction set; False where the machine lacks it."""
    library = ctypes.CDLL(str(ortolan.custom_ops.library_path()))
    return bool(library.ortolan_limit_cpu_isa(ISA_NAMES.index(name)))


def unlimit_isa() -> None:
    """Let the CPU kernels use the best instruction set that the machine has."""
    assert any(limit_isa(name) for name in reversed(ISA_NAMES))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and attributes of one case; `capacity` 0 picks the smallest that the contract allows."""

    tokens: Sequence[int] = (1,)
    past: Sequence[int] = (0,)
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    window: int = -1
    sink: int = 0
    capacity: int = 0
    page_slots: int = 0  # 0: contiguous
    dtype: np.dtype = field(default_factory=devices.element)
    per_head_past: Sequence[Sequence[int]] | None = None
    options: dict[str, float] = field(default_factory=dict)  # scale, softcap
    sink_logits: bool = False
    causal: bool = True
    prefix_end: Sequence[int] | None = None

    @functools.cached_property  # asked for once for every row of a cache
    def slots(self) -> int:
        """C."""
        longest = max(p + t for p, t in zip(self.longest_past, self.tokens, strict=True))
        ring = self.sink + self.window - 1 + max(max(self.tokens), 1)
        if self.capacity:
            return self.capacity
        keeps_all = self.window < 0 or self.prefix_end is not None
        return max(longest if keeps_all else min(longest, ring), self.sink + max(self.window, 1))

    @property
    def longest_past(self) -> list[int]:
        """Past length of each sequence, the longest of its kv heads."""
        return [max(heads) for heads in self.per_head_past] if self.per_head_past else list(self.past)

    @property
    def attributes(self) -> dict[str, float]:
        """Attributes of SwaAttention."""
        mask = {} if self.causal else {"causal": 0}
        return {"window": self.window, "sink": self.sink, "capacity": self.slots, **mask, **self.options}

    def visible_positions(self, sequence: int, head: int, token: int) -> list[int]:
        """List the positions that a kv head's queries of one of a sequence's tokens see."""
        past = self.per_head_past[sequence][head] if self.per_head_past else self.past[sequence]
        prefix = self.prefix_end[sequence] if self.prefix_end else 0
        return reference.visible_positions(
            past + token,
            self.window,
            self.sink,
            length=past + self.tokens[sequence],
            causal=self.causal,
            prefix_end=prefix,
        )


Feeds = dict[str, np.ndarray]


def block_table(sequences: int, pages: int, rng: np.random.Generator) -> np.ndarray:
    """Deal shuffled pages of a pool with two spare ones, [B, M] int32."""
    return rng.permutation(sequences * pages + 2)[: sequences * pages].reshape(sequences, pages).astype(np.int32)


def attention_feeds(shape: Shape, seed: int = 0) -> Feeds:
    """Draw a step of SwaAttention; slots that were never written hold NaN."""
    rng = np.random.default_rng(seed)
    sequences, slots = len(shape.tokens), shape.slots

    def draw(rows: int, heads: int) -> np.ndarray:
        return rng.standard_normal((rows, heads, shape.head_size)).astype(shape.dtype)

    lengths = [p + t for p, t in zip(shape.longest_past, shape.tokens, strict=True)]
    history = [(draw(n, shape.kv_heads), draw(n, shape.kv_heads)) for n in lengths]
    past = np.array(shape.per_head_past or shape.past, np.int32)
    feeds = {
        "query": draw(sum(shape.tokens), shape.heads),
        "query_start": np.cumsum([0, *shape.tokens]).astype(np.int32),
        "past_len": past,
    }
    table: dict[str, np.ndarray] = {}
    caches = empty_caches(sequences, shape.kv_heads, slots, shape.head_size, shape.dtype)
    if shape.page_slots:
        pages = -(-slots // shape.page_slots)
        table["block_table"] = block_table(sequences, pages, rng)
        caches = empty_caches(sequences * pages + 2, shape.kv_heads, shape.page_slots, shape.head_size, shape.dtype)
    filled = np.broadcast_to(past.reshape(sequences, -1), (sequences, shape.kv_heads)).T + shape.tokens
    for head, head_lengths in enumerate(filled):
        for sequence, length in enumerate(head_lengths):
            _fill(
                caches,
                table.get("block_table"),
                shape,
                [h[:length, head] for h in history[sequence]],
                sequence,
                head,
            )
    feeds |= {"key_cache": caches[0], "value_cache": caches[1], **table}
    if shape.sink_logits:
        feeds["sink_logits"] = rng.standard_normal(shape.heads).astype(np.float32)
    if shape.prefix_end is not None:
        feeds["prefix_end"] = np.array(shape.prefix_end, np.int32)
    return feeds


def draw_feeds(shape: Shape) -> Feeds:
    """Draw a step over caches that are full, whatever its lengths."""
    rng = np.random.default_rng(0)

    def draw(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes, np.float32).astype(shape.dtype)

    pool = (len(shape.tokens), shape.kv_heads, shape.slots, shape.head_size)
    return {
        "query": draw(sum(shape.tokens), shape.heads, shape.head_size),
        "query_start": np.cumsum([0, *shape.tokens]).astype(np.int32),
        "past_len": np.array(shape.per_head_past or shape.past, np.int32),
        "key_cache": draw(*pool),
        "value_cache": draw(*pool),
    }


def _fill(
    caches: list[np.ndarray],
    table: np.ndarray | None,
    shape: Shape,
    rows: list[np.ndarray],
    sequence: int,
    head: int,
) -> None:
    """Write rows [L, D] of one (sequence, kv head) in order of position."""
    for cache, source in zip(caches, rows, strict=True):
        for position, row in enumerate(source):
            slot = reference.slot_of(position, shape.slots, shape.sink)
            if table is None:
                cache[sequence, head, slot] = row
            else:
                cache[table[sequence, slot // shape.page_slots], head, slot % shape.page_slots] = row


@functools.lru_cache(maxsize=devices.HELD_SESSIONS)
def _session(
    device: str, name: str, layout: tuple[tuple[str, np.dtype, int], ...], attributes: tuple
) -> ort.InferenceSession:
    assert device == devices.current()
    feeds = {port: np.empty((1,) * rank, kind) for port, kind, rank in layout}
    assert build_model(name, feeds, dict(attributes)).graph.node
    return open_session(name, feeds, dict(attributes))


def run_cached(name: str, feeds: Feeds, **attributes: object) -> list[np.ndarray]:
    """Run one operator through ONNX Runtime; sessions are kept by input layout and attributes."""
    layout = tuple((port, array.dtype, array.ndim) for port, array in feeds.items())
    session = _session(devices.current(), name, layout, tuple(sorted(attributes.items())))
    return run_session(session, name, feeds, attributes)


def run_attention(shape: Shape, feeds: Feeds) -> tuple[np.ndarray, np.ndarray]:
    """Run SwaAttention through ONNX Runtime: output [T, Hq, D], lse [Hq, T]."""
    output, lse = run_cached("SwaAttention", feeds, **shape.attributes)
    return output, lse


def one_sequence(shape: Shape, feeds: Feeds, b: int) -> tuple[Shape, Feeds]:
    """Take a sequence out of a step; without pages the cache is a view."""
    start = feeds["query_start"]
    alone = {"query": feeds["query"][start[b] : start[b + 1]], "past_len": feeds["past_len"][b : b + 1]}
    alone["query_start"] = np.array([0, start[b + 1] - start[b]], np.int32)
    for name in ("key_cache", "value_cache"):
        alone[name] = feeds[name] if "block_table" in feeds else feeds[name][b : b + 1]
    if "block_table" in feeds:
        alone["block_table"] = feeds["block_table"][b : b + 1]
    lengths = {"tokens": shape.tokens[b : b + 1], "past": shape.past[b : b + 1]}
    if shape.per_head_past:
        lengths["per_head_past"] = shape.per_head_past[b : b + 1]
    return replace(shape, **lengths, capacity=shape.slots), alone


def assert_each_is_as_alone(
    shape: Shape, feeds: Feeds, results: tuple[np.ndarray, ...], sequences: range | list[int]
) -> None:
    """Compare some sequences of a step with steps of their own, bit for bit."""
    output, lse = results
    start = feeds["query_start"]
    for b in sequences:
        alone = run_attention(*one_sequence(shape, feeds, b))
        rows = slice(start[b], start[b + 1])
        devices.assert_same_bits(output[rows], alone[0])
        devices.assert_same_bits(lse[:, rows], alone[1])


def expected_attention(shape: Shape, feeds: Feeds) -> tuple[np.ndarray, np.ndarray]:
    """Run the float64 reference of SwaAttention."""
    return reference.swa_attention(**feeds, **shape.attributes)


def plain_attention(shape: Shape, feeds: Feeds) -> tuple[np.ndarray, np.ndarray]:
    """Run SwaAttention as plain float32 NumPy over the gathered rows of each query."""
    tokens, heads, size = feeds["query"].shape
    group = heads // shape.kv_heads
    scale = np.float32(shape.options.get("scale", 0) or size**-0.5)
    softcap = np.float32(shape.options.get("softcap", 0))
    output, lse = np.zeros((tokens, heads, size), np.float32), np.full((heads, tokens), -np.inf, np.float32)
    for sequence, head in np.ndindex(len(shape.tokens), shape.kv_heads):
        for row in range(feeds["query_start"][sequence], feeds["query_start"][sequence + 1]):
            seen = shape.visible_positions(sequence, head, row - feeds["query_start"][sequence])
            keys, values = (gather(shape, feeds, name, sequence, head, seen) for name in ("key_cache", "value_cache"))
            for h in range(head * group, (head + 1) * group):
                z = keys @ feeds["query"][row, h].astype(np.float32) * scale
                if softcap:
                    z = softcap * np.tanh(z / softcap)
                joined = np.append(z, feeds["sink_logits"][h]) if shape.sink_logits else z
                weights = np.exp(joined - joined.max())
                output[row, h] = weights[: len(z)] @ values / weights.sum()
                lse[h, row] = joined.max() + np.log(weights.sum())
    return output, lse


def gather(shape: Shape, feeds: Feeds, name: str, sequence: int, head: int, positions: list[int]) -> np.ndarray:
    """Return the cached rows of some positions, [len(positions), D] float32."""
    slots = np.array([reference.slot_of(p, shape.slots, shape.sink) for p in positions], np.int64)
    if "block_table" in feeds:
        pages = feeds["block_table"][sequence, slots // shape.page_slots]
        return feeds[name][pages, head, slots % shape.page_slots].astype(np.float32)
    return feeds[name][sequence, head, slots].astype(np.float32)

"""Reads a GroupQueryAttention node: what it computes, and what of it cannot be kept.

Source: the operator's description in ONNX Runtime (docs/ContribOperators.md, com.microsoft.GroupQueryAttention).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ortolan.graphs.builder import Node, Tensor
from ortolan.graphs.config import AttentionConfig
from ortolan.graphs.foreign.values import TOKENS, Kind, Rows, View

OPERATOR = "GroupQueryAttention"
MAX_HEAD_SIZE, LARGE_HEAD_SIZE = 256, 512
QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LENGTHS, TOTAL_LENGTH, COSINE, SINE = range(9)
POSITIONS, BIAS, SINKS, KEY_SCALE, VALUE_SCALE, QUERY_NORM, KEY_NORM = range(9, 16)

_KNOWN_ATTRIBUTES = frozenset((
    "causal", "do_rotary", "k_quant_type", "kv_cache_bit_width", "kv_num_heads", "local_window_size", "num_heads",
    "qk_norm_epsilon", "qk_output", "rotary_interleaved", "scale", "sliding_window_cache", "smooth_softmax", "softcap",
    "v_quant_type",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE inside the attention: tables [positions, rotary / 2]."""

    cosine: Tensor
    sine: Tensor
    interleaved: int
    rotary_size: int


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head, weights [D]."""

    query_weight: Tensor
    key_weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention layer of a foreign graph.

    Attributes:
        node: the node.
        is_packed: whether the first input holds queries, keys and values.
        config: heads, window, scale and softcap.
        sinks: a learned logit per query head, [Hq]; None where there is none.
        smooth: whether the softmax's denominator has one more term, exp(0).
    """

    node: Node
    is_packed: bool
    config: AttentionConfig
    rotation: Rotation | None
    norm: HeadNorm | None
    sinks: Tensor | None
    smooth: bool


def read_attention(view: View) -> Attention:
    """Read the node.

    Raises:
        UnsupportedModelError: it does something that Ortolan's operators do not.
    """
    _check_supported(view)
    heads, kv_heads = int(view.attribute("num_heads", 0)), int(view.attribute("kv_num_heads", 0))
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise view.refuse(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")
    size, window = _head_size(view, heads, kv_heads), int(view.attribute("local_window_size", -1))
    return Attention(
        node=view.node,
        is_packed=not view.has(KEY),
        config=AttentionConfig(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            window=window if window > 0 else -1,
            scale=float(view.attribute("scale", 0.0)),
            softcap=float(view.attribute("softcap", 0.0)),
            learned_sinks=view.has(SINKS),
        ),
        rotation=_rotation(view, size),
        norm=_norm(view),
        sinks=_sinks(view, heads),
        smooth=view.attribute("smooth_softmax", 0) == 1,
    )


def _check_supported(view: View) -> None:
    unknown = sorted(set(view.node.attrs) - _KNOWN_ATTRIBUTES)
    if unknown or len(view.values) > KEY_NORM + 1:
        raise view.refuse(f"it has attributes or inputs that are not known: {unknown or len(view.values)}")
    if view.attribute("causal", 1) != 1:
        raise view.refuse("it is not causal")
    if view.has(BIAS):
        raise view.refuse("it adds an attention bias")
    if view.has(KEY_SCALE) or view.has(VALUE_SCALE) or view.attribute("kv_cache_bit_width", 0):
        raise view.refuse("its key/value cache is quantized")
    if any(view.attribute(name, "NONE") != "NONE" for name in ("k_quant_type", "v_quant_type")):
        raise view.refuse("its key/value cache is quantized")
    if view.attribute("qk_output", 0) or (len(view.node.outputs) > 3 and view.node.outputs[3].name):
        raise view.refuse("it gives its attention weights as an output")
    for index in (PAST_KEY, PAST_VALUE):
        if not view.has(index) or view.values[index] is not Kind.CACHE:
            raise view.refuse(f"input {index} must be a cache that is an input of the graph")
    for index in (LENGTHS, TOTAL_LENGTH):
        if view.has(index) and view.values[index] is not Kind.LENGTHS:
            raise view.refuse(f"input {index} must be computed from the attention mask, or an input of the graph")
    if view.has(POSITIONS) and view.values[POSITIONS] != TOKENS:
        raise view.refuse("its positions must be an input of the graph, [batch, sequence]")
    view.require_constants(COSINE, SINE, SINKS, QUERY_NORM, KEY_NORM)
    if view.has(KEY) != view.has(VALUE):
        raise view.refuse("keys and values must both be given, or both be packed with the queries")


def _sinks(view: View, heads: int) -> Tensor | None:
    if view.has(SINKS) and view.shape(SINKS) != (heads,):
        raise view.refuse(f"its sink logits have the shape {list(view.shape(SINKS))}, expected [{heads}]")
    return view.tensor(SINKS)


def _features(view: View, index: int) -> int:
    rows = view.rows(index)
    if rows != Rows((1, None, rows.row_size), rows.row_size):
        raise view.refuse(f"input {index} must hold tokens as [batch, sequence, features]")
    return rows.row_size


def _head_size(view: View, heads: int, kv_heads: int) -> int:
    count = heads if view.has(KEY) else heads + 2 * kv_heads
    size, rest = divmod(_features(view, QUERY), count)
    fits = all(_features(view, index) == kv_heads * size for index in (KEY, VALUE) if view.has(index))
    if rest or not fits:
        raise view.refuse(f"its inputs do not hold {heads} query heads and {kv_heads} key/value heads of one size")
    if size % 8 or not (0 < size <= MAX_HEAD_SIZE or size == LARGE_HEAD_SIZE):
        raise view.refuse(f"head size {size} is not a multiple of 8 up to {MAX_HEAD_SIZE}, or {LARGE_HEAD_SIZE}")
    return size


def _rotation(view: View, head_size: int) -> Rotation | None:
    if view.attribute("do_rotary", 0) != 1:
        return None
    if not view.has(COSINE) or not view.has(SINE):
        raise view.refuse("it rotates, but has no tables of cosines and sines")
    shape = view.shape(COSINE)
    if len(shape) != 2 or view.shape(SINE) != shape or 2 * shape[1] > head_size:
        raise view.refuse(f"its tables must be [positions, up to {head_size // 2}], not {list(shape)}")
    cosine, sine = view.node.inputs[COSINE], view.node.inputs[SINE]
    return Rotation(cosine, sine, int(view.attribute("rotary_interleaved", 0)), 2 * shape[1])


def _norm(view: View) -> HeadNorm | None:
    if view.has(QUERY_NORM) != view.has(KEY_NORM):
        raise view.refuse("it must normalise queries and keys, or neither")
    if not view.has(QUERY_NORM):
        return None
    epsilon = float(np.float32(view.attribute("qk_norm_epsilon", 1e-6)))
    return HeadNorm(view.node.inputs[QUERY_NORM], view.node.inputs[KEY_NORM], epsilon)

"""The operators of the fused graph between the joint projection and what attention returns."""

from __future__ import annotations

import dataclasses

from ortolan.custom_ops.schema_parts import (
    ATTENDED,
    BLOCK_TABLE,
    CAPACITY,
    CAPTURE_OUT,
    CAUSAL,
    ELEMENT,
    EPSILON,
    FLOAT,
    INT32,
    KEY_CACHE,
    KEY_SCALE,
    MAX_QUERY_LEN,
    PAST_LEN,
    PREFIX_END,
    QUERY_START,
    SCALE,
    SINK,
    SINK_LOGITS,
    SOFTCAP,
    VALUE_CACHE,
    VALUE_SCALE,
    WINDOW,
    Attribute,
    Operator,
    Port,
    cache_outputs,
    scale_outputs,
)

_JOINT_INPUTS: tuple[Port, ...] = (
    Port(
        name="qkv",
        shape="[T, (Hq + 2 * Hkv) * D]",
        type=ELEMENT,
        doc="Query heads, then key heads, then value heads of each token; with value_is_key "
        "[T, (Hq + Hkv) * D], without value heads.",
    ),
    KEY_CACHE,
    VALUE_CACHE,
    QUERY_START,
    PAST_LEN,
    BLOCK_TABLE,
    Port(
        name="query_norm_weight",
        shape="[D]",
        type=ELEMENT,
        doc="Weight of the query heads' RMSNorm; absent: no norm.",
        optional=True,
    ),
    Port(
        name="key_norm_weight",
        shape="[D]",
        type=ELEMENT,
        doc="Weight of the key heads' RMSNorm; absent: no norm.",
        optional=True,
    ),
    Port(
        name="cosine",
        shape="[1, T, R]",
        type=FLOAT,
        doc="Cosines of the tokens' angles; the first 2 * R elements of a head are rotated. Absent: no RoPE.",
        optional=True,
    ),
    Port(
        name="sine",
        shape="[1, T, R]",
        type=FLOAT,
        doc="Sines, with cosine.",
        optional=True,
    ),
    Port(
        name="capture",
        shape="[B, Wq, Hq, D]",
        type=ELEMENT,
        doc="Queries captured so far; absent: none are captured.",
        optional=True,
    ),
    Port(
        name="capture_past_len",
        shape="[B]",
        type=INT32,
        doc="With capture: tokens of each sequence before the step.",
        optional=True,
    ),
    KEY_SCALE,
    VALUE_SCALE,
)
_CAPTURE_OUT = dataclasses.replace(CAPTURE_OUT, optional=True, alias=10)
_HEAD_ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        name="num_heads",
        symbol="Hq",
        default=0,
        least=0,
        allowed="a positive multiple of Hkv",
        doc="Hq: query heads.",
    ),
    EPSILON,
    Attribute(
        name="value_norm",
        default=0,
        least=0,
        most=1,
        allowed="0 or 1",
        doc="1: an RMSNorm without a weight normalises each value head.",
    ),
    Attribute(
        name="value_is_key",
        default=0,
        least=0,
        most=1,
        allowed="0 or 1",
        doc="1: value heads are the key heads, as qkv has them.",
    ),
)

_MAX_KV_LEN = Port(
    name="max_kv_len",
    shape="[1]",
    type=INT32,
    doc="The caller's promise: after the step, no sequence that has tokens in it is longer in this cache, for any kv "
    "head (past_len and the tokens of the step). Absent or 0: nothing is promised. It lets CUDA choose a kernel for "
    "shorter caches; where it is true, no result depends on it. Where it is false, the CPU provider refuses the step, "
    "and on CUDA all that the node returns is undefined, the slots of the step's tokens included.",
    optional=True,
    on_host=True,
)

QKV_OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="QkvRopeAppend",
        doc="From the joint projection to attention: RMSNorm of each query, key and value head, RoPE (rotate-half, as "
        "ONNX's RotaryEmbedding with interleaved = 0) of queries and keys, RingKvAppend of keys and values, and "
        "SnapKvCapture of queries, in float32 and rounded once. Codes are those of the rounded keys and values.",
        inputs=_JOINT_INPUTS,
        outputs=(
            Port(name="query", shape="[T, Hq, D]", type=ELEMENT, doc="Queries, ready for attention."),
            *cache_outputs(1),
            _CAPTURE_OUT,
            *scale_outputs(12),
        ),
        attributes=(*_HEAD_ATTRIBUTES, SINK, CAPACITY),
        params_header="qkv_params.h",
    ),
    Operator(
        name="QkvAttention",
        doc="From the joint projection to what attention returns: QkvRopeAppend, then SwaAttention of its queries over "
        "the caches that it returns, with the same bits; lse is not offered. On CUDA, no node in front of it may write "
        "its caches, scales, block_table, query_start or past_len: it may read them before the kernels in front of it "
        "have ended.",
        inputs=(*_JOINT_INPUTS, SINK_LOGITS, PREFIX_END, _MAX_KV_LEN, MAX_QUERY_LEN),
        outputs=(
            ATTENDED,
            *cache_outputs(1),
            Port(name="query", shape="[T, Hq, D]", type=ELEMENT, doc="Queries, as attention takes them."),
            _CAPTURE_OUT,
            *scale_outputs(12),
        ),
        attributes=(*_HEAD_ATTRIBUTES, SINK, CAPACITY, WINDOW, SCALE, SOFTCAP, CAUSAL),
        workspace=True,
        params_header="qkv_params.h",
    ),
    Operator(
        name="NormRope",
        doc="Heads as QkvRopeAppend makes them, where none is written to a cache: RMSNorm and RoPE (rotate-half, as "
        "ONNX's RotaryEmbedding with interleaved = 0) in float32, rounded once.",
        inputs=(
            Port(name="heads", shape="[T, H, D]", type=ELEMENT, doc="H heads of each token."),
            Port(
                name="cosine",
                shape="[1, T, R]",
                type=FLOAT,
                doc="Cosines of the tokens' angles; the first 2 * R elements of a head are rotated.",
            ),
            Port(name="sine", shape="[1, T, R]", type=FLOAT, doc="Sines of the same angles."),
            Port(
                name="norm_weight",
                shape="[D]",
                type=ELEMENT,
                doc="Weight of the heads' RMSNorm; absent: no norm.",
                optional=True,
            ),
        ),
        outputs=(Port(name="rotated", shape="[T, H, D]", type=ELEMENT, doc="The heads, ready for attention."),),
        attributes=(EPSILON,),
        params_header="qkv_params.h",
    ),
)

"""Builds nodes of the operators in kernels/qkv_params.h; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`."""

from __future__ import annotations

import onnx

from ortolan.custom_ops.node import operator_node


def qkv_rope_append(
    qkv: str,
    key_cache: str,
    value_cache: str,
    query_start: str,
    past_len: str,
    block_table: str = "",
    query_norm_weight: str = "",
    key_norm_weight: str = "",
    cosine: str = "",
    sine: str = "",
    capture: str = "",
    capture_past_len: str = "",
    key_scale: str = "",
    value_scale: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    num_heads: int = 0,
    epsilon: float = 1e-06,
    value_norm: int = 0,
    value_is_key: int = 0,
    sink: int = 0,
    capacity: int = 0,
) -> onnx.NodeProto:
    """Build a QkvRopeAppend node.

    From the joint projection to attention: RMSNorm of each query, key and value head, RoPE (rotate-half, as
    ONNX's RotaryEmbedding with interleaved = 0) of queries and keys, RingKvAppend of keys and values, and
    SnapKvCapture of queries, in float32 and rounded once. Codes are those of the rounded keys and values.

    Args:
        qkv: [T, (Hq + 2 * Hkv) * D] T1. Query heads, then key heads, then value heads of each token; with
            value_is_key [T, (Hq + Hkv) * D], without value heads.
        key_cache: [N, Hkv, P, D] T2. Pool of key pages.
        value_cache: [N, Hkv, P, D] T2. Pool of value pages.
        query_start: [B+1] tensor(int32). Sequence b owns the packed rows query_start[b] ..
            query_start[b+1].
        past_len: [B] or [B, Hkv] tensor(int32). Tokens already in this cache before the step, per sequence
            or per kv head.
        block_table: [B, M] tensor(int32). Page of each block of slots; absent for a contiguous cache, where
            sequence b owns page b. Entries of slots that no token has reached may hold anything.
        query_norm_weight: [D] T1. Weight of the query heads' RMSNorm; absent: no norm.
        key_norm_weight: [D] T1. Weight of the key heads' RMSNorm; absent: no norm.
        cosine: [1, T, R] tensor(float). Cosines of the tokens' angles; the first 2 * R elements of a head
            are rotated. Absent: no RoPE.
        sine: [1, T, R] tensor(float). Sines, with cosine.
        capture: [B, Wq, Hq, D] T1. Queries captured so far; absent: none are captured.
        capture_past_len: [B] tensor(int32). With capture: tokens of each sequence before the step.
        key_scale: [N, Hkv, P] tensor(float). Scale of each row of key codes; given exactly where the caches
            hold codes.
        value_scale: [N, Hkv, P] tensor(float). Scale of each row of value codes; given exactly where the
            caches hold codes.
        outputs: names of query [T, Hq, D], key_cache_out [N, Hkv, P, D], value_cache_out [N, Hkv, P, D],
            capture_out [B, Wq, Hq, D], key_scale_out [N, Hkv, P], value_scale_out [N, Hkv, P].
        name: name of the node.
        num_heads: Hq: query heads. Allowed: a positive multiple of Hkv.
        epsilon: Added to the mean square of an RMSNorm. Allowed: 0 or more.
        value_norm: 1: an RMSNorm without a weight normalises each value head. Allowed: 0 or 1.
        value_is_key: 1: value heads are the key heads, as qkv has them. Allowed: 0 or 1.
        sink: S: first positions of a sequence, never overwritten. Allowed: 0 or more.
        capacity: C: slots a sequence has; 0 means M * P. Allowed: 0, or at least S + W (at least S + 1
            without a window).
    """
    inputs = (qkv, key_cache, value_cache, query_start, past_len, block_table, query_norm_weight, key_norm_weight, cosine, sine, capture, capture_past_len, key_scale, value_scale,)
    return operator_node("QkvRopeAppend", inputs, outputs, name, {"num_heads": num_heads, "epsilon": epsilon, "value_norm": value_norm, "value_is_key": value_is_key, "sink": sink, "capacity": capacity})


def qkv_attention(
    qkv: str,
    key_cache: str,
    value_cache: str,
    query_start: str,
    past_len: str,
    block_table: str = "",
    query_norm_weight: str = "",
    key_norm_weight: str = "",
    cosine: str = "",
    sine: str = "",
    capture: str = "",
    capture_past_len: str = "",
    key_scale: str = "",
    value_scale: str = "",
    sink_logits: str = "",
    prefix_end: str = "",
    max_kv_len: str = "",
    max_query_len: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    num_heads: int = 0,
    epsilon: float = 1e-06,
    value_norm: int = 0,
    value_is_key: int = 0,
    sink: int = 0,
    capacity: int = 0,
    window: int = -1,
    scale: float = 0.0,
    softcap: float = 0.0,
    causal: int = 1,
) -> onnx.NodeProto:
    """Build a QkvAttention node.

    From the joint projection to what attention returns: QkvRopeAppend, then SwaAttention of its queries
    over the caches that it returns, with the same bits; lse is not offered. On CUDA, no node in front of it
    may write its caches, scales, block_table, query_start or past_len: it may read them before the kernels
    in front of it have ended.

    Args:
        qkv: [T, (Hq + 2 * Hkv) * D] T1. Query heads, then key heads, then value heads of each token; with
            value_is_key [T, (Hq + Hkv) * D], without value heads.
        key_cache: [N, Hkv, P, D] T2. Pool of key pages.
        value_cache: [N, Hkv, P, D] T2. Pool of value pages.
        query_start: [B+1] tensor(int32). Sequence b owns the packed rows query_start[b] ..
            query_start[b+1].
        past_len: [B] or [B, Hkv] tensor(int32). Tokens already in this cache before the step, per sequence
            or per kv head.
        block_table: [B, M] tensor(int32). Page of each block of slots; absent for a contiguous cache, where
            sequence b owns page b. Entries of slots that no token has reached may hold anything.
        query_norm_weight: [D] T1. Weight of the query heads' RMSNorm; absent: no norm.
        key_norm_weight: [D] T1. Weight of the key heads' RMSNorm; absent: no norm.
        cosine: [1, T, R] tensor(float). Cosines of the tokens' angles; the first 2 * R elements of a head
            are rotated. Absent: no RoPE.
        sine: [1, T, R] tensor(float). Sines, with cosine.
        capture: [B, Wq, Hq, D] T1. Queries captured so far; absent: none are captured.
        capture_past_len: [B] tensor(int32). With capture: tokens of each sequence before the step.
        key_scale: [N, Hkv, P] tensor(float). Scale of each row of key codes; given exactly where the caches
            hold codes.
        value_scale: [N, Hkv, P] tensor(float). Scale of each row of value codes; given exactly where the
            caches hold codes.
        sink_logits: [Hq] tensor(float). A learned logit per head that joins the softmax's denominator and
            has no value.
        prefix_end: [B] tensor(int32). Positions before it see each other in both directions, whatever the
            window. Only with causal = 1.
        max_kv_len: [1] tensor(int32). The caller's promise: after the step, no sequence that has tokens in
            it is longer in this cache, for any kv head (past_len and the tokens of the step). Absent or 0:
            nothing is promised. It lets CUDA choose a kernel for shorter caches; where it is true, no
            result depends on it. Where it is false, the CPU provider refuses the step, and on CUDA all that
            the node returns is undefined, the slots of the step's tokens included.
        max_query_len: [1] tensor(int32). The caller's promise: no sequence has more tokens in the step.
            Absent or 0: nothing is promised. It spares CUDA the kernels for longer chunks; where it is
            true, no result depends on it. Where it is false, the CPU provider refuses the step, and on CUDA
            what the node returns is undefined.
        outputs: names of output [T, Hq, D], key_cache_out [N, Hkv, P, D], value_cache_out [N, Hkv, P, D],
            query [T, Hq, D], capture_out [B, Wq, Hq, D], key_scale_out [N, Hkv, P], value_scale_out [N,
            Hkv, P].
        name: name of the node.
        num_heads: Hq: query heads. Allowed: a positive multiple of Hkv.
        epsilon: Added to the mean square of an RMSNorm. Allowed: 0 or more.
        value_norm: 1: an RMSNorm without a weight normalises each value head. Allowed: 0 or 1.
        value_is_key: 1: value heads are the key heads, as qkv has them. Allowed: 0 or 1.
        sink: S: first positions of a sequence, never overwritten. Allowed: 0 or more.
        capacity: C: slots a sequence has; 0 means M * P. Allowed: 0, or at least S + W (at least S + 1
            without a window).
        window: W: keys a query sees, itself included; -1 for no window. Allowed: -1, or 1 or more.
        scale: Factor of the logits; 0 means 1 / sqrt(D). Allowed: 0 or more.
        softcap: If positive, a logit z becomes softcap * tanh(z / softcap). Allowed: 0 or more.
        causal: 0: a query sees later keys, too: all of its sequence, or those less than W before or after
            it, and the sinks. Allowed: 0 or 1.
    """
    inputs = (qkv, key_cache, value_cache, query_start, past_len, block_table, query_norm_weight, key_norm_weight, cosine, sine, capture, capture_past_len, key_scale, value_scale, sink_logits, prefix_end, max_kv_len, max_query_len,)
    return operator_node("QkvAttention", inputs, outputs, name, {"num_heads": num_heads, "epsilon": epsilon, "value_norm": value_norm, "value_is_key": value_is_key, "sink": sink, "capacity": capacity, "window": window, "scale": scale, "softcap": softcap, "causal": causal})


def norm_rope(
    heads: str,
    cosine: str,
    sine: str,
    norm_weight: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    epsilon: float = 1e-06,
) -> onnx.NodeProto:
    """Build a NormRope node.

    Heads as QkvRopeAppend makes them, where none is written to a cache: RMSNorm and RoPE (rotate-half, as
    ONNX's RotaryEmbedding with interleaved = 0) in float32, rounded once.

    Args:
        heads: [T, H, D] T1. H heads of each token.
        cosine: [1, T, R] tensor(float). Cosines of the tokens' angles; the first 2 * R elements of a head
            are rotated.
        sine: [1, T, R] tensor(float). Sines of the same angles.
        norm_weight: [D] T1. Weight of the heads' RMSNorm; absent: no norm.
        outputs: names of rotated [T, H, D].
        name: name of the node.
        epsilon: Added to the mean square of an RMSNorm. Allowed: 0 or more.
    """
    inputs = (heads, cosine, sine, norm_weight,)
    return operator_node("NormRope", inputs, outputs, name, {"epsilon": epsilon})

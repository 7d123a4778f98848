"""Builds nodes of the operators in kernels/params.h; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`."""

from __future__ import annotations

import onnx

from ortolan.custom_ops.node import operator_node


def ring_kv_append(
    key: str,
    value: str,
    key_cache: str,
    value_cache: str,
    query_start: str,
    past_len: str,
    block_table: str = "",
    key_scale: str = "",
    value_scale: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    sink: int = 0,
    capacity: int = 0,
) -> onnx.NodeProto:
    """Build a RingKvAppend node.

    Writes this step's keys and values into their slots of the cache, in place. Where the cache is int8 or
    float8e4m3fn, it writes codes and scales.

    Args:
        key: [T, Hkv, D] T1. Keys of this step, after norm and RoPE.
        value: [T, Hkv, D] T1. Values of this step.
        key_cache: [N, Hkv, P, D] T2. Pool of key pages.
        value_cache: [N, Hkv, P, D] T2. Pool of value pages.
        query_start: [B+1] tensor(int32). Sequence b owns the packed rows query_start[b] ..
            query_start[b+1].
        past_len: [B] or [B, Hkv] tensor(int32). Tokens already in this cache before the step, per sequence
            or per kv head.
        block_table: [B, M] tensor(int32). Page of each block of slots; absent for a contiguous cache, where
            sequence b owns page b. Entries of slots that no token has reached may hold anything.
        key_scale: [N, Hkv, P] tensor(float). Scale of each row of key codes; given exactly where the caches
            hold codes.
        value_scale: [N, Hkv, P] tensor(float). Scale of each row of value codes; given exactly where the
            caches hold codes.
        outputs: names of key_cache_out [N, Hkv, P, D], value_cache_out [N, Hkv, P, D], key_scale_out [N,
            Hkv, P], value_scale_out [N, Hkv, P].
        name: name of the node.
        sink: S: first positions of a sequence, never overwritten. Allowed: 0 or more.
        capacity: C: slots a sequence has; 0 means M * P. Allowed: 0, or at least S + W (at least S + 1
            without a window).
    """
    inputs = (key, value, key_cache, value_cache, query_start, past_len, block_table, key_scale, value_scale,)
    return operator_node("RingKvAppend", inputs, outputs, name, {"sink": sink, "capacity": capacity})


def swa_attention(
    query: str,
    key_cache: str,
    value_cache: str,
    query_start: str,
    past_len: str,
    block_table: str = "",
    sink_logits: str = "",
    prefix_end: str = "",
    key_scale: str = "",
    value_scale: str = "",
    max_query_len: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    window: int = -1,
    sink: int = 0,
    capacity: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
    causal: int = 1,
) -> onnx.NodeProto:
    """Build a SwaAttention node.

    Attention of this step's queries over the cache that already holds this step's keys: causal, with an
    optional sliding window, sinks and prefixes; or in both directions.

    Args:
        query: [T, Hq, D] T1. Queries of this step, after norm and RoPE.
        key_cache: [N, Hkv, P, D] T2. Pool of key pages.
        value_cache: [N, Hkv, P, D] T2. Pool of value pages.
        query_start: [B+1] tensor(int32). Sequence b owns the packed rows query_start[b] ..
            query_start[b+1].
        past_len: [B] or [B, Hkv] tensor(int32). Tokens already in this cache before the step, per sequence
            or per kv head.
        block_table: [B, M] tensor(int32). Page of each block of slots; absent for a contiguous cache, where
            sequence b owns page b. Entries of slots that no token has reached may hold anything.
        sink_logits: [Hq] tensor(float). A learned logit per head that joins the softmax's denominator and
            has no value.
        prefix_end: [B] tensor(int32). Positions before it see each other in both directions, whatever the
            window. Only with causal = 1.
        key_scale: [N, Hkv, P] tensor(float). Scale of each row of key codes; given exactly where the caches
            hold codes.
        value_scale: [N, Hkv, P] tensor(float). Scale of each row of value codes; given exactly where the
            caches hold codes.
        max_query_len: [1] tensor(int32). The caller's promise: no sequence has more tokens in the step.
            Absent or 0: nothing is promised. It spares CUDA the kernels for longer chunks; where it is
            true, no result depends on it. Where it is false, the CPU provider refuses the step, and on CUDA
            what the node returns is undefined.
        outputs: names of output [T, Hq, D], lse [Hq, T].
        name: name of the node.
        window: W: keys a query sees, itself included; -1 for no window. Allowed: -1, or 1 or more.
        sink: S: first positions of a sequence, never overwritten. Allowed: 0 or more.
        capacity: C: slots a sequence has; 0 means M * P. Allowed: 0, or at least S + W (at least S + 1
            without a window).
        scale: Factor of the logits; 0 means 1 / sqrt(D). Allowed: 0 or more.
        softcap: If positive, a logit z becomes softcap * tanh(z / softcap). Allowed: 0 or more.
        causal: 0: a query sees later keys, too: all of its sequence, or those less than W before or after
            it, and the sinks. Allowed: 0 or 1.
    """
    inputs = (query, key_cache, value_cache, query_start, past_len, block_table, sink_logits, prefix_end, key_scale, value_scale, max_query_len,)
    return operator_node("SwaAttention", inputs, outputs, name, {"window": window, "sink": sink, "capacity": capacity, "scale": scale, "softcap": softcap, "causal": causal})


def snap_kv_capture(
    query: str,
    capture: str,
    query_start: str,
    past_len: str,
    *,
    outputs: tuple[str, ...],
    name: str,
) -> onnx.NodeProto:
    """Build a SnapKvCapture node.

    Keeps the last Wq queries of each sequence: position p goes to row p mod Wq, in place.

    Args:
        query: [T, Hq, D] T1. Queries of this step, after norm and RoPE.
        capture: [B, Wq, Hq, D] T1. Queries captured so far.
        query_start: [B+1] tensor(int32). Sequence b owns the packed rows query_start[b] ..
            query_start[b+1].
        past_len: [B] tensor(int32). Tokens of each sequence before the step.
        outputs: names of capture_out [B, Wq, Hq, D].
        name: name of the node.
    """
    inputs = (query, capture, query_start, past_len,)
    return operator_node("SnapKvCapture", inputs, outputs, name, {})


def snap_kv_score(
    capture: str,
    key_cache: str,
    kv_len: str,
    block_table: str = "",
    key_scale: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    scale: float = 0.0,
    softcap: float = 0.0,
    group_reduce: str = "mean",
    query_reduce: str = "mean",
) -> onnx.NodeProto:
    """Build a SnapKvScore node.

    How much the captured queries attend to each cached position: the mean or the largest of their softmax
    probabilities, reduced over the query heads of a group; 0 in the window and in empty slots.

    Args:
        capture: [B, Wq, Hq, D] T1. Captured queries.
        key_cache: [N, Hkv, P, D] T2. Pool of key pages.
        kv_len: [B] or [B, Hkv] tensor(int32). Tokens in the cache, the captured window included.
        block_table: [B, M] tensor(int32). Page of each block of slots; absent for a contiguous cache, where
            sequence b owns page b. Entries of slots that no token has reached may hold anything.
        key_scale: [N, Hkv, P] tensor(float). Scale of each row of key codes; given exactly where the caches
            hold codes.
        outputs: names of score [B, Hkv, K].
        name: name of the node.
        scale: Factor of the logits; 0 means 1 / sqrt(D). Allowed: 0 or more.
        softcap: If positive, a logit z becomes softcap * tanh(z / softcap). Allowed: 0 or more.
        group_reduce: How the scores of the query heads of a group become one. Allowed: "mean", "max" or
            "sum".
        query_reduce: How the probabilities of the captured queries become one for each query head, before
            the group. Allowed: "mean" or "max".
    """
    inputs = (capture, key_cache, kv_len, block_table, key_scale,)
    return operator_node("SnapKvScore", inputs, outputs, name, {"scale": scale, "softcap": softcap, "group_reduce": group_reduce, "query_reduce": query_reduce})


def kv_select(
    score: str,
    kv_len: str,
    budget: str,
    window: str,
    sink: str,
    *,
    outputs: tuple[str, ...],
    name: str,
) -> onnx.NodeProto:
    """Build a KvSelect node.

    Chooses the positions that an eviction keeps: sinks and the last `window`, then the best scores, up to
    the budget; of equals, those that come first. A position whose score is negative or NaN is never chosen
    for it. Fewer sinks and window positions are kept where the budget is smaller: the first ones.

    Args:
        score: [B, Hkv or 1, C] tensor(float). Scores; one list serves every kv head.
        kv_len: [B, Hkv] tensor(int32). Tokens in the cache; kv heads that share a list hold at least as
            many as the list chooses from, which is the least of them.
        budget: [1] tensor(int64). Positions to keep, 0 or more.
        window: [1] tensor(int64). Last positions, always kept.
        sink: [1] tensor(int64). First positions, always kept.
        outputs: names of keep [B, Hkv or 1, K], kept_len [B, Hkv].
        name: name of the node.
    """
    inputs = (score, kv_len, budget, window, sink,)
    return operator_node("KvSelect", inputs, outputs, name, {})


def kv_compact(
    key_cache: str,
    value_cache: str,
    keep: str,
    block_table: str = "",
    key_scale: str = "",
    value_scale: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
) -> onnx.NodeProto:
    """Build a KvCompact node.

    Moves the kept positions to the front of a full-attention cache, in place.

    Args:
        key_cache: [N, Hkv, P, D] T2. Pool of key pages.
        value_cache: [N, Hkv, P, D] T2. Pool of value pages.
        keep: [B, Hkv or 1, K] tensor(int32). Physical positions to keep, strictly ascending; -1 pads the
            tail.
        block_table: [B, M] tensor(int32). Page of each block of slots; absent for a contiguous cache, where
            sequence b owns page b. Entries of slots that no token has reached may hold anything.
        key_scale: [N, Hkv, P] tensor(float). Scale of each row of key codes; given exactly where the caches
            hold codes.
        value_scale: [N, Hkv, P] tensor(float). Scale of each row of value codes; given exactly where the
            caches hold codes.
        outputs: names of key_cache_out [N, Hkv, P, D], value_cache_out [N, Hkv, P, D], key_scale_out [N,
            Hkv, P], value_scale_out [N, Hkv, P].
        name: name of the node.
    """
    inputs = (key_cache, value_cache, keep, block_table, key_scale, value_scale,)
    return operator_node("KvCompact", inputs, outputs, name, {})

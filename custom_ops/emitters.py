"""Builds nodes of Ortolan's operators; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`."""

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
    inputs = (query, key_cache, value_cache, query_start, past_len, block_table, sink_logits, prefix_end, key_scale, value_scale,)
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
) -> onnx.NodeProto:
    """Build a SnapKvScore node.

    How much the captured queries attend to each cached position: the mean over queries of their softmax
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
    """
    inputs = (capture, key_cache, kv_len, block_table, key_scale,)
    return operator_node("SnapKvScore", inputs, outputs, name, {"scale": scale, "softcap": softcap, "group_reduce": group_reduce})


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


def moe_gate(
    router_logits: str,
    selection_bias: str = "",
    expert_scale: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    top_k: int = 1,
    scoring: str = "softmax",
    normalise: int = 0,
    scale: float = 1.0,
) -> onnx.NodeProto:
    """Build a MoeGate node.

    Chooses the experts of each token, best first: the K largest logits; of equals, the lower expert. With a
    selection_bias, the K largest sums of score and bias. A weight is the chosen expert's score (softmax
    over all experts, or sigmoid), divided by the sum of the chosen scores if asked for (a sum of 0 gives
    weights of 0), times scale, times expert_scale. All in float32. Where a logit is NaN, the weights of
    softmax are NaN, and which experts are chosen is open; they are K different ones all the same.

    Args:
        router_logits: [T, E] T1. A logit per token and expert.
        selection_bias: [E] tensor(float). Added to the scores by which experts are chosen, not to the
            weights.
        expert_scale: [E] tensor(float). Factor of each expert's weight.
        outputs: names of experts [T, K], weights [T, K].
        name: name of the node.
        top_k: K: experts that a token takes. Allowed: 1 to E.
        scoring: How logits become scores. Allowed: "softmax" or "sigmoid".
        normalise: 1: the chosen scores are divided by their sum. Allowed: 0 or 1.
        scale: Factor of all weights. Allowed: any finite number.
    """
    inputs = (router_logits, selection_bias, expert_scale,)
    return operator_node("MoeGate", inputs, outputs, name, {"top_k": top_k, "scoring": scoring, "normalise": normalise, "scale": scale})


def moe_experts(
    x: str,
    experts: str,
    weights: str,
    gate_up: str,
    down: str,
    gate_up_bias: str = "",
    down_bias: str = "",
    residual: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    activation: str = "silu_mul",
    limit: float = 7.0,
    alpha: float = 1.702,
) -> onnx.NodeProto:
    """Build a MoeExperts node.

    The gated MLPs of each token's experts: y = residual + the sum over k, in order, of weights[t, k] *
    (down @ h + down_bias), with h = act(gate_up @ x + gate_up_bias) of expert experts[t, k]. Sums are
    float32; h and y are rounded to T1. The first I rows of an expert's gate_up are the gate, the last I the
    factor: act(gate) * factor. clamped_silu_mul: with gate = min(gate, limit) and factor between -limit and
    limit, gate * sigmoid(alpha * gate) * (factor + 1). Deterministic. A token's result does not depend on
    the other tokens, as long as one kernel family serves the step: on CUDA, steps of up to 8 (or E / 8)
    pairs of token and expert have one, larger ones of 16-bit elements another, which rounds each expert's
    down @ h + down_bias to T1. An expert outside 0 .. E - 1 is refused on the CPU; on CUDA it adds nothing.

    Args:
        x: [T, H] T1. Rows of H features.
        experts: [T, K] tensor(int32). Experts of each token.
        weights: [T, K] tensor(float). Their weights.
        gate_up: [E, 2 * I, H] T1. First weight of each expert.
        down: [E, H, I] T1. Second weight of each expert.
        gate_up_bias: [E, 2 * I] T1. Added to the first product.
        down_bias: [E, H] T1. Added to the second product.
        residual: [T, H] T1. Added to the sum.
        outputs: names of y [T, H].
        name: name of the node.
        activation: Gated activation. Allowed: "silu_mul", "gelu_mul" (erf), "gelu_tanh_mul" or
            "clamped_silu_mul".
        limit: Of clamped_silu_mul: bounds its inputs. Allowed: 0 or more.
        alpha: Of clamped_silu_mul: in its sigmoid. Allowed: any finite number.
    """
    inputs = (x, experts, weights, gate_up, down, gate_up_bias, down_bias, residual,)
    return operator_node("MoeExperts", inputs, outputs, name, {"activation": activation, "limit": limit, "alpha": alpha})


def causal_conv(
    x: str,
    weight: str,
    conv_state: str,
    query_start: str,
    past_len: str,
    bias: str = "",
    state_slot: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    activation: str = "silu",
) -> onnx.NodeProto:
    """Build a CausalConv node.

    Convolves each feature with its last K inputs: y[t] = activation(bias + the sum over k, in order, of
    weight[:, k] * input[t - K + 1 + k]), in float32. Inputs before a sequence's first position count as 0,
    whatever the ring holds. A token's result has the same bits however its sequence was cut into steps. A
    sequence goes back by a smaller past_len, by at most Rc - K + 1 positions of a step. A step of so many
    tokens at most can be repeated: it leaves the same bits.

    Args:
        x: [T, F] T1. Inputs of this step.
        weight: [F, K] T1. Taps, oldest first; K is 2 to 8.
        conv_state: [N, Rc, F] T1. Ring of the last inputs: that of position p lies in row p mod Rc; Rc is
            at least K - 1.
        query_start: [B+1] tensor(int32). Sequence b owns the packed rows query_start[b] ..
            query_start[b+1].
        past_len: [B] tensor(int32). Tokens of each sequence before the step.
        bias: [F] T1. Added to the sum.
        state_slot: [B] tensor(int32). Row of the state buffers that each sequence owns; absent: sequence b
            owns row b.
        outputs: names of y [T, F], conv_state_out [N, Rc, F].
        name: name of the node.
        activation: What the sum goes through. Allowed: "silu" or "none".
    """
    inputs = (x, weight, conv_state, query_start, past_len, bias, state_slot,)
    return operator_node("CausalConv", inputs, outputs, name, {"activation": activation})


def gated_delta_rule(
    query: str,
    key: str,
    value: str,
    decay: str,
    beta: str,
    state: str,
    recent_keys: str,
    recent_updates: str,
    recent_decays: str,
    state_len: str,
    query_start: str,
    past_len: str,
    state_slot: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    scale: float = 0.0,
    l2_norm: int = 1,
) -> onnx.NodeProto:
    """Build a GatedDeltaRule node.

    The gated delta rule (arXiv 2412.06464) over a float32 state: S_t = exp(decay_t) S_(t-1); u_t = beta_t
    (v_t - k_t S_t); S_t += the outer product of k_t and u_t; output_t = scale * q_t S_t. Value head h reads
    key head h / (Hv / Hk). Before the first token S is 0, whatever the buffers hold. S before a step is
    `state` and the kept updates of positions state_len .. past_len - 1 behind it. A sequence with R tokens
    or fewer keeps their updates; to make room, `state` then reads those before position c = max(state_len,
    past_len + tokens - R), and state_len becomes c (0 where past_len is 0). So the next step may have any
    past_len from c to the sequence's new length, and its bits are those of a run that read only the
    accepted tokens; the step may be repeated, too. Steps of R tokens or fewer give a token the same bits,
    whatever their number of tokens. A sequence with more tokens leaves S behind all of them in `state`, and
    none of them can be taken back; on CUDA its float16 and bfloat16 products are those of chunks of 64
    tokens, which round otherwise. A sequence without tokens stays as it is. Needs state_len <= past_len <=
    state_len + R, but for past_len = 0; the CPU refuses others.

    Args:
        query: [T, Hk, Dk] T1. Queries of this step.
        key: [T, Hk, Dk] T1. Keys of this step; Dk is 1 to 256.
        value: [T, Hv, Dv] T1. Values of this step; Hv is a multiple of Hk.
        decay: [T, Hv] tensor(float). Logarithm of the state's factor, 0 or less.
        beta: [T, Hv] tensor(float). How much of a new value is written.
        state: [N, Hv, Dk, Dv] tensor(float). S after state_len tokens.
        recent_keys: [N, R, Hk, Dk] tensor(float). Keys of the last tokens, normalised; that of position p
            lies in row p mod R. R is 1 to 16.
        recent_updates: [N, R, Hv, Dv] tensor(float). Their u.
        recent_decays: [N, R, Hv] tensor(float). Their decay.
        state_len: [N] tensor(int32). Tokens that each row of state has read.
        query_start: [B+1] tensor(int32). Sequence b owns the packed rows query_start[b] ..
            query_start[b+1].
        past_len: [B] tensor(int32). Tokens of each sequence before the step.
        state_slot: [B] tensor(int32). Row of the state buffers that each sequence owns; absent: sequence b
            owns row b.
        outputs: names of output [T, Hv, Dv], state_out [N, Hv, Dk, Dv], recent_keys_out [N, R, Hk, Dk],
            recent_updates_out [N, R, Hv, Dv], recent_decays_out [N, R, Hv], state_len_out [N].
        name: name of the node.
        scale: Factor of the output; 0 means 1 / sqrt(Dk). Allowed: 0 or more.
        l2_norm: 1: each query and key row is first divided by sqrt(the sum of its squares + 1e-6). Allowed:
            0 or 1.
    """
    inputs = (query, key, value, decay, beta, state, recent_keys, recent_updates, recent_decays, state_len, query_start, past_len, state_slot,)
    return operator_node("GatedDeltaRule", inputs, outputs, name, {"scale": scale, "l2_norm": l2_norm})


def low_bit_experts(
    x: str,
    experts: str,
    weights: str,
    gate_up_codes: str,
    down_codes: str,
    gate_up_scales: str = "",
    gate_up_zero_points: str = "",
    gate_up_scale_codes: str = "",
    gate_up_float_scales: str = "",
    down_scales: str = "",
    down_zero_points: str = "",
    down_scale_codes: str = "",
    down_float_scales: str = "",
    gate_up_bias: str = "",
    down_bias: str = "",
    residual: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    format: str = "int4",
    group_size: int = 0,
    scale_rows: int = 1,
    activation: str = "silu_mul",
    limit: float = 7.0,
    alpha: float = 1.702,
) -> onnx.NodeProto:
    """Build a LowBitExperts node.

    MoeExperts over weights of few bits: each expert's gate_up [2 * I, H] and down [H, I] as LowBitLinear
    describes a weight, one behind the other; Gh = H / group_size and Gi = I / group_size groups, one if
    that is 0. Both have one format. Sums are float32; the inner rows and y are rounded to T1. Only the
    chosen experts' weights are read. Deterministic. A token's result does not depend on the other tokens,
    as long as one kernel family serves the step: on CUDA, steps of up to 32 * E pairs of token and expert
    have one, larger ones of 16-bit elements another, for which weights are rounded to T1; up to 3 / 2 * E
    pairs, int4 and mxfp4 have one of their own. All round each expert's share of y to T1. An expert outside
    0 .. E - 1 is refused on the CPU; on CUDA it adds nothing. Where docs/quantisation.md says so, inputs
    are rounded to 16 bits.

    Args:
        x: [T, H] T1. Rows of H features.
        experts: [T, K] tensor(int32). Experts of each token.
        weights: [T, K] tensor(float). Their weights.
        gate_up_codes: [E, 2 * I, H / 2] or [E, 2 * I, H] tensor(uint8). Codes of 4 or 8 bits of each
            expert's weight.
        down_codes: [E, H, I / 2] or [E, H, I] tensor(uint8). Codes of 4 or 8 bits of each expert's weight.
        gate_up_scales: [E, 2 * I, Gh] T1. int4, int8: a scale per group.
        gate_up_zero_points: [E, 2 * I, ceil(Gh / 2)] or [E, 2 * I, Gh] tensor(uint8). int4 (two in a byte),
            int8: a zero point per group.
        gate_up_scale_codes: [E, 2 * I, Gh] tensor(uint8). mxfp4, nvfp4: a scale per group.
        gate_up_float_scales: [E, ceil(2 * I / scale_rows), Gh] or [E, 2 * I, 1] tensor(float). fp8: a scale
            per block; nvfp4: one per row.
        down_scales: [E, H, Gi] T1. int4, int8: a scale per group.
        down_zero_points: [E, H, ceil(Gi / 2)] or [E, H, Gi] tensor(uint8). int4 (two in a byte), int8: a
            zero point per group.
        down_scale_codes: [E, H, Gi] tensor(uint8). mxfp4, nvfp4: a scale per group.
        down_float_scales: [E, ceil(H / scale_rows), Gi] or [E, H, 1] tensor(float). fp8: a scale per block;
            nvfp4: one per row.
        gate_up_bias: [E, 2 * I] T1. Added to the first product.
        down_bias: [E, H] T1. Added to the second product.
        residual: [T, H] T1. Added to the sum.
        outputs: names of y [T, H].
        name: name of the node.
        format: What codes and scales mean. Allowed: "int4", "int8", "fp8", "mxfp4" or "nvfp4".
        group_size: Columns that share a scale. Allowed: 0 (a whole row), or an even divisor of H and of I.
        scale_rows: fp8: rows that share a float scale. Allowed: 1 or more.
        activation: Gated activation. Allowed: "silu_mul", "gelu_mul" (erf), "gelu_tanh_mul" or
            "clamped_silu_mul".
        limit: Of clamped_silu_mul: bounds its inputs. Allowed: 0 or more.
        alpha: Of clamped_silu_mul: in its sigmoid. Allowed: any finite number.
    """
    inputs = (x, experts, weights, gate_up_codes, down_codes, gate_up_scales, gate_up_zero_points, gate_up_scale_codes, gate_up_float_scales, down_scales, down_zero_points, down_scale_codes, down_float_scales, gate_up_bias, down_bias, residual,)
    return operator_node("LowBitExperts", inputs, outputs, name, {"format": format, "group_size": group_size, "scale_rows": scale_rows, "activation": activation, "limit": limit, "alpha": alpha})


def low_bit_linear(
    x: str,
    codes: str,
    scales: str = "",
    zero_points: str = "",
    scale_codes: str = "",
    float_scales: str = "",
    norm_weight: str = "",
    bias: str = "",
    residual: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    format: str = "int4",
    group_size: int = 0,
    scale_rows: int = 1,
    input_format: str = "none",
    input_scale: float = 0.0,
    epsilon: float = 1e-06,
    activation: str = "none",
) -> onnx.NodeProto:
    """Build a LowBitLinear node.

    FusedLinear over a weight [N, I] of few bits, N = O or 2 * O: y = residual + act(RMSNorm(x) @ weight^T +
    bias), in float32; the normalised rows and the result are rounded to T1. Groups are of group_size
    columns, G = I / group_size of them, one if that is 0. int4, int8: weight = (code - zero point) *
    scales, and a zero point is 8 or 128 where none are given. fp8: e4m3 code * float_scales, for scale_rows
    rows each. mxfp4: e2m1 code * 2^(scale_codes - 127), groups of 32. nvfp4: e2m1 code * e4m3 scale_codes *
    float_scales of the row, groups of 16. Codes of 4 bits lie two in a byte, the first in its low half.
    With input_format fp8 the rows, normalised where there is a norm, are rounded to e4m3, with a scale for
    each token and group: the group's largest magnitude / 448, and codes e4m3(x * (448 / largest)), 0 where
    all are 0; or codes e4m3(x * (1 / input_scale)), saturating, where that is given. Sums are then of
    products of codes, times both scales; tensor cores add up to 512 such products with about 14 bits before
    these join a float32 sum. One of the two outputs is asked for. A row's result does not depend on the
    other rows of a step of up to 8 rows, or of 9 to 16; on the CPU, on no other row. Where
    docs/quantisation.md says so, inputs are rounded to 16 bits.

    Args:
        x: [T, I] T1. Rows of I features.
        codes: [N, I / 2] or [N, I] tensor(uint8). Codes of 4 or 8 bits; MatMulNBits's, row by row.
        scales: [N, G] T1. int4, int8: a scale per group.
        zero_points: [N, ceil(G / 2)] or [N, G] tensor(uint8). int4 (two in a byte), int8: a zero point per
            group.
        scale_codes: [N, G] tensor(uint8). mxfp4, nvfp4: a scale per group.
        float_scales: [ceil(N / scale_rows), G] or [N, 1] tensor(float). fp8: a scale per block; nvfp4: one
            per row.
        norm_weight: [I] T1. Weight of an RMSNorm of x; absent: x is used as it is.
        bias: [N] T1. Added to the product.
        residual: [T, O] T1. Added to the result.
        outputs: names of y [T, O], y_float32 [T, O].
        name: name of the node.
        format: What codes and scales mean. Allowed: "int4", "int8", "fp8", "mxfp4" or "nvfp4".
        group_size: Columns that share a scale. Allowed: 0 (a whole row), or an even divisor of I.
        scale_rows: fp8: rows that share a float scale. Allowed: 1 or more.
        input_format: What inputs are rounded to before they are multiplied. Allowed: "none", or "fp8" where
            format is "fp8".
        input_scale: Scale of all rounded inputs. Allowed: 0 (a scale for each token and group), or more
            with input_format fp8.
        epsilon: Added to the mean square of an RMSNorm. Allowed: 0 or more.
        activation: Gated activation; the first O rows are the gate, the last O the factor. Allowed: "none",
            "silu_mul", "gelu_mul" (erf) or "gelu_tanh_mul".
    """
    inputs = (x, codes, scales, zero_points, scale_codes, float_scales, norm_weight, bias, residual,)
    return operator_node("LowBitLinear", inputs, outputs, name, {"format": format, "group_size": group_size, "scale_rows": scale_rows, "input_format": input_format, "input_scale": input_scale, "epsilon": epsilon, "activation": activation})


def fused_linear(
    x: str,
    weight: str,
    norm_weight: str = "",
    bias: str = "",
    residual: str = "",
    factor: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    epsilon: float = 1e-06,
    activation: str = "none",
    factor_offset: int = 0,
    batch_invariant: int = 0,
) -> onnx.NodeProto:
    """Build a FusedLinear node.

    A linear layer with what stands around it: y = residual + act(RMSNorm(x) @ weight^T + bias), in float32;
    the normalised rows and the result are rounded to T1. With a gated activation the first O rows of weight
    and bias are the gate, the last O the factor: act(gate) * factor. Or all rows are the gate, and the
    factor is an input. One of the two outputs is asked for. In a step of many tokens that asks for y, the
    product too is rounded to T1 before its bias and its gate. Up to 8 rows get the same bits whatever their
    number: in float32, and on compute capability 9.0 in 16 bits where a row of weight has 2 to 16 KB.

    Args:
        x: [T, I] T1. Rows of I features.
        weight: [O, I] or [2 * O, I] T1. Weight; 2 * O rows if gated without a factor.
        norm_weight: [I] T1. Weight of an RMSNorm of x; absent: x is used as it is.
        bias: [O] or [2 * O] T1. Added to the product.
        residual: [T, O] T1. Added to the result.
        factor: [T, X] T1. Rows that hold the factor of a gated activation; not with a residual. Absent:
            weight gives the factor.
        outputs: names of y [T, O], y_float32 [T, O].
        name: name of the node.
        epsilon: Added to the mean square of an RMSNorm. Allowed: 0 or more.
        activation: Gated activation. Allowed: "none", "silu_mul", "gelu_mul" (erf) or "gelu_tanh_mul".
        factor_offset: With factor: its first column. Allowed: 0 or more.
        batch_invariant: 1: a row of the result has the same bits whatever rows stand beside it, and however
            many. Allowed: 0 or 1.
    """
    inputs = (x, weight, norm_weight, bias, residual, factor,)
    return operator_node("FusedLinear", inputs, outputs, name, {"epsilon": epsilon, "activation": activation, "factor_offset": factor_offset, "batch_invariant": batch_invariant})


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
    inputs = (qkv, key_cache, value_cache, query_start, past_len, block_table, query_norm_weight, key_norm_weight, cosine, sine, capture, capture_past_len, key_scale, value_scale, sink_logits, prefix_end,)
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


def rope_angles(
    positions: str,
    inv_freq: str,
    *,
    outputs: tuple[str, ...],
    name: str,
    factor: float = 1.0,
) -> onnx.NodeProto:
    """Build a RopeAngles node.

    Cosines and sines of RoPE: cosine = factor * cos(positions * inv_freq), in float32, and sine likewise.

    Args:
        positions: [T] tensor(int64). Logical position of each token.
        inv_freq: [1, R] tensor(float). Radians per position of each rotated pair.
        outputs: names of cosine [1, T, R], sine [1, T, R].
        name: name of the node.
        factor: Multiplies cosine and sine. Allowed: any finite number.
    """
    inputs = (positions, inv_freq,)
    return operator_node("RopeAngles", inputs, outputs, name, {"factor": factor})


def gather_rows(
    rows: str,
    row_indices: str,
    *,
    outputs: tuple[str, ...],
    name: str,
) -> onnx.NodeProto:
    """Build a GatherRows node.

    Some rows, by their indices: output[r] = rows[row_indices[r]], and zeros where an index is not in 0 .. T
    - 1.

    Args:
        rows: [T, H] T1. Packed rows of H features.
        row_indices: [R] tensor(int64). Index of each wanted row, in any order.
        outputs: names of output [R, H].
        name: name of the node.
    """
    inputs = (rows, row_indices,)
    return operator_node("GatherRows", inputs, outputs, name, {})


def narrow_step(
    query_start: str,
    past_len: str,
    row_indices: str,
    positions: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
) -> onnx.NodeProto:
    """Build a NarrowStep node.

    What the inputs of a step become where some rows go on and the others do not. The wanted rows are the
    last ones of their sequences, so these are sequences that begin later: past_len_out = past_len + the
    rows that a sequence drops.

    Args:
        query_start: [B+1] tensor(int32). Sequence b owns the packed rows query_start[b] ..
            query_start[b+1].
        past_len: [B] or [B, Hkv] tensor(int32). Tokens already in this cache before the step, per sequence
            or per kv head.
        row_indices: [R] tensor(int64). Index of each wanted row, in ascending order. Where every row of the
            sequences is wanted, indices of any rows may follow; they belong to no sequence.
        positions: [T] tensor(int64). Logical position of each row; given exactly where positions_out is
            asked for.
        outputs: names of query_start_out [B+1], past_len_out [B] or [B, Hkv], positions_out [R].
        name: name of the node.
    """
    inputs = (query_start, past_len, row_indices, positions,)
    return operator_node("NarrowStep", inputs, outputs, name, {})


def rms_norm_add(
    x: str,
    norm_weight: str,
    residual: str = "",
    scale: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    epsilon: float = 1e-06,
) -> onnx.NodeProto:
    """Build a RmsNormAdd node.

    A norm, and what follows it: y = (residual + RMSNorm(x)) * scale, in float32 and rounded once.

    Args:
        x: [T, I] T1. The branch.
        norm_weight: [I] T1. Weight of the RMSNorm.
        residual: [T, I] T1. Added to the norm.
        scale: [1] T1. Multiplied with the sum.
        outputs: names of y [T, I].
        name: name of the node.
        epsilon: Added to the mean square of an RMSNorm. Allowed: 0 or more.
    """
    inputs = (x, norm_weight, residual, scale,)
    return operator_node("RmsNormAdd", inputs, outputs, name, {"epsilon": epsilon})


def gate_mul(
    x: str,
    gate: str,
    norm_weight: str = "",
    residual: str = "",
    *,
    outputs: tuple[str, ...],
    name: str,
    activation: str = "silu",
    size: int = 0,
    x_offset: int = 0,
    gate_offset: int = 0,
    gate_size: int = 0,
    epsilon: float = 1e-06,
) -> onnx.NodeProto:
    """Build a GateMul node.

    What a gate lets through: y = residual + act(gate) * x, in float32 and rounded once. x are O columns of
    a wider row, the gates gate_size columns of another, each for O / gate_size columns of x. With a norm
    weight, each N columns of x are normalised first.

    Args:
        x: [T, X] T1. Rows that hold x.
        gate: [T, G] T1. Rows that hold the gates.
        norm_weight: [N] T1. Weight of an RMSNorm of each N columns; absent: x is used as it is.
        residual: [T, O] T1. Added to the result.
        outputs: names of y [T, O].
        name: name of the node.
        activation: What gates go through. Allowed: "silu", "sigmoid", "softplus", "gelu" or "gelu_tanh".
        size: O: columns of y. Allowed: 1 or more.
        x_offset: First column of x. Allowed: 0 or more.
        gate_offset: Column of the first gate. Allowed: 0 or more.
        gate_size: Gates of a row; 0: O of them. Allowed: 0, or a divisor of O.
        epsilon: Added to the mean square of an RMSNorm. Allowed: 0 or more.
    """
    inputs = (x, gate, norm_weight, residual,)
    return operator_node("GateMul", inputs, outputs, name, {"activation": activation, "size": size, "x_offset": x_offset, "gate_offset": gate_offset, "gate_size": gate_size, "epsilon": epsilon})


def delta_gates(
    decay_rows: str,
    beta_rows: str,
    a_log: str,
    dt_bias: str,
    *,
    outputs: tuple[str, ...],
    name: str,
    decay_offset: int = 0,
    beta_offset: int = 0,
    beta_scale: float = 1.0,
) -> onnx.NodeProto:
    """Build a DeltaGates node.

    The gates of the gated delta rule, in float32: decay = -exp(a_log) * softplus(d + dt_bias) and beta =
    beta_scale * sigmoid(b), of Hv columns d and b of wider rows.

    Args:
        decay_rows: [T, X] T1. Rows that hold d.
        beta_rows: [T, Y] T1. Rows that hold b.
        a_log: [Hv] T1. Logarithm of each head's rate.
        dt_bias: [Hv] T1. Added to d.
        outputs: names of decay [T, Hv], beta [T, Hv].
        name: name of the node.
        decay_offset: Column of the first d. Allowed: 0 or more.
        beta_offset: Column of the first b. Allowed: 0 or more.
        beta_scale: Multiplies beta. Allowed: any finite number.
    """
    inputs = (decay_rows, beta_rows, a_log, dt_bias,)
    return operator_node("DeltaGates", inputs, outputs, name, {"decay_offset": decay_offset, "beta_offset": beta_offset, "beta_scale": beta_scale})

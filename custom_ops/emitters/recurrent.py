"""Builds nodes of the operators in kernels/recurrent_params.h; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`."""

from __future__ import annotations

import onnx

from ortolan.custom_ops.node import operator_node


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

"""The fused operators in NumPy and float64, the oracle of their kernels' tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ortolan.custom_ops.reference import Array, Floats, ring_kv_append, snapkv_capture, swa_attention


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Floats:
    """Normalise the last axis to a mean square of one, and scale it."""
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + epsilon)
    return np.asarray(normed * weight.astype(np.float64))


def _silu(gate: Floats) -> Floats:
    return np.asarray(gate / (1 + np.exp(-gate)))


def _gelu(gate: Floats) -> Floats:
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return np.asarray(gate * (1 + erf(gate / math.sqrt(2))) / 2)


def _gelu_tanh(gate: Floats) -> Floats:
    return np.asarray(gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2)


GATES: dict[str, Callable[[Floats], Floats]] = {"silu_mul": _silu, "gelu_mul": _gelu, "gelu_tanh_mul": _gelu_tanh}


def fused_linear(
    x: Array,
    weight: Array,
    norm_weight: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    factor: Array | None = None,
    *,
    epsilon: float = 1e-6,
    activation: str = "none",
    factor_offset: int = 0,
) -> Floats:
    """Return residual + act(RMSNorm(x) @ weight^T + bias), [T, O], of x [T, I]; of a gate, times the given factor."""
    y = x.astype(np.float64) if norm_weight is None else _rms_norm(x, norm_weight, epsilon)
    y = y @ weight.astype(np.float64).T
    if bias is not None:
        y = y + bias.astype(np.float64)
    if factor is not None:
        return GATES[activation](y) * factor.astype(np.float64)[:, factor_offset : factor_offset + y.shape[1]]
    if activation != "none":
        half = y.shape[1] // 2
        y = GATES[activation](y[:, :half]) * y[:, half:]
    return y if residual is None else residual.astype(np.float64) + y


ROW_GATES: dict[str, Callable[[Floats], Floats]] = {
    "silu": _silu,
    "sigmoid": lambda gate: np.asarray(1 / (1 + np.exp(-gate))),
    "softplus": lambda gate: np.logaddexp(gate, 0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


def gate_mul(
    x: Array,
    gate: Array,
    norm_weight: Array | None = None,
    residual: Array | None = None,
    *,
    activation: str = "silu",
    size: int = 0,
    x_offset: int = 0,
    gate_offset: int = 0,
    gate_size: int = 0,
    epsilon: float = 1e-6,
) -> Floats:
    """Return residual + act(gate) * x, [T, size], of some columns of x and of gate."""
    own, gates = x[:, x_offset : x_offset + size], gate[:, gate_offset : gate_offset + (gate_size or size)]
    y = own.astype(np.float64)
    if norm_weight is not None:
        heads = own.reshape(len(own), size // len(norm_weight), len(norm_weight))
        y = _rms_norm(heads, norm_weight, epsilon).reshape(own.shape)
    opened = ROW_GATES[activation](gates.astype(np.float64))
    y = y * np.repeat(opened, size // gates.shape[1], axis=1)
    return y if residual is None else residual.astype(np.float64) + y


def delta_gates(
    decay_rows: Array,
    beta_rows: Array,
    a_log: Array,
    dt_bias: Array,
    *,
    decay_offset: int = 0,
    beta_offset: int = 0,
    beta_scale: float = 1.0,
) -> tuple[Floats, Floats]:
    """Return decay and beta of the gated delta rule, [T, Hv] each."""
    heads = len(a_log)
    given = decay_rows[:, decay_offset : decay_offset + heads].astype(np.float64) + dt_bias.astype(np.float64)
    decay = -np.exp(a_log.astype(np.float64)) * np.logaddexp(given, 0)
    opened = beta_rows[:, beta_offset : beta_offset + heads].astype(np.float64)
    return decay, beta_scale / (1 + np.exp(-opened))


def rope_angles(positions: Array, inv_freq: Array, *, factor: float = 1.0) -> tuple[Floats, Floats]:
    """Return cosines and sines [1, T, R] of angles that are rounded to float32, as the operator's are."""
    angles = positions.astype(np.float32)[None, :, None] * inv_freq.astype(np.float32)
    wide = angles.astype(np.float64)
    return factor * np.cos(wide), factor * np.sin(wide)


def gather_rows(rows: Array, row_indices: Array) -> Array:
    """Return rows[row_indices], [R, H]; zeros for an index outside 0 .. T - 1."""
    gathered = np.zeros((len(row_indices), rows.shape[1]), rows.dtype)
    indices = row_indices.astype(np.int64)
    exists = (indices >= 0) & (indices < len(rows))
    gathered[exists] = rows[indices[exists]]
    return gathered


def narrow_step(
    query_start: Array, past_len: Array, row_indices: Array, positions: Array | None = None
) -> tuple[Array, ...]:
    """Return query_start [B+1] and past_len [B] or [B, Hkv] of the wanted rows, and their positions [R] if given."""
    starts = np.array([min((row_indices < edge).sum(), edge) for edge in query_start], np.int32)
    dropped = np.diff(query_start) - np.diff(starts)
    lengths = past_len + dropped.reshape(-1, *[1] * (past_len.ndim - 1)).astype(np.int32)
    if positions is None:
        return starts, lengths
    return starts, lengths, gather_rows(positions[:, None], row_indices)[:, 0]


def rms_norm_add(
    x: Array, norm_weight: Array, residual: Array | None = None, scale: Array | None = None, *, epsilon: float = 1e-6
) -> Floats:
    """Return (residual + RMSNorm(x)) * scale, [T, I]."""
    y = _rms_norm(x, norm_weight, epsilon)
    y = y if residual is None else y + residual.astype(np.float64)
    return y if scale is None else y * scale.astype(np.float64)


def _rotate(heads: Floats, cosine: Array, sine: Array) -> Floats:
    """Rotate the first 2 * R elements of heads [T, H, D] by the angles of cosine and sine [1, T, R]."""
    half = cosine.shape[2]
    c, s = (angle[0].astype(np.float64)[:, None, :] for angle in (cosine, sine))
    first, second, rest = np.split(heads, [half, 2 * half], axis=2)
    return np.concatenate([first * c - second * s, second * c + first * s, rest], axis=2)


def norm_rope(
    heads: Array, cosine: Array, sine: Array, norm_weight: Array | None = None, *, epsilon: float = 1e-6
) -> Floats:
    """Return heads [T, H, D] in float64, normalised where there is a weight, and rotated."""
    wide = heads.astype(np.float64)
    return _rotate(wide if norm_weight is None else _rms_norm(wide, norm_weight, epsilon), cosine, sine)


def qkv_rope_append(
    qkv: Array,
    key_cache: Array,
    value_cache: Array,
    query_start: Array,
    past_len: Array,
    block_table: Array | None = None,
    query_norm_weight: Array | None = None,
    key_norm_weight: Array | None = None,
    cosine: Array | None = None,
    sine: Array | None = None,
    capture: Array | None = None,
    capture_past_len: Array | None = None,
    key_scale: Array | None = None,
    value_scale: Array | None = None,
    *,
    num_heads: int,
    epsilon: float = 1e-6,
    value_norm: int = 0,
    value_is_key: int = 0,
    sink: int = 0,
    capacity: int = 0,
) -> tuple[Array, ...]:
    """Return the queries [T, Hq, D] in float64, and copies of the caches with this step's keys and values.

    Where a capture buffer is given, a copy of it with this step's queries follows, and then copies of the scales.
    """
    kv_heads, size = key_cache.shape[1], key_cache.shape[3]
    heads = qkv.astype(np.float64).reshape(len(qkv), -1, size)
    query, key, value = np.split(heads, [num_heads, num_heads + kv_heads], axis=1)
    value = key if value_is_key else value
    value = _rms_norm(value, np.ones(size), epsilon) if value_norm else value
    if query_norm_weight is not None:
        query = _rms_norm(query, query_norm_weight, epsilon)
    if key_norm_weight is not None:
        key = _rms_norm(key, key_norm_weight, epsilon)
    if cosine is not None and sine is not None:
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
    pools = key_cache, value_cache, query_start, past_len, block_table, key_scale, value_scale
    keys, values, *scales = ring_kv_append(key, value, *pools, sink=sink, capacity=capacity)
    if capture is None or capture_past_len is None:
        return query, keys, values, *scales
    return query, keys, values, snapkv_capture(query, capture, query_start, capture_past_len), *scales


def qkv_attention(
    qkv: Array,
    key_cache: Array,
    value_cache: Array,
    query_start: Array,
    past_len: Array,
    block_table: Array | None = None,
    *,
    sink_logits: Array | None = None,
    prefix_end: Array | None = None,
    num_heads: int,
    window: int = -1,
    scale: float = 0.0,
    softcap: float = 0.0,
    causal: int = 1,
    sink: int = 0,
    capacity: int = 0,
    **others: Any,
) -> tuple[Array, ...]:
    """Return attention's output [T, Hq, D] in float64, the updated caches, the queries, and what else is updated.

    `others` are what `qkv_rope_append` takes besides.
    """
    step, ring = (query_start, past_len, block_table), {"sink": sink, "capacity": capacity}
    append: dict[str, Any] = {"num_heads": num_heads, **ring, **others}
    query, keys, values, *rest = qkv_rope_append(qkv, key_cache, value_cache, *step, **append)
    mask: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap, "causal": causal, **ring}
    if others.get("key_scale") is not None:
        mask |= {"key_scale": rest[-2], "value_scale": rest[-1]}
    output, _ = swa_attention(query, keys, values, *step, sink_logits, prefix_end, **mask)
    return output, keys, values, query, *rest

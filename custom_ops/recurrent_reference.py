"""The operators of recurrent layers in NumPy and float64, the oracle of their kernels' tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ortolan.custom_ops.reference import Array, Floats

KEY_NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """The buffers that GatedDeltaRule continues; `state`, keys and updates in float64.

    Attributes:
        state: [N, Hv, Dk, Dv]
        recent_keys: [N, R, Hk, Dk]
        recent_updates: [N, R, Hv, Dv]
        recent_decays: [N, R, Hv]
        state_len: [N] int32
    """

    state: Floats
    recent_keys: Floats
    recent_updates: Floats
    recent_decays: Floats
    state_len: Array

    @classmethod
    def copy_of(cls, buffers: Mapping[str, Array]) -> DeltaStates:
        """Copy the five buffers, by their names here."""
        floats = {name: array.astype(np.float64) for name, array in buffers.items() if name != "state_len"}
        return cls(**floats, state_len=buffers["state_len"].copy())


def causal_conv(
    x: Array,
    weight: Array,
    conv_state: Array,
    query_start: Array,
    past_len: Array,
    bias: Array | None = None,
    state_slot: Array | None = None,
    *,
    activation: str = "silu",
) -> tuple[Floats, Array]:
    """Return y [T, F] and the ring [N, Rc, F] after the step; the ring keeps the type of `conv_state`."""
    y, ring = np.zeros(x.shape), conv_state.copy()
    taps, rows = weight.shape[1], conv_state.shape[1]
    for sequence, past in enumerate(past_len.tolist()):
        row = sequence if state_slot is None else state_slot[sequence]
        own = x[query_start[sequence] : query_start[sequence + 1]]
        before = [np.zeros(x.shape[1]) if p < 0 else ring[row, p % rows] for p in range(past - taps + 1, past)]
        inputs = np.concatenate([np.array(before).astype(np.float64), own.astype(np.float64)])
        sums = np.zeros(own.shape) if bias is None else np.tile(bias.astype(np.float64), (len(own), 1))
        for k in range(taps):
            sums += weight[:, k].astype(np.float64) * inputs[k : k + len(own)]
        y[query_start[sequence] : query_start[sequence + 1]] = (
            sums / (1 + np.exp(-sums)) if activation == "silu" else sums
        )
        for t in range(len(own)):
            ring[row, (past + t) % rows] = own[t]
    return y, ring


def gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    decay: Array,
    beta: Array,
    states: DeltaStates,
    query_start: Array,
    past_len: Array,
    state_slot: Array | None = None,
    *,
    scale: float = 0.0,
    l2_norm: int = 1,
) -> Floats:
    """Return output [T, Hv, Dv], token by token, and write `states`."""
    group = value.shape[1] // key.shape[1]
    recent = states.recent_decays.shape[1]
    keys, queries = (_unit_rows(rows) if l2_norm else rows.astype(np.float64) for rows in (key, query))
    queries = queries * (scale or key.shape[2] ** -0.5)
    output = np.zeros(value.shape)
    for sequence, past in enumerate(past_len.tolist()):
        first, end = query_start[sequence : sequence + 2].tolist()
        if first == end:
            continue
        row = sequence if state_slot is None else int(state_slot[sequence])
        known = int(states.state_len[row]) if past else 0
        committed = max(known, past + end - first - recent) if end - first <= recent else past
        committed = committed if past else 0
        states.state[row] = _apply_kept(states, row, known, committed) if past else 0
        states.state_len[row] = committed
        state = _apply_kept(states, row, committed, past)
        for token in range(first, end):
            state = state * np.exp(decay[token].astype(np.float64))[:, None, None]
            token_key, token_query = (np.repeat(rows[token], group, axis=0) for rows in (keys, queries))
            found = np.einsum("hk,hkv->hv", token_key, state)
            update = beta[token].astype(np.float64)[:, None] * (value[token].astype(np.float64) - found)
            state = state + token_key[:, :, None] * update[:, None, :]
            output[token] = np.einsum("hk,hkv->hv", token_query, state)
            if end - first <= recent:
                slot = (past + token - first) % recent
                states.recent_keys[row, slot] = keys[token]
                states.recent_updates[row, slot] = update
                states.recent_decays[row, slot] = decay[token]
        if end - first > recent:
            states.state[row], states.state_len[row] = state, past + end - first
    return output


def _apply_kept(states: DeltaStates, row: int, first: int, end: int) -> Floats:
    """Return S [Hv, Dk, Dv] after the kept updates of positions first .. end."""
    state: Floats = states.state[row]
    group = state.shape[0] // states.recent_keys.shape[2]
    for position in range(first, end):
        slot = position % states.recent_decays.shape[1]
        kept_key = np.repeat(states.recent_keys[row, slot], group, axis=0)
        state = state * np.exp(states.recent_decays[row, slot])[:, None, None]
        state = state + kept_key[:, :, None] * states.recent_updates[row, slot][:, None, :]
    return state


def _unit_rows(rows: Array) -> Floats:
    wide = rows.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide * wide).sum(axis=-1, keepdims=True) + KEY_NORM_EPSILON))

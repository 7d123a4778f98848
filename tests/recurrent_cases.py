"""Draws steps of recurrent layers, runs their operators in place, and computes them in plain float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import devices
import numpy as np
import onnxruntime as ort
from fused_cases import Feeds, Outputs, build_fused_model

import ortolan.custom_ops
from ortolan.custom_ops import recurrent_reference
from ortolan.custom_ops.recurrent_reference import DeltaStates

STATES = ("state", "recent_keys", "recent_updates", "recent_decays", "state_len")
RECENT = 16
FLOAT32 = np.dtype(np.float32)


@functools.lru_cache(maxsize=8)
def _session(model: bytes, device: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    ortolan.custom_ops.register(options)
    return ort.InferenceSession(model, options, providers=[devices.PROVIDERS[device]])


def run(name: str, feeds: Feeds, outputs: Outputs, in_place: dict[str, str], **attributes: object) -> Feeds:
    """Run one operator with the named outputs in the buffers of inputs; `feeds` stay as they are."""
    model = build_fused_model(name, feeds, outputs, attributes).SerializeToString(deterministic=True)
    session = _session(model, devices.current())
    if devices.current() == "cuda":
        return devices.run(session, feeds, outputs, in_place)
    binding = session.io_binding()
    buffers = {key: array.copy() for key, array in feeds.items()}
    for key, array in buffers.items():
        binding.bind_input(key, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for key, (shape, dtype) in outputs.items():
        buffer = buffers[in_place[key]] if key in in_place else np.full(shape, np.nan, dtype)
        buffers[key] = buffer
        binding.bind_output(key, "cpu", 0, dtype, shape, buffer.ctypes.data)
    session.run_with_iobinding(binding)
    return {key: buffers[key] for key in outputs}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaCase:
    """Sizes and options of one GatedDeltaRule."""

    key_heads: int = 2
    value_heads: int = 4
    key_size: int = 16
    value_size: int = 24
    rows: int = 3
    l2_norm: int = 1
    scale: float = 0.0

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes of the node."""
        return {"l2_norm": self.l2_norm, "scale": self.scale}


def fresh_states(case: DeltaCase) -> Feeds:
    """Return state buffers that no token has reached: NaN, and lengths of nothing."""
    shapes = {
        "state": (case.rows, case.value_heads, case.key_size, case.value_size),
        "recent_keys": (case.rows, RECENT, case.key_heads, case.key_size),
        "recent_updates": (case.rows, RECENT, case.value_heads, case.value_size),
        "recent_decays": (case.rows, RECENT, case.value_heads),
    }
    states = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    return states | {"state_len": np.full(case.rows, 1000, np.int32)}


def delta_tokens(case: DeltaCase, count: int, seed: int = 0) -> Feeds:
    """Draw the five inputs of `count` tokens; a published model's decays and betas are of this kind."""
    rng, element = np.random.default_rng(seed), devices.element()
    scale = 1.0 if case.l2_norm else case.key_size**-0.5

    def draw(heads: int, size: int, deviation: float) -> np.ndarray:
        return (rng.standard_normal((count, heads, size)) * deviation).astype(element)

    return {
        "query": draw(case.key_heads, case.key_size, scale),
        "key": draw(case.key_heads, case.key_size, scale),
        "value": draw(case.value_heads, case.value_size, 1.0),
        "decay": -rng.exponential(0.1, (count, case.value_heads)).astype(np.float32),
        "beta": rng.random((count, case.value_heads), np.float32),
    }


def delta_step(
    case: DeltaCase, tokens: Feeds, states: Feeds, lengths: Sequence[int], past: Sequence[int], **extra: np.ndarray
) -> tuple[np.ndarray, Feeds]:
    """Run a step of GatedDeltaRule: output [T, Hv, Dv], and the states after it."""
    feeds = {**tokens, **states, **packing(lengths, past), **extra}
    outputs: Outputs = {"output": (tokens["value"].shape, tokens["value"].dtype)}
    outputs |= {f"{name}_out": (states[name].shape, states[name].dtype) for name in STATES}
    in_place = {f"{name}_out": name for name in STATES}
    results = run("GatedDeltaRule", feeds, outputs, in_place, **case.attributes)
    return results["output"], {name: results[f"{name}_out"] for name in STATES}


def packing(lengths: Sequence[int], past: Sequence[int]) -> Feeds:
    """Name the row boundaries and past lengths of a step."""
    return {"query_start": np.cumsum([0, *lengths]).astype(np.int32), "past_len": np.array(past, np.int32)}


def rows_of(tokens: Feeds, first: int, end: int) -> Feeds:
    """Take the tokens first .. end."""
    return {name: array[first:end] for name, array in tokens.items()}


def expected_delta(
    case: DeltaCase, tokens: Feeds, states: Feeds, lengths: Sequence[int], past: Sequence[int], **extra: np.ndarray
) -> tuple[np.ndarray, DeltaStates]:
    """Compute a step in float64: output, and the states after it."""
    after = DeltaStates.copy_of(states)
    output = recurrent_reference.gated_delta_rule(
        **tokens, states=after, **packing(lengths, past), **extra, **case.attributes
    )
    return output, after


def plain_delta(case: DeltaCase, tokens: Feeds) -> tuple[np.ndarray, np.ndarray]:
    """Compute one fresh sequence in float32: output [T, Hv, Dv] and the state behind it [Hv, Dk, Dv]."""
    wide = {name: array.astype(np.float32) for name, array in tokens.items()}
    group = case.value_heads // case.key_heads
    for name in ("query", "key"):
        if case.l2_norm:
            wide[name] = wide[name] / np.sqrt((wide[name] ** 2).sum(axis=-1, keepdims=True) + np.float32(1e-6))
        wide[name] = np.repeat(wide[name], group, axis=1)
    state = np.zeros((case.value_heads, case.key_size, case.value_size), np.float32)
    output = np.zeros(wide["value"].shape, np.float32)
    for t in range(len(output)):
        state = state * np.exp(wide["decay"][t])[:, None, None]
        found = np.einsum("hk,hkv->hv", wide["key"][t], state)
        update = wide["beta"][t][:, None] * (wide["value"][t] - found)
        state = state + wide["key"][t][:, :, None] * update[:, None, :]
        output[t] = np.einsum("hk,hkv->hv", wide["query"][t], state)
    return output * np.float32(case.scale or case.key_size**-0.5), state

"""Draws inputs of the operators of mixtures, runs them, and computes them in plain arithmetic of their precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import devices
import numpy as np
import onnxruntime as ort
from fused_cases import Feeds, Outputs, build_fused_model

import ortolan.custom_ops
from ortolan.custom_ops import expert_reference

INT32, FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


@functools.lru_cache(maxsize=8)
def _session(model: bytes, device: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    ortolan.custom_ops.register(options)
    return ort.InferenceSession(model, options, providers=[devices.PROVIDERS[device]])


def run(name: str, feeds: Feeds, outputs: Outputs, **attributes: object) -> Feeds:
    """Run one operator on the current device."""
    model = build_fused_model(name, feeds, outputs, attributes).SerializeToString(deterministic=True)
    session = _session(model, devices.current())
    if devices.current() == "cuda":
        return devices.run(session, feeds, outputs)
    return dict(zip(outputs, session.run(list(outputs), dict(feeds)), strict=True))


def run_gate(feeds: Feeds, **attributes: object) -> tuple[np.ndarray, np.ndarray]:
    """Run MoeGate: experts [T, K], weights [T, K]."""
    shape = (len(feeds["router_logits"]), attributes["top_k"])
    results = run("MoeGate", feeds, {"experts": (shape, INT32), "weights": (shape, FLOAT32)}, **attributes)
    return results["experts"], results["weights"]


def run_experts(feeds: Feeds, **attributes: object) -> np.ndarray:
    """Run MoeExperts: y [T, H]."""
    return run("MoeExperts", feeds, {"y": (feeds["x"].shape, feeds["x"].dtype)}, **attributes)["y"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCase:
    """Sizes and options of one MoeExperts."""

    hidden: int = 64
    inner: int = 48
    experts: int = 8
    top_k: int = 2
    activation: str = "silu_mul"
    biases: bool = False
    residual: bool = False

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes of the node; the limit is one that inputs pass."""
        clamped = {"limit": 1.5, "alpha": 1.3} if self.activation == "clamped_silu_mul" else {}
        return {"activation": self.activation, **clamped}


def expert_feeds(case: ExpertCase, tokens: int, seed: int = 0) -> Feeds:
    """Draw a step; each token takes different experts."""
    rng, element = np.random.default_rng(seed), devices.element()

    def draw(*shape: int, deviation: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * np.float32(deviation)).astype(element)

    order = np.argsort(rng.random((tokens, case.experts)), axis=1)
    feeds = {
        "x": draw(tokens, case.hidden),
        "experts": order[:, : case.top_k].astype(np.int32),
        "weights": rng.random((tokens, case.top_k), np.float32),
        "gate_up": draw(case.experts, 2 * case.inner, case.hidden, deviation=case.hidden**-0.5),
        "down": draw(case.experts, case.hidden, case.inner, deviation=case.inner**-0.5),
    }
    if case.biases:
        feeds |= {"gate_up_bias": draw(case.experts, 2 * case.inner), "down_bias": draw(case.experts, case.hidden)}
    if case.residual:
        feeds["residual"] = draw(tokens, case.hidden)
    return feeds


def plain_experts(
    case: ExpertCase, feeds: Feeds, round_rows: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> np.ndarray:
    """Compute y [T, H] in float32, with the inner rows rounded to the element type, and both products' inputs again."""
    element = feeds["x"].dtype
    wide = {name: feeds[name].astype(np.float32) for name in feeds if name != "experts"}
    y = np.zeros(feeds["x"].shape, np.float32)
    for expert in range(case.experts):
        tokens, choices = np.nonzero(feeds["experts"] == expert)
        inner = round_rows(wide["x"][tokens]) @ wide["gate_up"][expert].T
        if case.biases:
            inner = inner + wide["gate_up_bias"][expert]
        gates, factors = np.split(inner, 2, axis=1)
        attributes = {k: v for k, v in case.attributes.items() if k != "activation"}
        hidden = expert_reference.gate(case.activation, gates, factors, **attributes).astype(np.float32)
        out = round_rows(devices.rounded(hidden, element)) @ wide["down"][expert].T
        if case.biases:
            out = out + wide["down_bias"][expert]
        np.add.at(y, tokens, wide["weights"][tokens, choices, None] * out)
    return y + wide["residual"] if case.residual else y

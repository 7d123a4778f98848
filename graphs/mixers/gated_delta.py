"""A gated delta network: projections, a causal convolution, the gated delta rule, and a gated norm.

    q, k, v = CausalConv(qkv(x));  decay = -exp(a_log) * softplus(decay(x) + dt_bias)
    beta = beta_scale * sigmoid(beta(x))
    y = output(RMSNorm(GatedDeltaRule(q, k, v, decay, beta)) * silu(gate(x)))

Source: transformers' modeling_qwen3_next.py, `Qwen3NextGatedDeltaNet`; arXiv 2412.06464.
"""

from __future__ import annotations

import numpy as np

from ortolan import contract
from ortolan.graphs.builder import FLOAT, INT32, Tensor, emitters
from ortolan.graphs.config import GatedDeltaConfig
from ortolan.graphs.kinds import LayerKind, Shapes, linear_shapes
from ortolan.graphs.parts import Normed, Parts

PROJECTIONS = ("qkv", "gate", "beta", "decay")
STATES = ("state", "recent_keys", "recent_updates", "recent_decays", "state_len")


def weights(config: GatedDeltaConfig, hidden_size: int) -> Shapes:
    """List the weights."""
    heads, values = config.num_value_heads, config.num_value_heads * config.value_size
    rows = {"qkv": config.features, "gate": values, "beta": heads, "decay": heads}
    linear = {f"delta.{name}": (count, hidden_size, False) for name, count in rows.items()}
    shapes = linear_shapes({**linear, "delta.output": (hidden_size, values, False)})
    return shapes | {
        "delta.conv": (config.features, config.conv_taps),
        "delta.a_log": (heads,),
        "delta.dt_bias": (heads,),
        "delta.norm.weight": (config.value_size,),
    }


class DeltaState:
    """What one layer keeps: the state of the rule, the updates of the last tokens, and inputs of the convolution."""

    def __init__(self, parts: Parts, index: int, config: GatedDeltaConfig) -> None:
        key, value = (config.num_key_heads, config.key_size), (config.num_value_heads, config.value_size)
        recent = contract.RECENT_TOKENS
        sequences = f"states.{config.kind}" if parts.step.state_slots else "B"
        shapes: dict[str, tuple[int, list[int | str]]] = {
            "state": (FLOAT, [value[0], key[1], value[1]]),
            "recent_keys": (FLOAT, [recent, *key]),
            "recent_updates": (FLOAT, [recent, *value]),
            "recent_decays": (FLOAT, [recent, value[0]]),
            "state_len": (INT32, []),
            "conv_state": (parts.options.onnx_type, [recent + config.conv_taps - 1, config.features]),
        }
        self._graph = parts.graph
        self._shapes = {role: (dtype, [sequences, *shape]) for role, (dtype, shape) in shapes.items()}
        self._names = {role: contract.layer_state(index, role) for role in shapes}
        self.inputs = {role: parts.graph.input(self._names[role], *self._shapes[role]) for role in shapes}
        self.updated: dict[str, Tensor] = {}

    def declare_outputs(self) -> None:
        """Declare what the step updated as outputs of the graph."""
        for role, tensor in self.updated.items():
            self._graph.output(tensor, contract.output(self._names[role]), *self._shapes[role])


def add(parts: Parts, index: int, x: Tensor | Normed, residual: Tensor | None) -> Tensor:
    """Add one layer, [T, hidden] -> [T, hidden]."""
    config, path, graph = parts.config.layers[index].mixer, f"layers.{index}/delta", parts.graph
    state = parts.states[index] = DeltaState(parts, index, config)
    step = {"query_start": parts.step.query_start, "past_len": parts.step.past_len}
    step |= {"state_slot": slot} if (slot := parts.step.state_slots.get(config.kind)) is not None else {}
    qkv, gate, beta, decay = parts.projections(path, parts.value(x), PROJECTIONS)
    mixed, state.updated["conv_state"] = graph.operator(
        f"{path}/CausalConv",
        emitters.causal_conv,
        {"x": qkv, "weight": parts.weight(f"layers.{index}.delta.conv"), "conv_state": state.inputs["conv_state"]}
        | step,
        num_outputs=2,
    )
    query, key, value = _heads(parts, path, config, mixed)
    read, *updated = graph.operator(
        f"{path}/GatedDeltaRule",
        emitters.gated_delta_rule,
        {"query": query, "key": key, "value": value}
        | {"decay": _decay(parts, index, decay), "beta": _beta(parts, path, config, beta)}
        | {role: state.inputs[role] for role in STATES}
        | step,
        num_outputs=1 + len(STATES),
    )
    state.updated |= dict(zip(STATES, updated, strict=True))
    return _finish(parts, path, config, read, gate, residual)


def _heads(parts: Parts, path: str, config: GatedDeltaConfig, mixed: Tensor) -> list[Tensor]:
    """Part queries, keys [T, Hk, Dk] and values [T, Hv, Dv]."""
    key, value = (config.num_key_heads, config.key_size), (config.num_value_heads, config.value_size)
    sizes = [key[0] * key[1], key[0] * key[1], value[0] * value[1]]
    constant = parts.graph.constant("sizes/" + "x".join(map(str, sizes)), sizes, np.int64)
    flat = parts.graph.nodes(f"{path}/qkv/Split", "Split", [mixed, constant], 3, {"axis": 1})
    names = ("query", "key", "value")
    return [
        parts.graph.reshape(f"{path}/{name}/Reshape", tensor, (0, *shape))
        for name, tensor, shape in zip(names, flat, (key, key, value), strict=True)
    ]


def _decay(parts: Parts, index: int, given: Tensor) -> Tensor:
    """Compute the logarithm of the state's factor in float32, [T, Hv]."""
    graph, path = parts.graph, f"layers.{index}/delta/decay"
    a_log, dt_bias = (
        parts.in_float32(f"{path}/{name}/Cast", parts.weight(f"layers.{index}.delta.{name}"))
        for name in ("a_log", "dt_bias")
    )
    wide = graph.node(f"{path}/Add", "Add", [parts.in_float32(f"{path}/Cast", given), dt_bias])
    rate = graph.node(f"{path}/Neg", "Neg", [graph.node(f"{path}/Exp", "Exp", [a_log])])
    return graph.node(f"{path}/Mul", "Mul", [rate, graph.node(f"{path}/Softplus", "Softplus", [wide])])


def _beta(parts: Parts, path: str, config: GatedDeltaConfig, given: Tensor) -> Tensor:
    """Compute how much of a new value is written, [T, Hv] float32."""
    beta = parts.in_float32(f"{path}/beta/Cast", parts.graph.node(f"{path}/beta/Sigmoid", "Sigmoid", [given]))
    if config.beta_scale == 1.0:
        return beta
    scale = parts.graph.constant(f"{path}/beta/scale", config.beta_scale, np.float32)
    return parts.graph.node(f"{path}/beta/Mul", "Mul", [beta, scale])


def _finish(
    parts: Parts, path: str, config: GatedDeltaConfig, read: Tensor, gate: Tensor, residual: Tensor | None
) -> Tensor:
    """Add the gated norm of each head and the output projection."""
    graph, shape = parts.graph, (0, config.num_value_heads, config.value_size)
    epsilon = parts.config.norm_epsilon if config.norm_epsilon is None else config.norm_epsilon
    normed = parts.rms_norm(f"{path}/norm", read, parts.weight(f"{path}.norm.weight".replace("/", ".")), epsilon)
    gated = parts.gate(f"{path}/gate", graph.reshape(f"{path}/gate/Reshape", gate, shape), normed, "silu")
    flat = graph.reshape(f"{path}/Reshape", gated, (0, config.num_value_heads * config.value_size))
    return parts.linear(f"{path}/output", flat, residual)


MIXER = LayerKind(weights=weights, add=add)

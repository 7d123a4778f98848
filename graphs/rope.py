"""Adds the rotary embeddings: cosine and sine of the step's positions, once for all layers that share a rope."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from ortolan import contract
from ortolan.graphs.builder import FLOAT, INT64, Tensor, emitters
from ortolan.graphs.config import QueryScale, Rope, RopeTable
from ortolan.graphs.parts import Parts, Rotation

ANGLES = "RopeAngles"


def add_rotations(parts: Parts) -> None:
    """Compute what depends on the positions of a step: `parts.rotations`, and `parts.query_scales`.

    All of it is computed in float32, whatever the model's type; plain graphs then round cosines and sines.
    """
    scales = dict.fromkeys(layer.mixer.query_scale for layer in parts.config.layers)
    if not parts.config.ropes and not any(scales):
        return
    positions = parts.graph.input(contract.POSITIONS, INT64, ["T"])
    parts.rotations = _rotations(parts, positions)
    parts.query_scales = {scale: _query_scale(parts, scale, positions) for scale in scales if scale is not None}


def _rotations(parts: Parts, positions: Tensor) -> dict[str, Rotation]:
    graph, ropes = parts.graph, parts.config.ropes
    variants = any(rope.first_rows if isinstance(rope, RopeTable) else len(rope.variants) > 1 for rope in ropes)
    variant = graph.input(contract.ROPE_VARIANT, INT64, ["T"]) if variants else None
    rotations, column = {}, None
    for rope in ropes:
        if isinstance(rope, RopeTable):
            rotations[rope.name] = _looked_up(parts, rope, positions, variant)
        elif variant is None and parts.options.fused:
            rotations[rope.name] = angles(parts, rope, positions, f"rope.{rope.name}")
        else:
            column = _column(parts, positions) if column is None else column
            rotations[rope.name] = _computed(parts, rope, column, variant)
    return rotations


def _query_scale(parts: Parts, scale: QueryScale, positions: Tensor) -> Tensor:
    """Compute the factors of queries, [T, 1, 1]."""
    graph, path = parts.graph, f"query_scale.{scale.beta:g}.{scale.length:g}"
    factor = graph.node(f"{path}/Cast", "Cast", [positions], {"to": FLOAT})
    one = graph.constant("one", 1, np.float32)
    for name, operands in (
        ("Div", [graph.constant(f"{path}/length", scale.length, np.float32)]),
        ("Floor", []),
        ("Add", [one]),
        ("Log", []),
        ("Mul", [graph.constant(f"{path}/beta", scale.beta, np.float32)]),
    ):
        factor = graph.node(f"{path}/{name}", name, [factor, *operands])
    factor = parts.cast(f"{path}/rounded/Cast", graph.node(f"{path}/one/Add", "Add", [factor, one]))
    return graph.node(f"{path}/Unsqueeze", "Unsqueeze", [factor, graph.constant("axes/last_two", [1, 2], np.int64)])


def _column(parts: Parts, positions: Tensor) -> Tensor:
    """Return positions as a float32 column [T, 1]."""
    wide = parts.graph.node("rope/Cast", "Cast", [positions], {"to": FLOAT})
    return parts.graph.node("rope/Unsqueeze", "Unsqueeze", [wide, parts.graph.constant("axes/last", [1], np.int64)])


def angles(parts: Parts, rope: Rope, positions: Tensor, path: str) -> Rotation:
    """Compute cosine and sine of a rope's only variant in one operator."""
    chosen = rope.variants[0]
    frequencies = parts.graph.constant(f"rope.{rope.name}/inv_freq", [chosen.inv_freq], np.float32)
    inputs = {"positions": positions, "inv_freq": frequencies}
    factor = float(np.float32(chosen.attention_factor))
    cosine, sine = parts.graph.operator(f"{path}/{ANGLES}", emitters.rope_angles, inputs, 2, factor=factor)
    return Rotation(cosine, sine, rope.rotary_size)


def _computed(parts: Parts, rope: Rope, column: Tensor, variant: Tensor | None) -> Rotation:
    graph, name = parts.graph, f"rope.{rope.name}"
    table = np.array([v.inv_freq for v in rope.variants], np.float32)
    factors = np.array([[v.attention_factor] for v in rope.variants], np.float32)
    frequencies = graph.constant(f"{name}/inv_freq", table, np.float32)
    factor = graph.constant(f"{name}/attention_factor", factors, np.float32)
    if variant is not None:
        frequencies = graph.node(f"{name}/inv_freq_of_variant", "Gather", [frequencies, variant])
        factor = graph.node(f"{name}/factor_of_variant", "Gather", [factor, variant])
    angles = graph.node(f"{name}/Mul", "Mul", [column, frequencies])
    values = []
    for function in ("Cos", "Sin"):
        value = graph.node(f"{name}/{function}", function, [angles])
        if np.any(factors != 1):
            value = graph.node(f"{name}/{function}/Mul", "Mul", [value, factor])
        if not parts.options.fused:
            value = parts.cast(f"{name}/{function}/Cast", value)
        values.append(_with_batch(parts, f"{name}/{function}", value))
    return Rotation(values[0], values[1], rope.rotary_size)


def _looked_up(parts: Parts, rope: RopeTable, positions: Tensor, variant: Tensor | None) -> Rotation:
    graph, name = parts.graph, f"rope.{rope.name}"
    if variant is not None:
        first = graph.constant(f"{name}/first_rows", [rope.first_rows], np.int64)
        offset = graph.node(f"{name}/offset/Mul", "Mul", [variant, first])
        positions = graph.node(f"{name}/positions/Add", "Add", [positions, offset])
    values = []
    for part in ("cosine", "sine"):
        table = graph.weight(f"{name}.{part}", parts.options.onnx_type, (rope.rows, rope.rotary_size // 2))
        value = graph.node(f"{name}/{part}/Gather", "Gather", [table, positions])
        values.append(_with_batch(parts, f"{name}/{part}", parts.in_float32(f"{name}/{part}/Cast", value)))
    return Rotation(values[0], values[1], rope.rotary_size)


def _with_batch(parts: Parts, path: str, value: Tensor) -> Tensor:
    axis = parts.graph.constant("axes/first", [0], np.int64)
    return parts.graph.node(f"{path}/Unsqueeze", "Unsqueeze", [value, axis])


def list_late(graph: onnx.GraphProto, operators: Sequence[str]) -> None:
    """List each node of some operators right before its first reader; an operator comes after those that read it.

    Of a node's inputs ONNX Runtime computes the one that is listed last first. So angles come before the first layer,
    and no kernel of another kind stands between a projection and its QkvAttention, whose launches overlap.
    """
    nodes = list(graph.node)
    for operator in operators:
        for moved in [node for node in nodes if node.op_type == operator]:
            nodes.remove(moved)
            nodes.insert(next(i for i, n in enumerate(nodes) if set(n.input) & set(moved.output)), moved)
    del graph.node[:]
    graph.node.extend(nodes)

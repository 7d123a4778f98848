"""Gate and up projections of a gated MLP: one linear layer with the activation in it.

1. Mul(Mul(gate, Sigmoid(gate)), up)          silu_mul
2. Mul(Gelu(gate), up)                        gelu_mul, or gelu_tanh_mul where it is approximate
"""

from __future__ import annotations

from dataclasses import dataclass

from ortolan.custom_ops import emitters
from ortolan.graphs.fusions.gemm import Linear, find_linear, join_linears
from ortolan.graphs.fusions.rewriter import GraphRewriter, Node, Tensor, only_user, produced_by, producer


@dataclass(frozen=True, slots=True)
class Gate:
    """The activated projection."""

    linear: Linear
    activation: str


def fuse_gated_mlp(rewriter: GraphRewriter) -> None:
    """Apply the cases to every product of a gate and a projection."""
    for node in rewriter.nodes("Mul"):
        for gate_side, up_side in (node.inputs, reversed(node.inputs)):
            gate, up = _gate(rewriter, gate_side), find_linear(rewriter, producer(up_side))
            if gate is not None and up is not None and only_user(rewriter, up.y) is node:
                _fuse(rewriter, node, gate, up)
                break


def _fuse(rewriter: GraphRewriter, product: Node, gate: Gate, up: Linear) -> None:
    joint = join_linears(rewriter, [gate.linear, up], "gate_up")
    if joint is None or gate.linear.rows != up.rows:
        return
    path = gate.linear.path.rsplit("/", 1)[0]
    inputs = {"x": joint.norm.x, "weight": joint.weight, "norm_weight": joint.norm.weight, "bias": joint.bias}
    rewriter.operator(
        f"{path}/gate_up/FusedLinear",
        emitters.fused_linear,
        inputs,
        [product.outputs[0]],
        epsilon=joint.norm.epsilon,
        activation=gate.activation,
    )


def _gate(rewriter: GraphRewriter, tensor: Tensor) -> Gate | None:
    """Read a tensor as an activated projection that nothing else reads."""
    if only_user(rewriter, tensor) is None:
        return None
    gelu = produced_by(tensor, "Gelu")
    if gelu is not None:  # case 2
        linear = find_linear(rewriter, producer(gelu.inputs[0]))
        if linear is None or only_user(rewriter, linear.y) is None:
            return None
        approximate = gelu.attrs.get("approximate", "none") == "tanh"
        return Gate(linear, "gelu_tanh_mul" if approximate else "gelu_mul")
    product = produced_by(tensor, "Mul")  # case 1
    if product is None:
        return None
    for value, sigmoid_side in (product.inputs, reversed(product.inputs)):
        sigmoid = produced_by(sigmoid_side, "Sigmoid")
        linear = find_linear(rewriter, producer(value))
        if sigmoid is not None and linear is not None and sigmoid.inputs[0] is value and len(value.outputs) == 2:
            return Gate(linear, "silu_mul")
    return None

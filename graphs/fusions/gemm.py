"""Finds linear layers, and the norm before them that can be folded in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx

from ortolan.graphs.external_data import ExternalTensor, point_to
from ortolan.graphs.fusions.rewriter import GraphRewriter, Node, Tensor, Weight, produced_by

DEFAULT_EPSILON = 1e-5  # of RMSNormalization, in ONNX


@dataclass(frozen=True, slots=True)
class Linear:
    """A Gemm that is a linear layer: y = x @ weight^T + bias, with external weights."""

    node: Node
    weight: Weight
    bias: Weight | None

    @property
    def x(self) -> Tensor:
        """[T, I]."""
        return self.node.inputs[0]

    @property
    def y(self) -> Tensor:
        """[T, O]."""
        return self.node.outputs[0]

    @property
    def rows(self) -> int:
        """Output features O."""
        return int(self.weight.proto.dims[0])

    @property
    def path(self) -> str:
        """Where the layer stands, e.g. layers.3/attention/query."""
        return str(self.node.name).rsplit("/", 1)[0]


def find_linear(rewriter: GraphRewriter, node: Node | None) -> Linear | None:
    """Read a node as a linear layer; None where it is something else."""
    if node is None or node.op != "Gemm" or node.domain:
        return None
    factors = (node.attrs.get("alpha", 1.0), node.attrs.get("beta", 1.0))
    if factors != (1.0, 1.0) or node.attrs.get("transA", 0) or not node.attrs.get("transB", 0):
        return None
    weight = rewriter.weight(node.inputs[1])
    bias = rewriter.weight(node.inputs[2]) if len(node.inputs) > 2 else None
    if weight is None or (len(node.inputs) > 2 and (bias is None or len(bias.proto.dims) != 1)):
        return None
    return Linear(node, weight, bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """What a FusedLinear takes: x as it is, or the norm of x."""

    x: Tensor
    weight: Tensor | None = None
    epsilon: float = DEFAULT_EPSILON


def fold_norm(rewriter: GraphRewriter, x: Tensor, users: Sequence[Node]) -> Norm:
    """Take the RMSNormalization that gives x, if `users` are all that read it."""
    node = produced_by(x, "RMSNormalization")
    readers = {id(user) for user in x.outputs}
    is_output = any(x is output for output in rewriter.graph.outputs)
    if node is None or readers != {id(user) for user in users} or is_output or not is_last_axis(rewriter, node):
        return Norm(x)
    return Norm(node.inputs[0], node.inputs[1], float(node.attrs.get("epsilon", DEFAULT_EPSILON)))


def is_last_axis(rewriter: GraphRewriter, norm: Node) -> bool:
    """Tell whether a norm is over the last axis, with an external weight."""
    weight = rewriter.weight(norm.inputs[1])
    return norm.attrs.get("axis", -1) == -1 and weight is not None and len(weight.proto.dims) == 1


def join_weights(parts: Sequence[Weight], name: str) -> Weight | None:
    """Join weights whose bytes follow each other in one file; None where they do not."""
    first = parts[0]
    for left, right in pairwise(parts):
        same = left.where.location == right.where.location and left.where.end == right.where.offset
        alike = left.proto.data_type == right.proto.data_type and left.proto.dims[1:] == right.proto.dims[1:]
        if not (same and alike):
            return None
    proto = onnx.TensorProto(name=name, data_type=first.proto.data_type)
    proto.dims.extend([sum(part.proto.dims[0] for part in parts), *first.proto.dims[1:]])
    where = ExternalTensor(
        location=first.where.location,
        offset=first.where.offset,
        length=sum(part.where.length for part in parts),
    )
    point_to(proto, where)
    return Weight(proto, where)


@dataclass(frozen=True, slots=True)
class Joint:
    """Linear layers of one input whose weights are one range of the file."""

    norm: Norm
    weight: Tensor
    bias: Tensor | None


def join_linears(rewriter: GraphRewriter, linears: Sequence[Linear], name: str) -> Joint | None:
    """Join linear layers under a new name beside theirs; None where inputs, uses or bytes forbid it.

    They must read one tensor, and their weights and biases must follow each other in the file.
    """
    x = linears[0].x
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if any(linear.x is not x for linear in linears) or len(biases) not in (0, len(linears)):
        return None
    prefix = linears[0].weight.proto.name.rsplit(".", 2)[0]
    weight = join_weights([linear.weight for linear in linears], f"{prefix}.{name}.weight")
    bias = join_weights(biases, f"{prefix}.{name}.bias") if biases else None
    if weight is None or (biases and bias is None):
        return None
    return Joint(
        fold_norm(rewriter, x, [linear.node for linear in linears]),
        rewriter.declare(weight),
        None if bias is None else rewriter.declare(bias),
    )

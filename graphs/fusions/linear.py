"""Every other linear layer, with its neighbours.

1. RMSNormalization before it, where nothing else reads the norm: folded in.
2. Add of a residual after it, where nothing else reads the product: folded in. Its shape is written down, so that
   the sum can be formed in the residual's buffer.
3. Cast to float32 after it (the head): the float32 output.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from ortolan.custom_ops import emitters
from ortolan.graphs.fusions.gemm import Linear, find_linear, fold_norm
from ortolan.graphs.fusions.rewriter import GraphRewriter, Node, Tensor, only_user


def fuse_linears(rewriter: GraphRewriter) -> None:
    """Turn each remaining linear layer into a FusedLinear."""
    for node in rewriter.nodes("Gemm"):
        linear = find_linear(rewriter, node)
        if linear is not None:
            _fuse(rewriter, linear)


def _fuse(rewriter: GraphRewriter, linear: Linear) -> None:
    norm = fold_norm(rewriter, linear.x, [linear.node])  # case 1
    user = only_user(rewriter, linear.y)
    residual = _residual(rewriter, linear, user)  # case 2
    outputs = [linear.y]
    if residual is not None and user is not None:
        outputs = [user.outputs[0]]
        rewriter.describe_rows(outputs[0], linear.weight.proto.data_type, linear.rows)
    elif user is not None and user.op == "Cast" and user.attrs["to"] == onnx.TensorProto.FLOAT:  # case 3
        outputs = [gs.Variable.empty(), user.outputs[0]]
    inputs = {
        "x": norm.x,
        "weight": linear.node.inputs[1],
        "norm_weight": norm.weight,
        "bias": linear.node.inputs[2] if linear.bias is not None else None,
        "residual": residual,
    }
    rewriter.operator(f"{linear.path}/FusedLinear", emitters.fused_linear, inputs, outputs, epsilon=norm.epsilon)


def _residual(rewriter: GraphRewriter, linear: Linear, user: Node | None) -> Tensor | None:
    """Return the other side of an Add, if it has the product's shape."""
    if user is None or user.op != "Add" or user.domain:
        return None
    other = next((t for t in user.inputs if t is not linear.y), None)
    return other if other is not None and is_rows_of(rewriter, other, linear.rows) else None


def is_rows_of(rewriter: GraphRewriter, tensor: Tensor, features: int) -> bool:
    """Tell whether a value is [T, features], so that adding it broadcasts nothing."""
    shape = rewriter.shapes.get(tensor.name, [])
    return len(shape) == 2 and shape[0] != 1 and shape[1] == features

"""The angles of a rope: Cast, Mul, Cos and Sin of the positions become one RopeAngles.

Cosine and sine may be multiplied by one constant. Where a graph chooses among variants of a rope, rounds its angles to
half precision, or reads them elsewhere too, they stay as they are.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ortolan.custom_ops import emitters
from ortolan.graphs.fusions.rewriter import GraphRewriter, Node, Tensor, only_user, produced_by


def fuse_angles(rewriter: GraphRewriter) -> None:
    """Rewrite each pair of Cos and Sin of one value."""
    for cosine in rewriter.nodes("Cos"):
        angles = cosine.inputs[0]
        users = {node.op: node for node in angles.outputs}
        if len(angles.outputs) == 2 and users.keys() == {"Cos", "Sin"}:
            _fuse(rewriter, angles, [users["Cos"], users["Sin"]])


def list_angles_late(graph: onnx.GraphProto) -> None:
    """List each RopeAngles right before its first reader.

    Of a node's inputs ONNX Runtime computes the one that is listed last first. So angles come before the first layer,
    and no kernel of another kind stands between a projection and its QkvRopeAppend, whose launches overlap.
    """
    nodes = list(graph.node)
    for angles in [node for node in nodes if node.op_type == "RopeAngles"]:
        nodes.remove(angles)
        nodes.insert(next(i for i, n in enumerate(nodes) if set(n.input) & set(angles.output)), angles)
    del graph.node[:]
    graph.node.extend(nodes)


def _fuse(rewriter: GraphRewriter, angles: Tensor, functions: list[Node]) -> None:
    product = produced_by(angles, "Mul")
    positions = None if product is None else _positions(product.inputs[0])
    if product is None or positions is None:
        return
    frequencies = product.inputs[1]
    if not isinstance(frequencies, gs.Constant) or list(frequencies.shape[:-1]) != [1]:
        return
    ends = [_end(rewriter, node.outputs[0]) for node in functions]
    if any(end is None for end in ends) or len({end[1] for end in ends if end}) != 1:
        return
    outputs, factors = zip(*[end for end in ends if end], strict=True)
    path = str(product.name).rsplit("/", 1)[0]
    inputs = {"positions": positions, "inv_freq": frequencies}
    rewriter.operator(f"{path}/RopeAngles", emitters.rope_angles, inputs, outputs, factor=factors[0])


def _positions(column: Tensor) -> Tensor | None:
    """Return the int64 positions [T] that a float32 column [T, 1] comes from."""
    unsqueeze = produced_by(column, "Unsqueeze")
    cast = None if unsqueeze is None else produced_by(unsqueeze.inputs[0], "Cast")
    if unsqueeze is None or cast is None or cast.attrs["to"] != onnx.TensorProto.FLOAT:
        return None
    return cast.inputs[0] if _is_constant(unsqueeze.inputs[1], 1) else None


def _end(rewriter: GraphRewriter, values: Tensor) -> tuple[Tensor, float] | None:
    """Follow values [T, R] to where they become [1, T, R]; returns that and the factor on the way."""
    factor = 1.0
    user = only_user(rewriter, values)
    if user is not None and user.op == "Mul" and isinstance(user.inputs[1], gs.Constant):
        if user.inputs[1].values.size != 1 or user.inputs[1].values.dtype != np.float32:
            return None
        factor = float(user.inputs[1].values.reshape(()))
        user = only_user(rewriter, user.outputs[0])
    if user is None or user.op != "Unsqueeze" or not _is_constant(user.inputs[1], 0):
        return None
    return user.outputs[0], factor


def _is_constant(tensor: Tensor, value: int) -> bool:
    return isinstance(tensor, gs.Constant) and tensor.values.tolist() == [value]

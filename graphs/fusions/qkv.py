"""Query, key and value: one linear layer, then norm, RoPE and append in one operator.

1. The three Gemms read one tensor and their weights are neighbours: one FusedLinear, with the norm before it.
2. What follows is, for query and key, Reshape / RMSNormalization per head / RotaryEmbedding and, for the value,
   Reshape, into one RingKvAppend: one QkvRopeAppend, whose query feeds SwaAttention; a SnapKvCapture of the query
   goes into it too.
3. Where 2 does not hold (OLMo 2 normalises the whole projection), a Split gives the old three tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from ortolan.contract import OPERATOR_DOMAIN
from ortolan.custom_ops import emitters
from ortolan.graphs.fusions.gemm import DEFAULT_EPSILON, Joint, Linear, find_linear, is_last_axis, join_linears
from ortolan.graphs.fusions.rewriter import GraphRewriter, Node, Tensor, only_user, produced_by, producer

_PASSED = ("Reshape", "RotaryEmbedding", "RMSNormalization")


@dataclass(frozen=True, slots=True)
class Heads:
    """What happens between a projection and its heads; None where a step is absent."""

    linear: Linear
    norm_weight: Tensor | None
    epsilon: float | None
    cosine: Tensor | None
    sine: Tensor | None


def fuse_qkv(rewriter: GraphRewriter) -> None:
    """Apply the cases to every RingKvAppend."""
    for append in [n for n in rewriter.graph.nodes if n.domain == OPERATOR_DOMAIN and n.op == "RingKvAppend"]:
        _fuse_layer(rewriter, append)


def _fuse_layer(rewriter: GraphRewriter, append: Node) -> None:
    readers = [n for n in append.outputs[0].outputs if n.op == "SwaAttention"]
    if len(readers) != 1:
        return
    tensors = [readers[0].inputs[0], append.inputs[0], append.inputs[1]]
    linears = [_projection(rewriter, tensor) for tensor in tensors]
    if any(linear is None or only_user(rewriter, linear.y) is None for linear in linears):
        return
    found = [linear for linear in linears if linear is not None]
    size = rewriter.shapes[append.inputs[2].name][3]
    if size is None or found[1].rows != found[2].rows or any(linear.rows % size for linear in found):
        return
    chains = [_heads(rewriter, tensor, size) for tensor in tensors]
    joint = join_linears(rewriter, found, "qkv")  # case 1
    if joint is None:
        return
    path = found[0].path.rsplit("/", 1)[0]
    if _same_rotation(chains):  # case 2
        qkv = rewriter.value(f"{path}/qkv/output")
        _add_linear(rewriter, f"{path}/qkv", joint, qkv)
        _replace_chain(rewriter, append, tensors[0], qkv, [c for c in chains if c is not None], found[0].rows // size)
    else:  # case 3
        _split(rewriter, path, joint, found)


def _projection(rewriter: GraphRewriter, tensor: Tensor) -> Linear | None:
    """Walk up to the linear layer that a head tensor comes from."""
    node = producer(tensor)
    while node is not None and not node.domain and node.op in _PASSED:
        node = producer(node.inputs[0])
    return find_linear(rewriter, node)


def _heads(rewriter: GraphRewriter, tensor: Tensor, size: int) -> Heads | None:
    """Read the steps of case 2 upwards from a head tensor [T, H, D]; None where they are others."""
    cosine = sine = norm_weight = epsilon = None
    node = _above_reshapes(tensor)
    if node is not None and node.op == "RotaryEmbedding":
        if node.attrs.get("interleaved", 0) or len(node.inputs) != 3:
            return None
        cosine, sine = node.inputs[1:]
        node = _above_reshapes(node.inputs[0])
    if node is not None and node.op == "RMSNormalization":
        weight = rewriter.weight(node.inputs[1])
        per_head = weight is not None and list(weight.proto.dims) == [size] and is_last_axis(rewriter, node)
        if not per_head or produced_by(node.inputs[0], "Reshape") is None:
            return None
        norm_weight, epsilon = node.inputs[1], float(node.attrs.get("epsilon", DEFAULT_EPSILON))
        node = _above_reshapes(node.inputs[0])
    linear = find_linear(rewriter, node)
    return None if linear is None else Heads(linear, norm_weight, epsilon, cosine, sine)


def _above_reshapes(tensor: Tensor) -> Node | None:
    node = producer(tensor)
    while node is not None and node.op == "Reshape":
        node = producer(node.inputs[0])
    return node


def _same_rotation(chains: list[Heads | None]) -> bool:
    """Tell whether query and key are rotated alike and the value is left as it is."""
    query, key, value = chains
    if query is None or key is None or value is None:
        return False
    plain = value.cosine is None and value.norm_weight is None
    alike = query.cosine is key.cosine and query.sine is key.sine
    epsilons = {chain.epsilon for chain in (query, key) if chain.epsilon is not None}
    return plain and alike and len(epsilons) <= 1


def _add_linear(rewriter: GraphRewriter, path: str, joint: Joint, output: Tensor) -> None:
    inputs = {"x": joint.norm.x, "weight": joint.weight, "norm_weight": joint.norm.weight, "bias": joint.bias}
    rewriter.operator(f"{path}/FusedLinear", emitters.fused_linear, inputs, [output], epsilon=joint.norm.epsilon)


def _replace_chain(
    rewriter: GraphRewriter, append: Node, old_query: Tensor, qkv: Tensor, chains: list[Heads], num_heads: int
) -> None:
    """Put one QkvRopeAppend in the place of an append and of all between it and the projection."""
    query, key, _ = chains
    names = ("key_cache", "value_cache", "query_start", "past_len", "block_table")
    caches = {port: t for port, t in zip(names, append.inputs[2:], strict=False) if t.name}
    inputs = {
        "qkv": qkv,
        **caches,
        "query_norm_weight": query.norm_weight,
        "key_norm_weight": key.norm_weight,
        "cosine": None if query.cosine is None else _in_float32(rewriter, query.cosine),
        "sine": None if query.sine is None else _in_float32(rewriter, query.sine),
    }
    captures = [n for n in old_query.outputs if n.op == "SnapKvCapture" and n.inputs[0] is old_query]
    captured = []
    if len(captures) == 1 and captures[0].inputs[2] is append.inputs[4]:  # the same rows
        inputs |= {"capture": captures[0].inputs[1], "capture_past_len": captures[0].inputs[3]}
        captured = list(captures[0].outputs)
    path = str(append.name).rsplit("/", 1)[0]
    new_query = rewriter.value(f"{path}/QkvRopeAppend/query")
    for reader in list(old_query.outputs):
        reader.inputs = [new_query if t is old_query else t for t in reader.inputs]
    rewriter.operator(
        f"{path}/QkvRopeAppend",
        emitters.qkv_rope_append,
        inputs,
        [new_query, *append.outputs, *captured],
        num_heads=num_heads,
        epsilon=next((c.epsilon for c in (query, key) if c.epsilon is not None), DEFAULT_EPSILON),
        sink=int(append.attrs.get("sink", 0)),
        capacity=int(append.attrs.get("capacity", 0)),
    )


def _in_float32(rewriter: GraphRewriter, tensor: Tensor) -> Tensor:
    """Return a rotation's cosine or sine [1, T, R] as it was before the cast to the model's type."""
    unsqueeze = produced_by(tensor, "Unsqueeze")
    cast = None if unsqueeze is None else produced_by(unsqueeze.inputs[0], "Cast")
    if unsqueeze is None or cast is None:
        return tensor
    if cast.attrs["to"] == onnx.TensorProto.FLOAT:
        return tensor
    name = f"{unsqueeze.name}/float32"
    known = next((n for n in unsqueeze.inputs[1].outputs if n.name == name), None)
    if known is not None:
        return known.outputs[0]
    wide = rewriter.value(f"{name}/output")
    rewriter.node(name, "Unsqueeze", [cast.inputs[0], unsqueeze.inputs[1]], [wide])
    return wide


def _split(rewriter: GraphRewriter, path: str, joint: Joint, linears: list[Linear]) -> None:
    qkv = rewriter.value(f"{path}/qkv/output")
    sizes = [linear.rows for linear in linears]
    name = "fusions/split/" + "x".join(map(str, sizes))
    outputs = [linear.y for linear in linears]
    rewriter.node(f"{path}/qkv/Split", "Split", [qkv, rewriter.constant(name, sizes)], outputs, axis=1)
    _add_linear(rewriter, f"{path}/qkv", joint, qkv)

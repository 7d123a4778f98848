"""Changes a decoder graph so that each row of a step has the same bits whatever rows stand beside it."""

from __future__ import annotations

import onnx

from ortolan import contract
from ortolan.errors import ConfigError
from ortolan.graphs.builder import MICROSOFT

_FUSED = "FusedLinear"
_ATTRIBUTE = "batch_invariant"
# What computes each element, or each row, by itself.
_ROW_BY_ROW = frozenset((
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Concat", "Constant", "ConstantOfShape", "Cos", "Div", "Equal",
    "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather", "Gelu", "Greater", "Identity", "LayerNormalization", "Less",
    "Log", "Max", "Min", "Mul", "Neg", "Not", "Or", "RMSNormalization", "Range", "Reciprocal", "ReduceSum",
    "Relu", "Reshape", "RotaryEmbedding", "Round", "Shape", "Sigmoid", "Sin", "Slice", "Softplus", "Split", "Sqrt",
    "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where",
))  # fmt: skip
_MICROSOFT_ROW_BY_ROW = frozenset((
    "GatherBlockQuantized", "Gelu", "QuickGelu", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization",
    "RotaryEmbedding",
))  # fmt: skip
_ON_BOTH = frozenset((
    _FUSED, "GateMul", "GatherRows", "NarrowStep", "NormRope", "QkvAttention", "QkvRopeAppend", "RingKvAppend",
    "RmsNormAdd", "RopeAngles", "SnapKvCapture", "SwaAttention",
))  # fmt: skip
# On the CPU, ONNX Runtime computes these by vectors, and by other instructions where a vector is not full.
_VECTORS = frozenset(("Log", "Softplus"))
_ANGLES, _VECTOR = frozenset(("Cos", "Sin")), 8  # angles of a token that fill vectors
_ON_CPU = _ON_BOTH | {"LowBitExperts", "LowBitLinear", "MoeExperts", "MoeGate"}
_FEW_BITS = "weights of few bits"
_WHOSE = {
    "LowBitLinear": _FEW_BITS,
    "MatMulNBits": _FEW_BITS,
    "LowBitExperts": "experts",
    "MoeExperts": "experts",
    "MoeGate": "experts",
    "CausalConv": "gated delta layers",
    "DeltaGates": "gated delta layers",
    "GatedDeltaRule": "gated delta layers",
}


def make_batch_invariant(model: onnx.ModelProto, *, cuda: bool) -> None:
    """Let every product of a graph sum in an order that its weight's shape alone decides, in place.

    1. FusedLinear is told so.
    2. A Gemm becomes a FusedLinear: ONNX Runtime's own promises no order.

    Args:
        model: whose weights may be absent.
        cuda: whether it runs on CUDA; else on the CPU.

    Raises:
        ConfigError: it has an operator of which that is not known.
    """
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    refused = []
    for node in model.graph.node:
        if node.op_type == "Gemm" and not node.domain:
            _replace_gemm(node, shapes)
        fills_vectors = node.op_type in _ANGLES and _count_angles(node, makers, shapes) % _VECTOR == 0
        if not fills_vectors and not _is_row_by_row(node, cuda=cuda):
            refused.append(node)
        if _is_own(node) and node.op_type == _FUSED:
            others = [each for each in node.attribute if each.name != _ATTRIBUTE]
            del node.attribute[:]
            node.attribute.extend((*others, onnx.helper.make_attribute(_ATTRIBUTE, 1)))
    if refused:
        raise _refusal(max(refused, key=lambda node: node.op_type in _WHOSE), cuda=cuda)


def _is_own(node: onnx.NodeProto) -> bool:
    return bool(node.domain == contract.OPERATOR_DOMAIN)


def _replace_gemm(node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]]) -> None:
    """Turn a Gemm of a weight [O, I], and of a bias [O] where it has one, into a FusedLinear."""
    given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    weight = shapes.get(node.input[1], ())
    is_plain = given.get("alpha", 1.0) == given.get("beta", 1.0) == 1.0 and not given.get("transA", 0)
    has_bias = len(node.input) > 2 and node.input[2]
    fits = not has_bias or shapes.get(node.input[2]) == weight[:1]
    if not (is_plain and given.get("transB", 0) and len(weight) == 2 and fits):
        return
    x, linear_weight, bias = node.input[0], node.input[1], node.input[2] if has_bias else ""
    node.op_type, node.domain = _FUSED, contract.OPERATOR_DOMAIN
    del node.attribute[:]
    del node.input[:]
    node.input.extend((x, linear_weight, "", bias) if bias else (x, linear_weight))


def _count_angles(node: onnx.NodeProto, makers: dict[str, onnx.NodeProto], shapes: dict[str, tuple[int, ...]]) -> int:
    """Count the angles of a token that a Cos or Sin takes: positions times frequencies; 1 where that is not known."""
    product = makers.get(node.input[0])
    for name in product.input if product is not None else ():
        if name in makers and makers[name].op_type == "Gather":  # of one RoPE variant's frequencies
            name = makers[name].input[0]
        if name in shapes:
            return int(shapes[name][-1])
    return 1


def _is_row_by_row(node: onnx.NodeProto, *, cuda: bool) -> bool:
    """Say whether no row of an operator's results depends on another."""
    standard = _ROW_BY_ROW if cuda else _ROW_BY_ROW - _VECTORS - _ANGLES
    own = _ON_BOTH if cuda else _ON_CPU
    allowed = {"": standard, "ai.onnx": standard, MICROSOFT: _MICROSOFT_ROW_BY_ROW, contract.OPERATOR_DOMAIN: own}
    return node.op_type in allowed.get(node.domain, ())


def _refusal(node: onnx.NodeProto, *, cuda: bool) -> ConfigError:
    device, whose = "CUDA" if cuda else "the CPU", _WHOSE.get(node.op_type)
    advice = "load the model without batch_invariant"
    if whose == _FEW_BITS:
        advice += ", or export it without weight_format"
    reason = f"this model has {whose}, whose" if whose else "the model's"
    return ConfigError(
        f"batch_invariant=True cannot be kept on {device}: {reason} operator {node.op_type} (node {node.name!r}) may "
        f"round a token otherwise in a larger step; {advice}"
    )

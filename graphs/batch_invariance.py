"""Changes a decoder graph so that each row of a step has the same bits whatever rows stand beside it."""

from __future__ import annotations

import onnx

from ortolan import contract
from ortolan.errors import ConfigError
from ortolan.graphs.builder import MICROSOFT

_FUSED = "FusedLinear"
_ATTRIBUTE = "batch_invariant"
# What computes each element, or each row, by itself.
_ROW_BY_ROW = frozenset(
    """Abs Add And Cast Ceil Clip Concat Constant ConstantOfShape Cos Div Equal Erf Exp Expand Flatten Floor Gather Gelu
    Greater Identity LayerNormalization Less Log Max Min Mul Neg Not Or Pow RMSNormalization Range Reciprocal ReduceSum
    Relu Reshape RotaryEmbedding Round Shape Sigmoid Sin Slice Softplus Split Sqrt Squeeze Sub Swish Tanh Transpose
    Unsqueeze Where""".split()
)
_MICROSOFT_ROW_BY_ROW = frozenset(
    ("Gelu", "QuickGelu", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding")
)
_ON_BOTH = frozenset((_FUSED, "RingKvAppend", "SwaAttention", "SnapKvCapture"))
_ON_CUDA = _ON_BOTH | {"GateMul", "GatherRows", "QkvRopeAppend", "RmsNormAdd", "RopeAngles"}
_ON_CPU = _ON_BOTH | {"CausalConv", "GatedDeltaRule", "LowBitExperts", "LowBitLinear", "MoeExperts", "MoeGate"}
_WHOSE = {
    "LowBitLinear": "weights of few bits",
    "MatMulNBits": "weights of few bits",
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
    2. A Gemm becomes a FusedLinear: ONNX Runtime's own chooses its order by the number of rows.

    Args:
        model: whose weights may be absent.
        cuda: whether it runs on CUDA; else on the CPU.

    Raises:
        ConfigError: it has an operator of which that is not known.
    """
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Gemm" and not node.domain:
            _replace_gemm(node, shapes)
        _check(node, cuda=cuda)
        if _is_own(node) and node.op_type == _FUSED:
            node.attribute.append(onnx.helper.make_attribute(_ATTRIBUTE, 1))


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


def _check(node: onnx.NodeProto, *, cuda: bool) -> None:
    """Refuse an operator whose rows may depend on each other."""
    own = _ON_CUDA if cuda else _ON_CPU
    allowed = {"": _ROW_BY_ROW, "ai.onnx": _ROW_BY_ROW, MICROSOFT: _MICROSOFT_ROW_BY_ROW, contract.OPERATOR_DOMAIN: own}
    if node.op_type in allowed.get(node.domain, ()):
        return
    device, whose = "CUDA" if cuda else "the CPU", _WHOSE.get(node.op_type)
    reason = f"this model has {whose}, whose" if whose else "its"
    raise ConfigError(
        f"batch_invariant=True cannot be kept on {device}: {reason} operator {node.op_type} (node {node.name!r}) may "
        "round a row otherwise in a larger step; load the model without batch_invariant, or export one that has dense "
        "weights in float32, float16 or bfloat16 alone"
    )

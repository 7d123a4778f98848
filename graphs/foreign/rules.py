"""One rule per operator: whether it treats tokens one by one, and what it makes of them.

Packed sequences share one batch entry, so an operator is safe where each token's result depends on that token alone.
What no rule knows is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from ortolan.graphs.foreign import shape_rules
from ortolan.graphs.foreign.values import Kind, Rows, Value, View

Rule = Callable[[View], Rows | list[Rows]]

_UNARY = (
    "Abs", "BiasGelu", "Cast", "Ceil", "Clip", "Cos", "Elu", "Erf", "Exp", "FastGelu", "Floor", "Gelu",
    "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log", "Mish", "Neg", "Not", "QuickGelu", "Reciprocal",
    "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh",
)  # fmt: skip
_BROADCAST = (
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul",
    "Or", "Pow", "Sub", "Where",
)  # fmt: skip


def infer_rows(view: View) -> list[Value]:
    """Return the kinds of a node's outputs.

    Raises:
        UnsupportedModelError: the node may mix tokens; the message names it.
    """
    given = [value for value in view.values if value is not None]
    if view.node.op == "Shape" or not any(isinstance(value, Rows) for value in given):
        lengths = view.node.op == "Shape" and given[0] is not Kind.CONSTANT
        lengths = lengths or any(value is not Kind.CONSTANT for value in given)
        return [Kind.LENGTHS if lengths else Kind.CONSTANT] * len(view.node.outputs)
    rule = RULES.get(view.node.op)
    if rule is None or view.node.domain not in ("", "ai.onnx", "com.microsoft", None):
        raise view.refuse("this operator is not known to treat tokens one by one, and packed sequences must not mix")
    result = rule(view)
    return list(result) if isinstance(result, list) else [result] * len(view.node.outputs)


def _unary(view: View) -> Rows:
    view.require_constants(*range(1, len(view.values)))
    return view.rows(0)


def _broadcast(view: View) -> Rows:
    """Combine rows with rows of the same pieces, and with constants that all tokens share."""
    tokens = [value for value in view.values if isinstance(value, Rows)]
    first = max(tokens, key=lambda rows: len(rows.dims))
    inner: tuple[int, ...] = (1,) * first.inner
    for index, value in enumerate(view.values):
        if isinstance(value, Rows):
            layout = (len(value.dims), value.inner, value.pieces, value.is_last)
            if layout != (len(first.dims), first.inner, first.pieces, first.is_last):
                raise view.refuse("its inputs do not hold tokens in the same layout")
            inner = _broadcast_dims(view, inner, value.inner_dims)
        elif value is Kind.CONSTANT:
            shape = view.shape(index)
            outer = shape[: max(0, len(shape) - first.inner)]
            if len(shape) > len(first.dims) or math.prod(outer) != 1:
                raise view.refuse(f"input {index} of shape {list(shape)} has an axis along the tokens")
            inner = _broadcast_dims(view, inner, shape[len(outer) :])
        elif value is not None:
            raise view.refuse(f"input {index}, '{view.node.inputs[index].name}', is {value.value}")
    return first.with_inner(inner)


def _broadcast_dims(view: View, left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(left, right)
    except ValueError as error:
        raise view.refuse(f"shapes {left} and {right} do not fit") from error


def _product(view: View, weight_in: int, weight_out: int, rows: Rows) -> Rows:
    if not rows.inner or rows.dims[-1] != weight_in:
        raise view.refuse(f"its weight takes {weight_in} features, the tokens are {list(rows.dims)}")
    return rows.with_inner((*rows.inner_dims[:-1], weight_out))


def _mat_mul(view: View) -> Rows:
    rows = view.rows(0)
    view.require_constants(1)
    shape = view.shape(1)
    if len(shape) != 2:
        raise view.refuse(f"its weight has the shape {list(shape)}; it must have two axes")
    return _product(view, shape[0], shape[1], rows)


def _gemm(view: View) -> Rows:
    rows = view.rows(0)
    view.require_constants(1, 2)
    shape = view.shape(1)
    if view.attribute("transA", 0) or len(rows.dims) != 2:
        raise view.refuse("it does not take tokens as rows")
    if view.has(2) and math.prod(view.shape(2)[:-1]) != 1:
        raise view.refuse("its bias has an axis along the tokens")
    size_in, size_out = reversed(shape) if view.attribute("transB", 0) else shape
    return _product(view, size_in, size_out, rows)


def _mat_mul_n_bits(view: View) -> Rows:
    view.require_constants(*range(1, len(view.values)))
    return _product(view, int(view.attribute("K", 0)), int(view.attribute("N", 0)), view.rows(0))


def _norm(view: View) -> Rows:
    rows = view.rows(0)
    view.require_constants(*range(1, len(view.values)))
    view.inner_axis(rows, int(view.attribute("axis", -1)))
    return rows


def _skip_norm(view: View) -> Rows:
    rows = view.rows(0)
    if view.rows(1) != rows or not rows.inner:
        raise view.refuse("its inputs do not hold tokens in the same layout")
    view.require_constants(*range(2, len(view.values)))
    return rows


def _softmax(view: View) -> Rows:
    rows = view.rows(0)
    view.inner_axis(rows, int(view.attribute("axis", -1)))
    return rows


def _gather(view: View) -> Rows:
    """Look up an embedding, or pick the last token before the head."""
    if isinstance(view.values[0], Rows):
        return _last_token(view, view.values[0])
    view.require_constants(0)
    indices, shape = view.rows(1), view.shape(0)
    if view.attribute("axis", 0) != 0:
        raise view.refuse("it does not look up rows of a table")
    return indices.with_inner((*indices.inner_dims, *shape[1:]))


def _last_token(view: View, rows: Rows) -> Rows:
    index = view.constant(1)
    picked = [] if index is None else index.reshape(-1).tolist()
    if index is None or not shape_rules.is_last_token(rows, [int(view.attribute("axis", 0))], picked):
        raise view.refuse("it picks tokens; only the last one, -1 of [batch, sequence, features], may be picked")
    return Rows((None, *index.shape, rows.row_size), rows.row_size, is_last=True)


def _gather_quantized(view: View) -> Rows:
    """Look up an embedding that is stored in blocks of few bits."""
    view.require_constants(0, 2, 3)
    indices, shape = view.rows(1), view.shape(0)
    axis = int(view.attribute("quantize_axis", 1))
    if view.attribute("gather_axis", 0) != 0 or len(shape) != 2 or axis not in (1, -1):
        raise view.refuse("it does not look up rows of a table that is quantized along them")
    scales, block = view.shape(2), int(view.attribute("block_size", 128))
    packed = 8 // int(view.attribute("bits", 4))
    columns = shape[1] * packed if shape[1] * packed <= scales[1] * block else shape[1]
    return indices.with_inner((*indices.inner_dims, columns))


def _rotary(view: View) -> Rows:
    """Rotate heads by the positions of their tokens."""
    rows = view.rows(0)
    if len(rows.dims) != 3 or rows.pieces != 1 or rows.is_last:
        raise view.refuse("it must take tokens as [batch, sequence, features]")
    positions, tables = (3, (1, 2)) if not view.node.domain else (1, (2, 3))
    view.require_constants(*tables)
    if view.rows(positions) != Rows((1, None), 1):
        raise view.refuse("its positions must be [batch, sequence]")
    return rows


def _experts(view: View) -> Rows:
    """Run a mixture of experts on each token."""
    rows, routing = view.rows(0), view.rows(1)
    if rows.pieces != 1 or routing.pieces != 1 or rows.is_last != routing.is_last:
        raise view.refuse("it must take whole tokens")
    view.require_constants(*range(2, len(view.values)))
    return rows


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BROADCAST, _broadcast),
    "MatMul": _mat_mul,
    "Gemm": _gemm,
    "MatMulNBits": _mat_mul_n_bits,
    "SimplifiedLayerNormalization": _norm,
    "RMSNormalization": _norm,
    "LayerNormalization": _norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
    "SkipLayerNormalization": _skip_norm,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Gather": _gather,
    "GatherBlockQuantized": _gather_quantized,
    "RotaryEmbedding": _rotary,
    "MoE": _experts,
    "QMoE": _experts,
    **shape_rules.RULES,
}

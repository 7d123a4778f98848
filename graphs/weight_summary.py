"""Counts the parameters of a graph, and says in which formats its weights are stored."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx

from ortolan.custom_ops.low_bit_schema import LOW_BIT_OPERATORS
from ortolan.element_types import from_onnx

_EXPERTS = "LowBitExperts"
_OWN = ("LowBitLinear", _EXPERTS)
# Operators of low-bit weights, and the ports of each weight, the first of which holds its codes.
_LOW_BIT: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "MatMulNBits": ((1, 2, 3),),
    "LowBitLinear": (tuple(range(1, 6)),),
    _EXPERTS: ((3, *range(5, 9)), (4, *range(9, 13))),
    "GatherBlockQuantized": ((0, 2, 3),),
    "DequantizeLinear": ((0, 1, 2),),
}
DEFAULT_BITS = 4  # of those that pack weights into bytes
_LAYER = re.compile(r"(?:^|/)layers\.(\d+)/")  # also in the names that other exporters give
_ROPE_PORTS = {"RotaryEmbedding": (2, 3)}  # tables, which are not learned


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The weights that are stored alike.

    Attributes:
        format: element type, or bits and block size.
        tensors: how many weights; scales and zero points belong to theirs.
        parameters: numbers of the model; those that a byte packs are counted one by one.
        bytes: with scales and zero points.
    """

    format: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Use:
    """How a node reads a tensor of the graph; `weight` is the low-bit weight that the tensor is, or belongs to."""

    tensor: onnx.TensorProto
    node: onnx.NodeProto
    port: int
    weight: onnx.TensorProto | None


def summarize_weights(model: onnx.ModelProto) -> tuple[StoredWeights, ...]:
    """Count the weights of a graph by their format, those with most bytes first; RoPE tables are not weights."""
    return _by_format(_uses(model))


def summarize_layer_weights(model: onnx.ModelProto, count: int) -> tuple[tuple[StoredWeights, ...], ...]:
    """Count the weights of each of `count` layers of a graph, as `summarize_weights` does those of all of it."""
    uses: dict[int, list[_Use]] = {}
    for use in _uses(model):
        if match := _LAYER.search(use.node.name):
            uses.setdefault(int(match[1]), []).append(use)
    return tuple(_by_format(uses.get(index, [])) for index in range(count))


def _by_format(uses: Iterable[_Use]) -> tuple[StoredWeights, ...]:
    counts: dict[str, list[int]] = {}
    for use in uses:
        if _is_weight(use):
            count = counts.setdefault(_format(use), [0, 0, 0])
            is_side = use.weight is not None and use.weight is not use.tensor
            count[0] += not is_side
            count[1] += 0 if is_side else _parameters(use)
            count[2] += -(-math.prod(use.tensor.dims) * from_onnx(use.tensor.data_type).bits // 8)
    rows = [StoredWeights(format=name, tensors=t, parameters=p, bytes=b) for name, (t, p, b) in counts.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.format)))


def _uses(model: onnx.ModelProto) -> list[_Use]:
    """List each initializer that is read, with one of its readers."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    readers = {name: (node, port) for node in model.graph.node for port, name in enumerate(node.input)}
    uses = []
    for name, tensor in tensors.items():
        if name in readers:
            node, port = readers[name]
            codes = next((ports[0] for ports in _LOW_BIT.get(node.op_type, ()) if port in ports), None)
            uses.append(_Use(tensor, node, port, None if codes is None else tensors.get(node.input[codes])))
    return uses


def _is_weight(use: _Use) -> bool:
    """Tell weights from tables, and from the shapes, axes and factors that a graph computes with."""
    if use.port in _ROPE_PORTS.get(use.node.op_type, ()) or use.tensor.name.endswith("/inv_freq"):
        return False
    if use.weight is not None:
        return True
    return from_onnx(use.tensor.data_type).is_float and math.prod(use.tensor.dims) > 1


def _format(use: _Use) -> str:
    if use.weight is None:
        return from_onnx(use.tensor.data_type).name
    if use.node.op_type in _OWN:
        kind, group, rows = (_own_attribute(use.node, name) for name in ("format", "group_size", "scale_rows"))
        size = f"{rows} x {group}" if rows > 1 else group
        stored = f"{kind} in blocks of {size}" if group else f"{kind} by row"
        return f"{stored}, fp8 inputs" if _rounds_inputs(use.node) else stored
    block = _numbers(use.node).get("block_size", 0)
    return f"{_bits(use)} bits" + (f" in blocks of {block}" if block else "")


def _rounds_inputs(node: onnx.NodeProto) -> bool:
    """Say whether a product rounds its inputs to fp8, too; experts never do."""
    return node.op_type != _EXPERTS and _own_attribute(node, "input_format") == "fp8"


def _own_attribute(node: onnx.NodeProto, name: str) -> Any:
    """Return an attribute of an operator of low-bit weights."""
    found = next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), None)
    if found is None:
        found = next(
            a.default for op in LOW_BIT_OPERATORS if op.name == node.op_type for a in op.attributes if a.name == name
        )
    return found.decode() if isinstance(found, bytes) else found


def _parameters(use: _Use) -> int:
    if use.node.op_type == "MatMulNBits":  # the last block of a row may be padded
        return _numbers(use.node)["K"] * _numbers(use.node)["N"]
    element = from_onnx(use.tensor.data_type)
    packed = element.bits if use.weight is None else _bits(use)
    return int(math.prod(use.tensor.dims)) * element.bits // packed


def _bits(use: _Use) -> int:
    """Return the bits of one parameter of a low-bit weight, several of which a byte may pack."""
    assert use.weight is not None
    if use.node.op_type in _OWN:
        return 4 if str(_own_attribute(use.node, "format")).endswith("4") else 8
    own = from_onnx(use.weight.data_type)
    if own.name != "uint8" or use.node.op_type == "DequantizeLinear":
        return own.bits
    return int(_numbers(use.node).get("bits", DEFAULT_BITS))


def _numbers(node: onnx.NodeProto) -> Mapping[str, int]:
    return {str(a.name): int(a.i) for a in node.attribute if a.type == onnx.AttributeProto.INT}

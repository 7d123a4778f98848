"""Checks the mixtures of experts of a graph: routers, gates and experts fit each other."""

from __future__ import annotations

from typing import NoReturn

import onnx

from ortolan.contract import OPERATOR_DOMAIN
from ortolan.custom_ops.low_bit_schema import WEIGHT_PORTS
from ortolan.errors import ContractMismatchError
from ortolan.graphs.verify_low_bit import coded_shape

_ROUTERS = {"Gemm": 1, "FusedLinear": 1}  # the port of the weight, whose rows are the experts


def check_experts(graph: onnx.GraphProto) -> None:
    """Check every MoeExperts and LowBitExperts, and the MoeGate that it takes its experts from.

    Raises:
        ContractMismatchError: weights do not fit, or a token could take an expert that does not exist.
    """
    dims = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output if name}
    for node in graph.node:
        if node.domain == OPERATOR_DOMAIN and node.op_type in _SHAPES:
            count = _check_weights(node, dims, *_SHAPES[node.op_type](node, dims))
            _check_gate(node, count, dims, producers)


def _dense_shapes(node: onnx.NodeProto, dims: dict[str, list[int]]) -> tuple[list[int], list[int]]:
    gate_up, down = (dims.get(name, []) for name in node.input[3:5])
    return gate_up, down


def _coded_shapes(node: onnx.NodeProto, dims: dict[str, list[int]]) -> tuple[list[int], list[int]]:
    def fail(problem: str) -> NoReturn:
        _fail(node, problem)

    gate_up, down, *others = [*node.input[3:], *[""] * 10][:10]
    each = ([gate_up, *others[:4]], [down, *others[4:]])
    first, second = (coded_shape(node, dict(zip(WEIGHT_PORTS, names, strict=True)), dims, 3, fail) for names in each)
    return first, second


_SHAPES = {"MoeExperts": _dense_shapes, "LowBitExperts": _coded_shapes}


def _check_weights(node: onnx.NodeProto, dims: dict[str, list[int]], shape: list[int], down: list[int]) -> int:
    """Check the weights of all experts, and their biases; returns E."""
    names = node.input[3:5]
    if len(shape) != 3 or shape[1] % 2:
        _fail(node, f"gate_up '{names[0]}' must be a weight [E, 2 * I, H]; it is {shape or 'not a weight'}")
    count, rows, hidden = shape
    if down != [count, hidden, rows // 2]:
        _fail(node, f"down '{names[1]}' must be a weight {[count, hidden, rows // 2]}; it is {down or 'not one'}")
    first_bias = 5 if node.op_type == "MoeExperts" else 13
    biases = [*node.input[first_bias:], "", ""][:2]
    for name, expected in zip(biases, ([count, rows], [count, hidden]), strict=True):
        if name and dims.get(name) != expected:
            _fail(node, f"bias '{name}' must be a weight {expected}; it is {dims.get(name, 'not one')}")
    return count


def _check_gate(
    node: onnx.NodeProto, count: int, dims: dict[str, list[int]], producers: dict[str, onnx.NodeProto]
) -> None:
    gate = producers.get(node.input[1])
    if gate is None or gate.op_type != "MoeGate" or list(gate.output) != list(node.input[1:3]):
        _fail(node, f"experts '{node.input[1]}' and weights '{node.input[2]}' must be the outputs of one MoeGate")
    taken = next((a.i for a in gate.attribute if a.name == "top_k"), 1)
    if not 1 <= taken <= count:
        _fail(gate, f"top_k is {taken}; it must be between 1 and the {count} experts of '{node.name}'")
    router = producers.get(gate.input[0])
    weight = router.input[_ROUTERS[router.op_type]] if router is not None and router.op_type in _ROUTERS else ""
    if weight in dims and dims[weight][0] != count:
        _fail(gate, f"its router '{weight}' has {dims[weight][0]} rows, and '{node.name}' has {count} experts")


def _fail(node: onnx.NodeProto, problem: str) -> NoReturn:
    raise ContractMismatchError(f"rule 9: node '{node.name}', a {node.op_type}: {problem}")

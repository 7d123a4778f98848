"""Checks what only a graph with low-bit caches has: the scales of its codes."""

from __future__ import annotations

import onnx

from ortolan.contract import OPERATOR_DOMAIN
from ortolan.element_types import CODE_TYPES, element_type
from ortolan.errors import ContractMismatchError
from ortolan.graphs.verify_paged import APPENDS

_CODES = frozenset(element_type(name).onnx for name in CODE_TYPES)
# The scales among an append's outputs.
_APPENDED = {"RingKvAppend": (2, 3), "QkvRopeAppend": (4, 5), "QkvAttention": (5, 6)}
_READ = {"SwaAttention": (8, 9), "QkvAttention": (12, 13)}  # and among the inputs of what attends


def check_scales(graph: onnx.GraphProto) -> None:
    """Check that caches of codes have scales, others have none, and each attention reads the scales of its cache.

    Raises:
        ContractMismatchError: an input is missing or not needed, or an operator reads other scales.
    """
    _check_inputs(graph)
    nodes = [node for node in graph.node if node.domain == OPERATOR_DOMAIN]
    of_cache: dict[str, list[str]] = {}
    for node in nodes:
        if node.op_type in _APPENDED:
            cache = node.output[APPENDS[node.op_type]]
            of_cache[cache] = [_name(node.output, port) for port in _APPENDED[node.op_type]]
    for node in nodes:
        if node.op_type not in _READ:
            continue
        read = [_name(node.input, port) for port in _READ[node.op_type]]
        if node.op_type in _APPENDED:
            _check_returned(node, read)
        elif read != (wanted := of_cache.get(node.input[1], ["", ""])):
            raise ContractMismatchError(
                f"rule 10: node '{node.name}' reads the scales {read}; its cache was appended to with {wanted}"
            )


def _check_returned(node: onnx.NodeProto, read: list[str]) -> None:
    """What appends and attends returns each of the scales that it takes, and no other."""
    returned = [_name(node.output, port) for port in _APPENDED[node.op_type]]
    if [bool(name) for name in read] != [bool(name) for name in returned]:
        raise ContractMismatchError(f"rule 10: node '{node.name}' takes the scales {read} and returns {returned}")


def _check_inputs(graph: onnx.GraphProto) -> None:
    types = {i.name: i.type.tensor_type.elem_type for i in graph.input}
    for role in ("key", "value"):
        for name, kind in types.items():
            stem, _, last = name.rpartition(".")
            if last == f"{role}_cache" and (kind in _CODES) != (f"{stem}.{role}_scale" in types):
                problem = "holds codes and has no input" if kind in _CODES else "does not hold codes and has an input"
                raise ContractMismatchError(f"rule 10: cache '{name}' {problem} '{stem}.{role}_scale'")


def _name(names: list[str], index: int) -> str:
    return names[index] if index < len(names) else ""

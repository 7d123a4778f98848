"""Builds one node of the operator domain."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ortolan.contract import OPERATOR_DOMAIN
from ortolan.custom_ops.schema import OPERATORS


def operator_node(
    op_type: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    name: str,
    attributes: Mapping[str, int | float | str],
) -> onnx.NodeProto:
    """Build a node; trailing absent inputs are dropped, and the operator's text becomes its doc string."""
    present = len(inputs)
    while present and not inputs[present - 1]:
        present -= 1
    node = onnx.helper.make_node(op_type, list(inputs[:present]), list(outputs), name=name, domain=OPERATOR_DOMAIN)
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attributes.items())
    node.doc_string = next(operator.doc for operator in OPERATORS if operator.name == op_type)
    return node

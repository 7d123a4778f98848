"""Builds one node of the operator domain."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real

import onnx

from ortolan.contract import OPERATOR_DOMAIN
from ortolan.custom_ops.schema import OPERATORS
from ortolan.custom_ops.schema_parts import Attribute
from ortolan.errors import ConfigError


def operator_node(
    op_type: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    name: str,
    attributes: Mapping[str, int | float | str],
) -> onnx.NodeProto:
    """Build a node; trailing absent inputs are dropped, and the operator's text becomes its doc string.

    Raises:
        ConfigError: an attribute's value has another type than the operator's table says.
    """
    present = len(inputs)
    while present and not inputs[present - 1]:
        present -= 1
    node = onnx.helper.make_node(op_type, list(inputs[:present]), list(outputs), name=name, domain=OPERATOR_DOMAIN)
    operator = next(operator for operator in OPERATORS if operator.name == op_type)
    node.attribute.extend(
        onnx.helper.make_attribute(attribute.name, _typed(op_type, attribute, attributes[attribute.name]))
        for attribute in operator.attributes
    )
    node.doc_string = operator.doc
    return node


def _typed(op_type: str, attribute: Attribute, value: int | float | str) -> int | float | str:
    """Give a value the attribute's own type: onnx stores an int and a float as different kinds."""
    kind = type(attribute.default)
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, Real):
        return float(value)
    if kind is int and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise ConfigError(f"{op_type}: attribute {attribute.name} is {value!r}; it must be of type {kind.__name__}")

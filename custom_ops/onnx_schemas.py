"""Tells the onnx package about the operators, so that its checker and shape inference know them."""

from __future__ import annotations

import atexit
import contextlib

import onnx

from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.custom_ops.schema import OPERATORS
from ortolan.custom_ops.schema_parts import (
    CACHE,
    CACHE_TYPES,
    ELEMENT,
    ELEMENT_TYPES,
    FLOAT,
    INT32,
    INT64,
    Attribute,
    Operator,
    Port,
)

_FIXED_TYPES = {INT32: onnx.TensorProto.INT32, INT64: onnx.TensorProto.INT64, FLOAT: onnx.TensorProto.FLOAT}
_Option = onnx.defs.OpSchema.FormalParameterOption


def register_schemas() -> None:
    """Register the operators' schemas with onnx; does nothing where they already are."""
    missing = [operator for operator in OPERATORS if not onnx.defs.has(operator.name, OPERATOR_DOMAIN)]
    for operator in missing:
        onnx.defs.register_schema(build_schema(operator))
    if missing:  # before 1.23 onnx would release their Python functions after the interpreter's end, and crash
        atexit.register(_forget_schemas)


def _forget_schemas() -> None:
    for operator in OPERATORS:
        with contextlib.suppress(onnx.defs.SchemaError):  # somebody else may have done it
            onnx.defs.deregister_schema(operator.name, OPERATOR_VERSION, OPERATOR_DOMAIN)


def build_schema(operator: Operator) -> onnx.defs.OpSchema:
    """Build the onnx schema of one operator, with type and shape inference for outputs that follow an input."""
    constraints = (
        (ELEMENT, list(ELEMENT_TYPES), "Element type of queries, keys and values."),
        (CACHE, list(CACHE_TYPES), "Element type of caches: that of keys and values, or of codes."),
    )
    used = {port.type for port in (*operator.inputs, *operator.outputs)}
    schema = onnx.defs.OpSchema(
        operator.name,
        OPERATOR_DOMAIN,
        OPERATOR_VERSION,
        doc=operator.doc,
        inputs=[_parameter(port) for port in operator.inputs],
        outputs=[_parameter(port) for port in operator.outputs],
        type_constraints=[constraint for constraint in constraints if constraint[0] in used],
        attributes=[_attribute(attribute) for attribute in operator.attributes],
    )
    schema.set_type_and_shape_inference_function(lambda context: _infer(operator, context))
    return schema


def _parameter(port: Port) -> onnx.defs.OpSchema.FormalParameter:
    option = _Option.Optional if port.optional else _Option.Single
    return onnx.defs.OpSchema.FormalParameter(port.name, port.type, f"{port.shape} {port.doc}", param_option=option)


def _attribute(attribute: Attribute) -> onnx.defs.OpSchema.Attribute:
    return onnx.defs.OpSchema.Attribute(
        attribute.name, onnx.helper.make_attribute(attribute.name, attribute.default), attribute.doc
    )


def _infer(operator: Operator, context: onnx.shape_inference.InferenceContext) -> None:
    """Give each output its type, and every dimension whose symbol an input of known shape has.

    Where a port may have several ranks, it has that of the input whose shape is described by the same words.
    An output's type stays open where nothing is known of the inputs, as behind operators that onnx has no schema of.
    """
    known = _known_dimensions(operator, context)
    for index, port in enumerate(operator.outputs[: context.get_num_outputs()]):
        result = onnx.TypeProto()
        if port.type in (ELEMENT, CACHE):
            element = _element_type(operator, context, port.type)
            if element is None:
                continue
            result.tensor_type.elem_type = element
        else:
            result.tensor_type.elem_type = _FIXED_TYPES[port.type]
        for symbol in port.symbols if _has_one_rank(port) else ():
            dimension = result.tensor_type.shape.dim.add()
            if symbol in known:
                dimension.CopyFrom(known[symbol])
        if not _has_one_rank(port) and (shape := _shape_of_twin(operator, context, port)) is not None:
            result.tensor_type.shape.CopyFrom(shape)
        context.set_output_type(index, result)


def _shape_of_twin(
    operator: Operator, context: onnx.shape_inference.InferenceContext, output: Port
) -> onnx.TensorShapeProto | None:
    """Return the shape of the first input that is described by the same words; None where it is not known."""
    for index, port in enumerate(operator.inputs[: context.get_num_inputs()]):
        given = context.get_input_type(index)
        if port.shape == output.shape and given is not None and given.tensor_type.HasField("shape"):
            return given.tensor_type.shape
    return None


def _element_type(operator: Operator, context: onnx.shape_inference.InferenceContext, variable: str) -> int | None:
    """Return the element type that the inputs of a type variable share, as onnx numbers it."""
    for index, port in enumerate(operator.inputs[: context.get_num_inputs()]):
        given = context.get_input_type(index)
        if port.type == variable and given is not None:
            return int(given.tensor_type.elem_type)
    return None


def _known_dimensions(
    operator: Operator, context: onnx.shape_inference.InferenceContext
) -> dict[str, onnx.TensorShapeProto.Dimension]:
    """Map the symbols of the inputs' shapes to dimensions; inputs without one fixed rank say nothing."""
    known: dict[str, onnx.TensorShapeProto.Dimension] = {}
    for index, port in enumerate(operator.inputs[: context.get_num_inputs()]):
        given = context.get_input_type(index)
        if given is None or not given.tensor_type.HasField("shape") or not _has_one_rank(port):
            continue
        dimensions = given.tensor_type.shape.dim
        if len(dimensions) != len(port.symbols):
            raise onnx.shape_inference.InferenceError(
                f"{operator.name}: input '{port.name}' has rank {len(dimensions)}; its shape is {port.shape}"
            )
        for symbol, dimension in zip(port.symbols, dimensions, strict=True):
            if dimension.HasField("dim_value") or symbol not in known:
                known[symbol] = dimension
    return known


def _has_one_rank(port: Port) -> bool:
    return "] or [" not in port.shape

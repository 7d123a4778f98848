"""Tells the onnx package about the operators, so that its checker and shape inference know them."""

from __future__ import annotations

import onnx

from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.custom_ops.schema import ELEMENT, ELEMENT_TYPES, OPERATORS, Attribute, Operator, Port

_Option = onnx.defs.OpSchema.FormalParameterOption


def register_schemas() -> None:
    """Register the operators' schemas with onnx; does nothing where they already are."""
    for operator in OPERATORS:
        if not onnx.defs.has(operator.name, OPERATOR_DOMAIN):
            onnx.defs.register_schema(build_schema(operator))


def build_schema(operator: Operator) -> onnx.defs.OpSchema:
    """Build the onnx schema of one operator, with type and shape inference for outputs that follow an input."""
    schema = onnx.defs.OpSchema(
        operator.name,
        OPERATOR_DOMAIN,
        OPERATOR_VERSION,
        doc=operator.doc,
        inputs=[_parameter(port) for port in operator.inputs],
        outputs=[_parameter(port) for port in operator.outputs],
        type_constraints=[(ELEMENT, list(ELEMENT_TYPES), "Element type of queries, keys, values and caches.")],
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
    """Copy the type of the input that an output continues, or follows in shape."""
    for index, port in enumerate(operator.outputs):
        if index >= context.get_num_outputs():
            return
        if port.type == ELEMENT:
            source = port.alias if port.alias >= 0 else 0
            context.set_output_type(index, context.get_input_type(source))
        else:
            result = onnx.TypeProto()
            result.tensor_type.elem_type = onnx.TensorProto.FLOAT
            for _ in port.shape.split(","):
                result.tensor_type.shape.dim.add()
            context.set_output_type(index, result)

"""Sizes and bytes of ONNX tensors, also of types that NumPy does not have."""

from __future__ import annotations

import math

import numpy as np
import onnx

from ortolan.element_types import from_onnx
from ortolan.errors import UnsupportedModelError


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Count the bytes of a tensor's elements.

    Raises:
        UnsupportedModelError: its type has no fixed size, as text has not.
    """
    try:
        bits = from_onnx(tensor.data_type).bits
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"weight '{tensor.name}': {error}") from error
    elements: int = math.prod(tensor.dims)
    return -(-elements * bits // 8)


def take_bytes(tensor: onnx.TensorProto) -> bytes:
    """Return the bytes of a tensor that the graph itself holds, little-endian, and forget them there."""
    if tensor.HasField("raw_data"):
        data = tensor.raw_data
    elif from_onnx(tensor.data_type).bits < 8:  # a byte of several elements in each integer
        data = np.array(tensor.int32_data, np.int32).astype(np.uint8).tobytes()
    else:
        data = onnx.numpy_helper.to_array(tensor).tobytes()
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(field)
    return data


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto:
    """Return what a Constant node gives, under the name of its output.

    Raises:
        UnsupportedModelError: it is sparse or text.
    """
    attribute = node.attribute[0]
    result = onnx.TensorProto()
    if attribute.name == "value":
        result.CopyFrom(attribute.t)
    elif attribute.name in ("value_int", "value_ints"):
        result = onnx.numpy_helper.from_array(np.array(onnx.helper.get_attribute_value(attribute), np.int64))
    elif attribute.name in ("value_float", "value_floats"):
        result = onnx.numpy_helper.from_array(np.array(onnx.helper.get_attribute_value(attribute), np.float32))
    else:
        raise UnsupportedModelError(f"cannot convert node '{node.name}', a Constant: it holds a {attribute.name}")
    result.name = node.output[0]
    return result

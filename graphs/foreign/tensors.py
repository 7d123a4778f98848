"""Sizes and bytes of ONNX tensors, also of types that NumPy does not have."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx

from ortolan.errors import UnsupportedModelError

_T = onnx.TensorProto
_BITS: Mapping[int, int] = {
    **dict.fromkeys((_T.INT4, _T.UINT4), 4),
    **dict.fromkeys((_T.INT8, _T.UINT8, _T.BOOL), 8),
    **dict.fromkeys((_T.FLOAT8E4M3FN, _T.FLOAT8E4M3FNUZ, _T.FLOAT8E5M2, _T.FLOAT8E5M2FNUZ), 8),
    **dict.fromkeys((_T.FLOAT16, _T.BFLOAT16, _T.INT16, _T.UINT16), 16),
    **dict.fromkeys((_T.FLOAT, _T.INT32, _T.UINT32), 32),
    **dict.fromkeys((_T.DOUBLE, _T.INT64, _T.UINT64), 64),
}
PLAIN_TYPES = frozenset((_T.FLOAT, _T.FLOAT16, _T.DOUBLE, _T.INT32, _T.INT64, _T.INT8, _T.UINT8, _T.BOOL))  # NumPy's


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Count the bytes of a tensor's elements.

    Raises:
        UnsupportedModelError: its type has no fixed size, as text has not.
    """
    bits = _BITS.get(tensor.data_type)
    if bits is None:
        raise UnsupportedModelError(f"weight '{tensor.name}' has an element type that is not known: {tensor.data_type}")
    elements: int = math.prod(tensor.dims)
    return -(-elements * bits // 8)


def take_bytes(tensor: onnx.TensorProto) -> bytes:
    """Return the bytes of a tensor that the graph itself holds, little-endian, and forget them there."""
    data = tensor.raw_data if tensor.HasField("raw_data") else onnx.numpy_helper.to_array(tensor).tobytes()
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

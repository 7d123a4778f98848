"""Reads weights of a model folder as the values that they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_tensor

from ortolan.custom_ops import low_bit_reference
from ortolan.custom_ops.low_bit_reference import WEIGHT_PORTS

INTEGER_BITS = {4: "int4", 8: "int8"}


def read_tensor(folder: Path, tensor: onnx.TensorProto) -> np.ndarray:
    """Read one initializer."""
    whole = onnx.TensorProto()
    whole.CopyFrom(tensor)
    load_external_data_for_tensor(whole, str(folder))
    return onnx.numpy_helper.to_array(whole)


def read_weight(folder: Path, model: onnx.ModelProto, stem: str) -> np.ndarray:
    """Dequantize a linear weight: [N, K] float64."""
    tensors = {t.name: t for t in model.graph.initializer}
    ports = {
        port: read_tensor(folder, tensors[f"{stem}.{port}"]) for port in WEIGHT_PORTS if f"{stem}.{port}" in tensors
    }
    node = next(node for node in model.graph.node if f"{stem}.codes" in node.input and "Gather" not in node.op_type)
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    ports["codes"] = ports["codes"].reshape(len(ports["codes"]), -1)
    if node.op_type == "MatMulNBits":
        options = {"format": INTEGER_BITS[given["bits"]], "group_size": given["block_size"]}
    else:
        options = {name: given[name] for name in ("group_size", "scale_rows")} | {"format": given["format"].decode()}
    return low_bit_reference.dequantize(**ports, **options)

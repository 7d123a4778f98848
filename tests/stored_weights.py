"""Reads weights of a model folder as the values that they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_tensor

from ortolan.custom_ops import low_bit_reference
from ortolan.custom_ops.low_bit_schema import WEIGHT_PORTS
from ortolan.manifest import MODEL_FILE

INTEGER_BITS = {4: "int4", 8: "int8"}


def read_tensor(folder: Path, tensor: onnx.TensorProto) -> np.ndarray:
    """Read one initializer."""
    whole = onnx.TensorProto()
    whole.CopyFrom(tensor)
    load_external_data_for_tensor(whole, str(folder))
    return onnx.numpy_helper.to_array(whole)


def low_bit_stems(model: onnx.ModelProto) -> list[str]:
    """List what is stored in codes: linear weights without their ending, and weights of experts."""
    return [t.name.removesuffix(".codes") for t in model.graph.initializer if t.name.endswith(".codes")]


def joint_rows(model: onnx.ModelProto, stem: str) -> tuple[str, slice]:
    """Return the joint weight of queries, keys and values that holds one of them, and its rows."""
    layer, name = stem.rsplit(".", 1)
    path = "/".join(layer.rsplit(".", 1))
    split = next(node for node in model.graph.node if node.name == f"{path}/qkv/Split")
    sizes = next(t for t in model.graph.initializer if t.name == split.input[1])
    ends = onnx.numpy_helper.to_array(sizes).cumsum()
    place = ("query", "key", "value").index(name)
    return f"{layer}.qkv", slice(int(ends[place - 1]) if place else 0, int(ends[place]))


def read_weight(folder: Path, model: onnx.ModelProto, stem: str) -> np.ndarray:
    """Dequantize a linear weight, [N, K] float64, or one of all experts, [E, N, K]."""
    if not any(tensor.name == f"{stem}.codes" for tensor in model.graph.initializer):
        whole, rows = joint_rows(model, stem)
        return read_weight(folder, model, whole)[rows]
    tensors = {t.name: t for t in model.graph.initializer}
    ports = {
        port: read_tensor(folder, tensors[f"{stem}.{port}"]) for port in WEIGHT_PORTS if f"{stem}.{port}" in tensors
    }
    node = next(node for node in model.graph.node if f"{stem}.codes" in node.input and "Gather" not in node.op_type)
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "LowBitExperts":
        options = {name: given[name] for name in ("group_size", "scale_rows")} | {"format": given["format"].decode()}
        each = ({port: values[e] for port, values in ports.items()} for e in range(len(ports["codes"])))
        return np.stack([low_bit_reference.dequantize(**expert, **options) for expert in each])
    ports["codes"] = ports["codes"].reshape(len(ports["codes"]), -1)
    if node.op_type == "MatMulNBits":
        options = {"format": INTEGER_BITS[given["bits"]], "group_size": given["block_size"]}
    else:
        options = {name: given[name] for name in ("group_size", "scale_rows")} | {"format": given["format"].decode()}
    return low_bit_reference.dequantize(**ports, **options)


def store_dequantized(low: Path, dense: Path) -> dict[str, float]:
    """Write into a dense model folder what a folder of the same model stands for where it has low bits.

    Returns:
        The root mean square difference of each weight, relative to its deviation before, by its dense name.
    """
    models = [onnx.load(folder / MODEL_FILE, load_external_data=False) for folder in (low, dense)]
    tensors = {tensor.name: tensor for tensor in models[1].graph.initializer}
    errors = {}
    for stem in low_bit_stems(models[0]):
        name = stem if stem in tensors else f"{stem}.weight"
        before = read_tensor(dense, tensors[name])
        values = read_weight(low, models[0], stem).astype(before.dtype)
        errors[name] = float(np.sqrt(np.mean((values - before) ** 2)) / before.std())
        place = {entry.key: entry.value for entry in tensors[name].external_data}
        with (dense / place["location"]).open("r+b") as stream:
            stream.seek(int(place["offset"]))
            stream.write(np.ascontiguousarray(values).tobytes())
    return errors

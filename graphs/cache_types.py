"""Changes the element type of the caches of a decoder graph that is there."""

from __future__ import annotations

import onnx

from ortolan import contract
from ortolan.custom_ops.schema import OPERATORS
from ortolan.custom_ops.schema_parts import Operator
from ortolan.element_types import element_type
from ortolan.errors import ContractMismatchError
from ortolan.manifest import MANIFEST_METADATA, Manifest

_ROLES = {"key": (contract.key_cache, contract.key_scale), "value": (contract.value_cache, contract.value_scale)}
_OPERATORS = {each.name: each for each in OPERATORS if any(port.name == "key_scale" for port in each.inputs)}


def change_cache_dtype(model: onnx.ModelProto, manifest: Manifest) -> None:
    """Give a graph's caches the element type of the manifest, in place; weights may be absent.

    1. Cache inputs and outputs change their type.
    2. Scales of rows become inputs and outputs where caches hold codes from now on, and go where they no longer do.
    3. Every operator on a cache takes its scales, and gives them out where it updates them.

    Raises:
        ContractMismatchError: the graph has no caches of the manifest's layers.
    """
    graph = model.graph
    scales = _change_inputs(graph, manifest)
    if not scales:
        raise ContractMismatchError("the graph has no key and value caches; export the model again")
    for node in graph.node:
        if node.domain == contract.OPERATOR_DOMAIN and node.op_type in _OPERATORS:
            _change_node(node, _OPERATORS[node.op_type], scales, manifest)
    del graph.value_info[:]  # they may tell the types of caches between operators
    for entry in model.metadata_props:
        if entry.key == MANIFEST_METADATA:
            entry.value = manifest.to_json()


def _change_inputs(graph: onnx.GraphProto, manifest: Manifest) -> dict[str, str]:
    """Change inputs and outputs; returns the name of the scales of each cache input."""
    inputs, outputs = ({value.name: value for value in values} for values in (graph.input, graph.output))
    scales = {}
    for index in range(len(manifest.layers)):
        for cache, scale in ((name(index), scale(index)) for name, scale in _ROLES.values()):
            if cache not in inputs:
                continue
            scales[cache] = scale
            for values, place, name in (
                (graph.input, inputs, str),
                (graph.output, outputs, contract.output),
            ):
                place[name(cache)].type.tensor_type.elem_type = element_type(manifest.cache_dtype).onnx
                if name(scale) in place:
                    values.remove(place[name(scale)])
                if manifest.has_code_caches:
                    values.append(_scales_of(place[name(cache)], name(scale)))
    return scales


def _scales_of(cache: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    """Describe the scales [N, Hkv, P] of a cache [N, Hkv, P, D]."""
    scale = onnx.ValueInfoProto()
    scale.CopyFrom(cache)
    scale.name = name
    scale.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    del scale.type.tensor_type.shape.dim[3:]
    return scale


def _change_node(node: onnx.NodeProto, operator: Operator, scales: dict[str, str], manifest: Manifest) -> None:
    """Give one node its scales; `scales` learns those of the caches that it gives out."""
    inputs, outputs = ([port.name for port in ports] for ports in (operator.inputs, operator.outputs))
    for role in _ROLES:
        if f"{role}_cache" not in inputs:
            continue
        scale = scales[node.input[inputs.index(f"{role}_cache")]]
        _put(node.input, inputs.index(f"{role}_scale"), scale if manifest.has_code_caches else "")
        if f"{role}_scale_out" in outputs:
            updated = contract.output(scale)
            scales[node.output[outputs.index(f"{role}_cache_out")]] = updated
            _put(node.output, outputs.index(f"{role}_scale_out"), updated if manifest.has_code_caches else "")


def _put(names: list[str], place: int, name: str) -> None:
    """Set one of a node's ports; empty ones at the end are left out."""
    names.extend([""] * (place + 1 - len(names)))
    names[place] = name
    while names and not names[-1]:
        names.pop()

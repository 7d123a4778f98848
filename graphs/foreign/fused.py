"""Builds the fused graphs of a foreign decoder, and brings the plain weights into the form that all graphs read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx
import onnx_graphsurgeon as gs

from ortolan.element_types import CPU_TYPES
from ortolan.graphs.builder import MICROSOFT, GraphBuilder
from ortolan.graphs.decoder import build_model
from ortolan.graphs.foreign.describe import Description
from ortolan.graphs.foreign.prepare import ForeignBytes
from ortolan.graphs.foreign.reader import is_transpose
from ortolan.graphs.formats.dense import Dense
from ortolan.graphs.options import Fusion, GraphOptions
from ortolan.graphs.parts import Formats


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedConversion:
    """The fused graphs of a converted model.

    Attributes:
        models: by device; their weights, which are the same, are declared, and not attached yet.
        members: for each of the weights, the weights of the plain graph that follow each other in the file to make it.
        turned: shapes [in, out] of the plain graph's weights that are written transposed.
    """

    models: dict[Fusion, onnx.ModelProto]
    members: dict[str, tuple[str, ...]]
    turned: dict[str, tuple[int, int]]


def build_fused(
    graph: GraphBuilder, weights: dict[str, ForeignBytes], description: Description, options: GraphOptions
) -> FusedConversion | None:
    """Build the fused graphs, and turn the dense weights of the plain one, [in, out], to [out, in].

    Args:
        graph: the plain graph; what the fused graphs read of it becomes external, and a MatMul whose weight is turned
            becomes a FusedMatMul.
        weights: where the bytes of its weights lie; those that become external are added.
        description: of the graph.
        options: of the plain graph.

    Returns:
        The fused graphs; None where two parts of one would read the same weight.
    """
    formats = Formats(default=Dense(), by_stem=description.blocks, apart=description.apart)
    devices: list[Fusion] = ["cuda", "cpu"] if options.dtype in CPU_TYPES else ["cuda"]
    models = {
        device: build_model(description.config, replace(options, fused_for=device), formats) for device in devices
    }
    read = [t.name for t in models["cuda"].graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    tensors = [member for name in read for member in description.sources[name]]
    if len({tensor.name for tensor in tensors}) < len(tensors):
        return None
    for tensor in tensors:
        if isinstance(tensor, gs.Constant):
            data = graph.as_weight(tensor)
            weights[tensor.name] = ForeignBytes(length=len(data), data=data)
    turned = {}
    for node in description.products:
        proto = onnx.TensorProto()
        proto.CopyFrom(graph.weights[node.inputs[1].name])
        turned[proto.name] = (int(proto.dims[0]), int(proto.dims[1]))
        proto.dims[:] = reversed(proto.dims)
        graph.weights[proto.name] = proto
        node.op, node.domain, node.attrs = "FusedMatMul", MICROSOFT, {"transB": 1}
        for reader in list(node.inputs[1].outputs):
            if is_transpose(reader):  # the embedding of a head that it shares its weight with
                graph.replace(reader.outputs[0], node.inputs[1])
    members = {name: tuple(member.name for member in description.sources[name]) for name in read}
    return FusedConversion(models=models, members=members, turned=turned)

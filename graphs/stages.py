"""Cuts a decoder's graph into a stage for each layer, which run one after another with the weights of one at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import onnx

_LAYER = re.compile(r"layers\.(\d+)/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Nodes that run together.

    Attributes:
        nodes: in the order of the graph.
        inputs: values of earlier stages that the nodes read.
        outputs: values of the nodes that are wanted, or that later stages read.
        carried: values of this stage and of earlier ones that later stages read.
    """

    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    carried: frozenset[str]

    def model(self, whole: onnx.ModelProto, types: Mapping[str, int]) -> onnx.ModelProto:
        """Return the stage as a model.

        Args:
            whole: the model that was cut; the stage's initializers lie where its own do.
            types: element type of each value of `inputs`, as onnx numbers it.
        """
        read = {name for node in self.nodes for name in node.input}
        model = onnx.ModelProto(ir_version=whole.ir_version, opset_import=whole.opset_import)
        graph = model.graph
        graph.name = whole.graph.name
        graph.node.extend(self.nodes)
        graph.initializer.extend(tensor for tensor in whole.graph.initializer if tensor.name in read)
        graph.input.extend(value for value in whole.graph.input if value.name in read)
        graph.input.extend(onnx.helper.make_tensor_value_info(name, types[name], None) for name in self.inputs)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.outputs)  # a runtime infers the types
        return model


def cut_by_layer(graph: onnx.GraphProto, wanted: Collection[str]) -> list[Stage]:
    """Cut a graph whose nodes are named by paths, `layers.{i}/...` inside layer i.

    A node outside of layers joins the stage of the last value that it reads, or the first stage. Nodes that no wanted
    value needs are left out.

    Args:
        graph: with nodes in an order in which they can run.
        wanted: values of nodes that a caller reads.

    Returns:
        The stages, in an order in which they can run.
    """
    stage_of: dict[str, int] = {}
    nodes: defaultdict[int, list[onnx.NodeProto]] = defaultdict(list)
    for node in _needed(graph.node, wanted):
        number = max([_layer(node), *(stage_of.get(name, 0) for name in node.input)])
        nodes[number].append(node)
        stage_of.update((name, number) for name in node.output if name)
    stages: list[Stage] = []
    carried: frozenset[str] = frozenset()  # from stages up to a number, into those behind it
    for number in sorted(nodes, reverse=True):
        read = {name for node in nodes[number] for name in node.input}
        made = [name for node in nodes[number] for name in node.output]
        stage = Stage(
            nodes=tuple(nodes[number]),
            inputs=tuple(sorted(name for name in read if stage_of.get(name, number) < number)),
            outputs=tuple(name for name in made if name in wanted or name in carried),
            carried=carried,
        )
        carried = carried.difference(made) | set(stage.inputs)
        stages.insert(0, stage)
    return stages


def _needed(nodes: Iterable[onnx.NodeProto], wanted: Collection[str]) -> list[onnx.NodeProto]:
    """Return the nodes that wanted values need, in order."""
    needed, found = set(wanted), []
    for node in reversed(list(nodes)):
        if not needed.isdisjoint(node.output):
            needed.update(node.input)
            needed.discard("")  # an optional input that is left out
            found.append(node)
    return found[::-1]


def _layer(node: onnx.NodeProto) -> int:
    match = _LAYER.match(node.name)
    return int(match[1]) if match else 0

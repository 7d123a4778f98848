"""A finished graph opened for rewriting: onnx-graphsurgeon underneath, with what it would lose kept aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from ortolan.graphs.external_data import ExternalTensor, read_external_data

Tensor: TypeAlias = Any  # gs.Tensor; graphsurgeon has no types
Node: TypeAlias = Any  # gs.Node


@dataclass(frozen=True, slots=True)
class Weight:
    """An external initializer: its declaration, and where its bytes lie."""

    proto: onnx.TensorProto
    where: ExternalTensor


class GraphRewriter:
    """Replaces nodes of a model; weights stay external, doc strings and metadata survive.

    Attributes:
        graph: the graph as onnx-graphsurgeon sees it; weights are variables without a producer.
        weights: the external initializers by name.
        shapes: dimensions of the values whose rank onnx can infer; None where one is not a number.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = onnx.ModelProto()
        self._model.CopyFrom(model)
        self.weights = {
            tensor.name: Weight(tensor, read_external_data(tensor))
            for tensor in model.graph.initializer
            if tensor.data_location == onnx.TensorProto.EXTERNAL
        }
        kept = [t for t in model.graph.initializer if t.name not in self.weights]
        del self._model.graph.initializer[:]
        self._model.graph.initializer.extend(kept)
        with G_LOGGER.suppress(G_LOGGER.ERROR):  # it prints what types NumPy lacks to standard output
            self.graph = gs.import_onnx(self._model)
        self.shapes = self._infer_shapes()
        self._constants: dict[str, Tensor] = {}
        self._rows: dict[str, onnx.ValueInfoProto] = {}
        self._doc_strings = {node.name: node.doc_string for node in model.graph.node if node.doc_string}

    def _infer_shapes(self) -> dict[str, list[int | None]]:
        """Infer what shapes onnx can; the weights take part as inputs."""
        bare = onnx.ModelProto()
        bare.CopyFrom(self._model)
        for name, weight in self.weights.items():
            info = onnx.helper.make_tensor_value_info(name, weight.proto.data_type, weight.proto.dims)
            bare.graph.input.append(info)
        inferred = onnx.shape_inference.infer_shapes(bare).graph
        return {
            value.name: [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
            for value in (*inferred.value_info, *inferred.input, *inferred.output)
            if value.type.tensor_type.HasField("shape")
        }

    def nodes(self, op: str) -> list[Node]:
        """List the nodes of one operator, in graph order."""
        return [node for node in self.graph.nodes if node.op == op]

    def weight(self, tensor: Tensor) -> Weight | None:
        """Return the weight that a tensor is, if it is one."""
        return self.weights.get(tensor.name)

    def declare(self, weight: Weight) -> Tensor:
        """Add a weight to the graph."""
        self.weights[weight.proto.name] = weight
        return gs.Variable(weight.proto.name, dtype=weight.proto.data_type, shape=list(weight.proto.dims))

    def value(self, name: str) -> Tensor:
        """Make a new value that a node will give."""
        return gs.Variable(name)

    def describe_rows(self, tensor: Tensor, data_type: int, features: int) -> None:
        """Say that a value is [T, features]: ONNX Runtime gives a buffer on only where it knows what fits into it."""
        self._rows[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, data_type, ["T", features])

    def node(
        self,
        name: str,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        domain: str | None = None,
        **attributes: Any,
    ) -> None:
        """Add a node, of the standard domain by default; `outputs` leave the nodes that gave them before."""
        self._add(gs.Node(op=op, name=name, attrs=attributes, inputs=list(inputs), domain=domain), outputs)

    def constant(self, name: str, values: Sequence[float], dtype: type[np.generic] = np.int64) -> Tensor:
        """Refer to a small constant; equal names are one tensor."""
        if name not in self._constants:
            self._constants[name] = gs.Constant(name, np.array(values, dtype))
        return self._constants[name]

    def operator(
        self,
        name: str,
        emit: Callable[..., onnx.NodeProto],
        inputs: Mapping[str, Tensor | None],
        outputs: Sequence[Tensor],
        **attributes: int | float | str,
    ) -> None:
        """Add one of Ortolan's operators; `outputs` leave the nodes that gave them before.

        Args:
            name: of the node.
            emit: the operator's typed emitter.
            inputs: tensors by port; None for an optional port that stays empty.
            outputs: tensors in the order of the ports; an empty variable for a port that is not asked for.
            attributes: of the operator.
        """
        given = {port: tensor for port, tensor in inputs.items() if tensor is not None}
        names = {port: tensor.name for port, tensor in given.items()}
        proto = emit(**names, outputs=tuple(o.name for o in outputs), name=name, **attributes)
        tensors = {tensor.name: tensor for tensor in given.values()}
        node = gs.Node(
            op=proto.op_type,
            name=name,
            domain=proto.domain,
            attrs={a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute},
            inputs=[tensors[i] if i else gs.Variable.empty() for i in proto.input],
        )
        self._add(node, outputs)
        self._doc_strings[name] = proto.doc_string

    def _add(self, node: Node, outputs: Sequence[Tensor]) -> None:
        for tensor in outputs:
            for former in list(tensor.inputs):
                former.outputs = [gs.Variable(f"{o.name}/replaced") if o is tensor else o for o in former.outputs]
        node.outputs = list(outputs)
        self.graph.nodes.append(node)

    def sweep(self) -> None:
        """Drop what nothing reads any more, so that it counts as nobody's user."""
        self.graph.cleanup().toposort()

    def finish(self) -> onnx.ModelProto:
        """Return the model."""
        self.sweep()
        with G_LOGGER.suppress(G_LOGGER.ERROR):
            model: onnx.ModelProto = gs.export_onnx(self.graph, do_type_check=False)
        model.ir_version = self._model.ir_version
        model.producer_name = self._model.producer_name
        model.graph.doc_string = self._model.graph.doc_string
        del model.metadata_props[:]
        model.metadata_props.extend(self._model.metadata_props)
        read = {name for node in model.graph.node for name in node.input}
        del model.graph.value_info[:]
        model.graph.value_info.extend(
            self._rows[name] for node in model.graph.node for name in node.output if name in self._rows
        )
        for node in model.graph.node:
            node.doc_string = self._doc_strings.get(node.name, "")
        model.graph.initializer.extend(w.proto for name, w in self.weights.items() if name in read)
        return model


def producer(tensor: Tensor) -> Node | None:
    """Return the node that gives a tensor; None for inputs and weights."""
    return tensor.inputs[0] if tensor.inputs else None


def produced_by(tensor: Tensor, op: str) -> Node | None:
    """Return the node that gives a tensor if it is of one operator of the standard domain."""
    node = producer(tensor)
    return node if node is not None and node.op == op and not node.domain else None


def only_user(rewriter: GraphRewriter, tensor: Tensor) -> Node | None:
    """Return the one node that reads a tensor, once; None where there are others, or it is a graph output."""
    if len(tensor.outputs) != 1 or any(tensor is output for output in rewriter.graph.outputs):
        return None
    return tensor.outputs[0]

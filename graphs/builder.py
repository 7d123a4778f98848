"""A graph under construction, new or opened: onnx-graphsurgeon underneath, path-like names, documented operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.custom_ops import emitters
from ortolan.errors import ContractMismatchError

OPSET = 23  # the first with RMSNormalization and RotaryEmbedding
IR_VERSION = 10
PRODUCER = "ortolan"
MICROSOFT = "com.microsoft"

FLOAT = onnx.TensorProto.FLOAT
INT32 = onnx.TensorProto.INT32
INT64 = onnx.TensorProto.INT64
BOOL = onnx.TensorProto.BOOL

Tensor: TypeAlias = Any  # gs.Tensor; graphsurgeon has no types
Node: TypeAlias = Any  # gs.Node
Shape: TypeAlias = Sequence[int | str]


class GraphBuilder:
    """Adds nodes to a graphsurgeon graph; every node's name is a path, and its output is named after it.

    Attributes:
        graph: the graph as onnx-graphsurgeon sees it; weights are variables without a producer.
        weights: the external initializers by name.
        shapes: of an opened graph, the dimensions of values whose rank onnx can infer; None where one is not a number.
    """

    def __init__(self, name: str, doc_string: str) -> None:
        self.graph = gs.Graph(
            opset=OPSET,
            name=name,
            doc_string=doc_string,
            import_domains=[
                onnx.helper.make_opsetid("", OPSET),
                onnx.helper.make_opsetid(OPERATOR_DOMAIN, OPERATOR_VERSION),
            ],
        )
        self.weights: dict[str, onnx.TensorProto] = {}
        self.shapes: dict[str, list[int | None]] = {}
        self._ir_version, self._producer = IR_VERSION, PRODUCER
        self._constants: dict[str, Tensor] = {}
        self._described: dict[str, onnx.ValueInfoProto] = {}
        self._doc_strings: dict[str, str] = {}
        self._defaults: dict[str, tuple[Tensor, onnx.TensorProto, str]] = {}

    @classmethod
    def open(cls, model: onnx.ModelProto, doc_string: str) -> GraphBuilder:
        """Open a graph to change it; weights stay external, and the model itself stays as it is."""
        builder = cls(model.graph.name, doc_string)
        builder._ir_version, builder._producer = model.ir_version, model.producer_name
        bare = onnx.ModelProto()
        bare.CopyFrom(model)
        for tensor in model.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                builder.weights[tensor.name] = tensor
        kept = [t for t in bare.graph.initializer if t.name not in builder.weights]
        del bare.graph.initializer[:]
        bare.graph.initializer.extend(kept)
        with G_LOGGER.suppress(G_LOGGER.ERROR):  # it prints what types NumPy lacks to standard output
            builder.graph = gs.import_onnx(bare)
        builder.graph.doc_string = doc_string
        builder.shapes = _infer_shapes(bare, builder.weights)
        builder._doc_strings = {node.name: node.doc_string for node in model.graph.node if node.doc_string}
        for domain, version in ((OPERATOR_DOMAIN, OPERATOR_VERSION), (MICROSOFT, 1)):
            builder._import(domain, version)
        return builder

    def _import(self, domain: str, version: int) -> None:
        if all(entry.domain != domain for entry in self.graph.import_domains):
            self.graph.import_domains.append(onnx.helper.make_opsetid(domain, version))

    def input(self, name: str, dtype: int, shape: Shape) -> Tensor:
        """Declare a graph input."""
        tensor = gs.Variable(name, dtype=dtype, shape=list(shape))
        self.graph.inputs.append(tensor)
        return tensor

    def default_input(self, name: str, values: npt.ArrayLike, dtype: npt.DTypeLike, doc_string: str) -> Tensor:
        """Declare a graph input that need not be fed; the second use gives the same tensor.

        It is an input and an initializer, which ONNX Runtime neither folds nor lists among the inputs to be fed.

        Args:
            name: of the input.
            values: that it has where it is not fed.
            dtype: of its elements.
            doc_string: what it is.
        """
        if name not in self._defaults:
            proto = onnx.numpy_helper.from_array(np.asarray(values, dtype), name)
            tensor = self.input(name, proto.data_type, list(proto.dims))
            self._defaults[name] = tensor, proto, doc_string
        return self._defaults[name][0]

    def output(self, tensor: Tensor, name: str, dtype: int, shape: Shape) -> None:
        """Declare `tensor` a graph output under `name`."""
        tensor.name, tensor.dtype, tensor.shape = name, dtype, list(shape)
        self.graph.outputs.append(tensor)

    def weight(self, name: str, dtype: int, shape: Sequence[int]) -> Tensor:
        """Refer to a weight, which becomes an external initializer; the second use gives the same tensor."""
        if name not in self._constants:
            proto = onnx.TensorProto(name=name, data_type=dtype, dims=shape)
            proto.data_location = onnx.TensorProto.EXTERNAL
            self.weights[name] = proto
            self._constants[name] = gs.Variable(name, dtype=dtype, shape=list(shape))
        return self._constants[name]

    def constant(self, name: str, values: npt.ArrayLike, dtype: npt.DTypeLike) -> Tensor:
        """Refer to a small inline constant; the second use gives the same tensor."""
        if name not in self._constants:
            self._constants[name] = gs.Constant(name, np.ascontiguousarray(np.asarray(values, dtype)))
        return self._constants[name]

    def node(
        self,
        name: str,
        op: str,
        inputs: Sequence[Tensor],
        attrs: Mapping[str, Any] | None = None,
        domain: str | None = None,
    ) -> Tensor:
        """Add a node, of the standard domain by default, and return its first output."""
        return self.nodes(name, op, inputs, 1, attrs, domain)[0]

    def nodes(
        self,
        name: str,
        op: str,
        inputs: Sequence[Tensor],
        num_outputs: int,
        attrs: Mapping[str, Any] | None = None,
        domain: str | None = None,
    ) -> list[Tensor]:
        """Add a node, of the standard domain by default, and return all its outputs."""
        if domain:
            self._import(domain, 1)
        outputs = self._outputs(name, num_outputs)
        node = gs.Node(op=op, name=name, attrs=dict(attrs or {}), inputs=list(inputs), outputs=outputs, domain=domain)
        self.graph.nodes.append(node)
        return outputs

    def operator(
        self,
        name: str,
        emit: Callable[..., onnx.NodeProto],
        inputs: Mapping[str, Tensor | None],
        num_outputs: int = 1,
        skipped_outputs: Collection[int] = (),
        **attributes: int | float | str,
    ) -> list[Tensor]:
        """Add one of Ortolan's operators, as its typed emitter describes it, and return its outputs.

        Args:
            name: of the node.
            emit: the operator's typed emitter.
            inputs: tensors by port; None for an optional port that stays empty.
            num_outputs: how many outputs are asked for.
            skipped_outputs: the places among the outputs that are not asked for.
            attributes: of the operator.
        """
        given = {port: tensor for port, tensor in inputs.items() if tensor is not None}
        outputs = self._outputs(name, num_outputs)
        asked = iter(outputs)
        places = range(num_outputs + len(skipped_outputs))
        all_outputs = [gs.Variable.empty() if place in skipped_outputs else next(asked) for place in places]
        names = {port: tensor.name for port, tensor in given.items()}
        proto = emit(**names, outputs=tuple(o.name for o in all_outputs), name=name, **attributes)
        tensors = {tensor.name: tensor for tensor in given.values()}
        self.graph.nodes.append(
            gs.Node(
                op=proto.op_type,
                name=name,
                domain=proto.domain,
                attrs={a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute},
                inputs=[tensors[i] if i else gs.Variable.empty() for i in proto.input],
                outputs=all_outputs,
            )
        )
        self._doc_strings[name] = proto.doc_string
        return outputs

    @staticmethod
    def _outputs(name: str, count: int) -> list[Tensor]:
        return [gs.Variable(f"{name}/output_{i}" if i else f"{name}/output") for i in range(count)]

    def reshape(self, name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Reshape; 0 keeps a dimension."""
        key = "shapes/" + "x".join(str(dim) for dim in shape)
        return self.node(name, "Reshape", [tensor, self.constant(key, shape, np.int64)])

    def describe(self, tensor: Tensor, data_type: int, shape: Shape) -> None:
        """Say which shape a value has: ONNX Runtime gives a buffer on only where it knows what fits into it."""
        self._described[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, data_type, list(shape))

    def as_weight(self, constant: Tensor) -> bytes:
        """Let an inline constant be a weight in the finished model; returns its bytes, which are attached later."""
        values = constant.values
        dtype = onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
        proto = onnx.TensorProto(name=constant.name, data_type=dtype, dims=values.shape)
        proto.data_location = onnx.TensorProto.EXTERNAL
        self.weights[constant.name] = proto
        return bytes(values.tobytes())

    @staticmethod
    def replace(old: Tensor, new: Tensor) -> None:
        """Let everything that reads one value read another."""
        for reader in list(old.outputs):
            reader.inputs = [new if tensor is old else tensor for tensor in reader.inputs]

    def sweep(self) -> None:
        """Drop what no output needs, and sort the rest."""
        self.graph.cleanup().toposort()

    def finish(self) -> onnx.ModelProto:
        """Export the graph; the bytes of new weights are not attached yet."""
        self.sweep()
        names = [node.name for node in self.graph.nodes]
        if len(set(names)) != len(names):
            raise ContractMismatchError("two nodes of the graph share a name")
        with G_LOGGER.suppress(G_LOGGER.ERROR):
            model: onnx.ModelProto = gs.export_onnx(self.graph, do_type_check=False)
        model.ir_version, model.producer_name = self._ir_version, self._producer
        made = {name for node in model.graph.node for name in node.output}
        read = {name for node in model.graph.node for name in node.input}
        del model.graph.value_info[:]
        model.graph.value_info.extend(value for name, value in self._described.items() if name in made)
        for node in model.graph.node:
            node.doc_string = self._doc_strings.get(node.name, "")
        inline = [tensor for tensor in model.graph.initializer if tensor.name not in self.weights]
        del model.graph.initializer[:]
        model.graph.initializer.extend(inline)
        model.graph.initializer.extend(proto for name, proto in self.weights.items() if name in read)
        self._attach_defaults(model.graph)
        return model

    def _attach_defaults(self, graph: onnx.GraphProto) -> None:
        """Give inputs their defaults and doc strings, for which graphsurgeon has no place."""
        for value in graph.input:
            if value.name in self._defaults:
                _, proto, value.doc_string = self._defaults[value.name]
                graph.initializer.append(proto)


def _infer_shapes(bare: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> dict[str, list[int | None]]:
    """Infer what shapes onnx can; the weights take part as inputs."""
    whole = onnx.ModelProto()
    whole.CopyFrom(bare)
    for name, weight in weights.items():
        whole.graph.input.append(onnx.helper.make_tensor_value_info(name, weight.data_type, weight.dims))
    inferred = onnx.shape_inference.infer_shapes(whole).graph
    return {
        value.name: [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
        if value.type.tensor_type.HasField("shape")
    }


def producer(tensor: Tensor) -> Node | None:
    """Return the node that gives a tensor; None for inputs and weights."""
    return tensor.inputs[0] if tensor.inputs else None


__all__ = [
    "BOOL",
    "FLOAT",
    "INT32",
    "INT64",
    "MICROSOFT",
    "GraphBuilder",
    "Node",
    "Shape",
    "Tensor",
    "emitters",
    "producer",
]

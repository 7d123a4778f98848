"""A graph under construction: onnx-graphsurgeon underneath, path-like names, operators with doc strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.custom_ops import emitters
from ortolan.errors import ContractMismatchError

OPSET = 23  # the first with RMSNormalization and RotaryEmbedding
IR_VERSION = 10
PRODUCER = "ortolan"

FLOAT = onnx.TensorProto.FLOAT
INT32 = onnx.TensorProto.INT32
INT64 = onnx.TensorProto.INT64
BOOL = onnx.TensorProto.BOOL

Tensor: TypeAlias = Any  # gs.Tensor; graphsurgeon has no types
Shape: TypeAlias = Sequence[int | str]


class GraphBuilder:
    """Adds nodes to a graphsurgeon graph; every node's name is a path, and its output is named after it."""

    def __init__(self, name: str, doc_string: str) -> None:
        self._graph = gs.Graph(
            opset=OPSET,
            name=name,
            doc_string=doc_string,
            import_domains=[
                onnx.helper.make_opsetid("", OPSET),
                onnx.helper.make_opsetid(OPERATOR_DOMAIN, OPERATOR_VERSION),
            ],
        )
        self._constants: dict[str, Tensor] = {}
        self._weights: dict[str, tuple[int, Shape]] = {}
        self._doc_strings: dict[str, str] = {}

    def input(self, name: str, dtype: int, shape: Shape) -> Tensor:
        """Declare a graph input."""
        tensor = gs.Variable(name, dtype=dtype, shape=list(shape))
        self._graph.inputs.append(tensor)
        return tensor

    def output(self, tensor: Tensor, name: str, dtype: int, shape: Shape) -> None:
        """Declare `tensor` a graph output under `name`."""
        tensor.name, tensor.dtype, tensor.shape = name, dtype, list(shape)
        self._graph.outputs.append(tensor)

    def weight(self, name: str, dtype: int, shape: Shape) -> Tensor:
        """Refer to a weight, which becomes an external initializer; the second use gives the same tensor."""
        if name not in self._weights:
            self._weights[name] = (dtype, shape)
            self._constants[name] = gs.Variable(name, dtype=dtype, shape=list(shape))
        return self._constants[name]

    def constant(self, name: str, values: npt.ArrayLike, dtype: type[np.generic]) -> Tensor:
        """Refer to a small inline constant; the second use gives the same tensor."""
        if name not in self._constants:
            self._constants[name] = gs.Constant(name, np.ascontiguousarray(np.asarray(values, dtype)))
        return self._constants[name]

    def node(self, name: str, op: str, inputs: Sequence[Tensor], attrs: Mapping[str, Any] | None = None) -> Tensor:
        """Add a node of the standard domain and return its first output."""
        return self.nodes(name, op, inputs, 1, attrs)[0]

    def nodes(
        self,
        name: str,
        op: str,
        inputs: Sequence[Tensor],
        num_outputs: int,
        attrs: Mapping[str, Any] | None = None,
    ) -> list[Tensor]:
        """Add a node of the standard domain and return all its outputs."""
        outputs = [gs.Variable(f"{name}/output_{i}" if i else f"{name}/output") for i in range(num_outputs)]
        node = gs.Node(op=op, name=name, attrs=dict(attrs or {}), inputs=list(inputs), outputs=outputs)
        self._graph.nodes.append(node)
        return outputs

    def operator(
        self,
        name: str,
        emit: Callable[..., onnx.NodeProto],
        inputs: Mapping[str, Tensor],
        num_outputs: int = 1,
        **attributes: int | float | str,
    ) -> list[Tensor]:
        """Add one of Ortolan's operators, as its typed emitter describes it, and return its outputs."""
        outputs = [gs.Variable(f"{name}/output_{i}" if i else f"{name}/output") for i in range(num_outputs)]
        names = {port: tensor.name for port, tensor in inputs.items()}
        proto = emit(**names, outputs=tuple(o.name for o in outputs), name=name, **attributes)
        tensors = {tensor.name: tensor for tensor in inputs.values()}
        self._graph.nodes.append(
            gs.Node(
                op=proto.op_type,
                name=name,
                domain=proto.domain,
                attrs={a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute},
                inputs=[tensors[i] if i else gs.Variable.empty() for i in proto.input],
                outputs=outputs,
            )
        )
        self._doc_strings[name] = proto.doc_string
        return outputs

    def finish(self) -> onnx.ModelProto:
        """Export the graph; weights are declared as external tensors that are not attached yet."""
        names = [node.name for node in self._graph.nodes]
        if len(set(names)) != len(names):
            raise ContractMismatchError("two nodes of the graph share a name")
        model: onnx.ModelProto = gs.export_onnx(self._graph.toposort(), do_type_check=False)
        model.ir_version = IR_VERSION
        model.producer_name = PRODUCER
        for node in model.graph.node:
            text = self._doc_strings.get(node.name)
            if text:
                node.doc_string = text
            for attribute in node.attribute:  # text attributes come back from graphsurgeon as bytes or str
                assert attribute.name, "an attribute without a name"
        for name, (dtype, shape) in self._weights.items():
            tensor = model.graph.initializer.add(name=name, data_type=dtype, dims=list(shape))
            tensor.data_location = onnx.TensorProto.EXTERNAL
        return model


__all__ = ["BOOL", "FLOAT", "INT32", "INT64", "GraphBuilder", "Shape", "Tensor", "emitters"]

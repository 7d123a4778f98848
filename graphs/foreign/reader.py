"""Reads the pieces of a foreign decoder: norms, linear layers, gates. What has another form is not an error here."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from ortolan.element_types import from_onnx
from ortolan.graphs.builder import GraphBuilder, Node, Tensor, producer
from ortolan.graphs.config import Activation
from ortolan.graphs.formats.blocks import PORTS, Blocks

NORMS = ("SimplifiedLayerNormalization", "RMSNormalization")
PRODUCTS = ("MatMul", "MatMulNBits")
SKIP_NORM = "SkipSimplifiedLayerNormalization"
SUM = 3  # output of SKIP_NORM: what it normalised
_GATES: dict[str, Activation] = {"Gelu": "gelu", "FastGelu": "gelu_tanh"}


class OtherFormError(Exception):
    """The graph is not built as a fused graph needs it; it is converted without one."""


@dataclass(frozen=True, slots=True)
class ForeignLinear:
    """A linear layer: its input, its weight by port, and its bias.

    Attributes:
        x: what it multiplies.
        weights: tensors by the name of their port; "weight" of a dense one.
        blocks: the format where the weight is not dense; None where it is.
        node: of a product whose dense weight [in, out] must be turned; None for any other.
        rows: output features.
    """

    x: Tensor
    weights: dict[str, Tensor]
    blocks: Blocks | None
    node: Node | None
    rows: int
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForeignNorm:
    """An RMSNorm: what it reads (None for a sum that nothing else reads), its weight, and what makes the sum."""

    x: Tensor
    weight: Tensor
    added: tuple[Tensor, ...] = ()


def is_transpose(node: Node) -> bool:
    """Tell whether a node turns a matrix."""
    return bool(node.op == "Transpose" and list(node.attrs.get("perm", ())) == [1, 0])


class Reader:
    """Reads pieces of one graph whose activations are of one type.

    Attributes:
        epsilons: of all norms that were read.
    """

    def __init__(self, graph: GraphBuilder, dtype: str) -> None:
        self._graph, self._dtype = graph, dtype
        self.epsilons: set[float] = set()

    def weight(self, tensor: Tensor) -> Tensor:
        """Return a constant of the model's type."""
        if self.element(tensor) != self._dtype:
            raise OtherFormError(f"'{tensor.name}' is not a weight of type {self._dtype}")
        return tensor

    def element(self, tensor: Tensor) -> str:
        """Return the element type of a constant."""
        if isinstance(tensor, gs.Constant):
            return str(tensor.values.dtype)
        if tensor.name not in self._graph.weights:
            raise OtherFormError(f"'{tensor.name}' is computed")
        return from_onnx(self._graph.weights[tensor.name].data_type).name

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of a constant."""
        dims = tensor.values.shape if isinstance(tensor, gs.Constant) else self._graph.weights[tensor.name].dims
        return tuple(int(dim) for dim in dims)

    def made_by(self, tensor: Tensor, *ops: str) -> Node:
        """Return the node that gives a tensor, which must be of one of these operators."""
        node = producer(tensor)
        if node is None or node.op not in ops:
            raise OtherFormError(f"'{tensor.name}' is not made by one of {', '.join(ops)}")
        return node

    def above(self, tensor: Tensor, *ops: str) -> Tensor:
        """Follow a tensor up through operators with one input that matters."""
        node = producer(tensor)
        while node is not None and node.op in ops:
            tensor = node.inputs[0]
            node = producer(tensor)
        return tensor

    def norm(self, tensor: Tensor) -> ForeignNorm:
        """Read a norm, alone or of a sum."""
        node = self.made_by(tensor, *NORMS, SKIP_NORM)
        self.epsilons.add(round(float(node.attrs.get("epsilon", 1e-5)), 12))
        if int(node.attrs.get("axis", -1)) != -1 or node.outputs[0] is not tensor:
            raise OtherFormError(f"'{node.name}' is not a norm over the last axis")
        if node.op in NORMS:
            return ForeignNorm(node.inputs[0], self.weight(node.inputs[1]))
        if any(tensor.name for tensor in node.inputs[3:]):
            raise OtherFormError(f"'{node.name}' adds a bias")
        total = node.outputs[SUM] if len(node.outputs) > SUM else None
        return ForeignNorm(total, self.weight(node.inputs[2]), (node.inputs[0], node.inputs[1]))

    def linear(self, tensor: Tensor) -> ForeignLinear:
        """Read a linear layer, with its bias."""
        node, bias = self.made_by(tensor, "Add", *PRODUCTS), None
        if node.op == "Add":
            computed = [given for given in node.inputs if producer(given) is not None]
            if len(computed) != 1:
                raise OtherFormError(f"'{node.name}' does not add a bias")
            bias = self.weight(next(given for given in node.inputs if given is not computed[0]))
            node = self.made_by(computed[0], *PRODUCTS)
        read = self._dense(node) if node.op == "MatMul" else self._blocks(node)
        if bias is not None and self.shape(bias) != (read.rows,):
            raise OtherFormError(f"'{bias.name}' is not a bias")
        return replace(read, bias=bias)

    def _dense(self, node: Node) -> ForeignLinear:
        weight = self.weight(node.inputs[1])
        shape = self.shape(weight)
        others = [reader for reader in weight.outputs if reader is not node and not is_transpose(reader)]
        if len(shape) != 2 or others:
            raise OtherFormError(f"'{weight.name}' is not the weight of one linear layer")
        return ForeignLinear(node.inputs[0], {"weight": weight}, None, node, shape[1])

    def _blocks(self, node: Node) -> ForeignLinear:
        given = dict(zip(PORTS, node.inputs[1:], strict=False))
        if any(tensor.name for tensor in node.inputs[1 + len(PORTS) :]):
            raise OtherFormError(f"'{node.name}' has more inputs than zero points")
        weights = {port: tensor for port, tensor in given.items() if tensor.name}
        rows = int(node.attrs["N"])
        stored = {port: (self.element(tensor), self.shape(tensor)) for port, tensor in weights.items()}
        if any(shape[0] % rows for _, shape in stored.values()):
            raise OtherFormError(f"'{node.name}' has tensors that do not follow its {rows} output features")
        attributes = {name: int(value) for name, value in node.attrs.items()}
        return ForeignLinear(node.inputs[0], weights, Blocks(attributes, stored), None, rows)

    def gate(self, tensor: Tensor) -> tuple[ForeignLinear, ForeignLinear, Activation]:
        """Read activation(gate) * up."""
        node = self.made_by(tensor, "Mul")
        for active, up in (node.inputs, reversed(node.inputs)):
            above = producer(active)
            if above is not None and above.op in _GATES:
                tanh = above.attrs.get("approximate", "none") == "tanh"
                return self.linear(above.inputs[0]), self.linear(up), "gelu_tanh" if tanh else _GATES[above.op]
            for value, sigmoid in (
                (above.inputs, reversed(above.inputs)) if above is not None and above.op == "Mul" else ()
            ):
                factor = producer(sigmoid)
                if factor is not None and factor.op == "Sigmoid" and factor.inputs[0] is value:
                    return self.linear(value), self.linear(up), "silu"
        raise OtherFormError(f"'{node.name}' is not a gate")

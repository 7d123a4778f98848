"""Describes a foreign decoder as a ModelConfig, so that a fused graph can be built of it, over the same weights.

The way is from the logits up: head, and for each layer, the last one first, MLP and attention, whose residuals are the
sums that their norms read. A graph of another form has no description.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import onnx_graphsurgeon as gs

from ortolan.element_types import from_onnx
from ortolan.graphs.builder import MICROSOFT, GraphBuilder, Node, Tensor, producer
from ortolan.graphs.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, RopeTable
from ortolan.graphs.foreign import gqa
from ortolan.graphs.foreign.analysis import Analysis
from ortolan.graphs.foreign.inputs import onnx_type
from ortolan.graphs.foreign.reader import (
    NORMS,
    SKIP_NORM,
    SUM,
    ForeignLinear,
    ForeignNorm,
    OtherFormError,
    Reader,
    is_transpose,
)
from ortolan.graphs.formats.blocks import Blocks

Members: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """A foreign decoder in the terms of the graph builder.

    Attributes:
        config: the decoder.
        blocks: formats of weights that are not dense, by their name without ".weight".
        apart: linear layers of one input that cannot be one product, by the name of the whole.
        sources: for each weight that a fused graph may read, the foreign tensors that make it, along its first axis.
        products: nodes whose dense weights [in, out] a fused graph reads as [out, in].
    """

    config: ModelConfig
    blocks: dict[str, Blocks]
    apart: frozenset[str]
    sources: dict[str, Members]
    products: list[Node]


def describe(
    graph: GraphBuilder, analysis: Analysis, logits: Tensor, layers: tuple[AttentionConfig, ...], first_rows: int
) -> Description | None:
    """Describe a graph before it is changed; None where its form is another one.

    Args:
        graph: the foreign graph.
        analysis: of it.
        logits: its output.
        layers: its attention, with the windows that the caller asks for.
        first_rows: above 0, RoPE's tables hold two variants, the second one from that row on.
    """
    try:
        return _Describer(graph, analysis, first_rows).run(logits, layers)
    except OtherFormError:
        return None


class _Describer:
    """Collects what a graph is made of."""

    def __init__(self, graph: GraphBuilder, analysis: Analysis, first_rows: int) -> None:
        cache = analysis.attentions[0].node.inputs[gqa.PAST_KEY]
        self._read = Reader(graph, from_onnx(onnx_type(cache)).name)
        self._picks, self._attentions = analysis.last_token_nodes, analysis.attentions
        self._first_rows = first_rows
        self._blocks: dict[str, Blocks] = {}
        self._apart: set[str] = set()
        self._sources: dict[str, Members] = {}
        self._products: list[Node] = []
        self._ropes: dict[tuple[str, str], RopeTable] = {}
        self._post_norms: set[bool] = set()

    def run(self, logits: Tensor, mixers: tuple[AttentionConfig, ...]) -> Description:
        """Walk from the logits to the embedding."""
        softcap, head = self._head(logits)
        norm = self._norm("final_norm", self._above_picks(head.x))
        layers: list[LayerConfig] = []
        for index in reversed(range(len(mixers))):
            mlp, norm = self._mlp(index, norm)
            mixer, norm = self._attention(index, mixers[index], norm)
            layers.insert(0, LayerConfig(mixer=mixer, mlp=mlp))
        if norm.added or len(self._read.epsilons) != 1 or len(self._post_norms) != 1:
            raise OtherFormError("layers differ in their norms")
        table, scale = self._embedding(norm.x)
        above = producer(table)
        is_tied = above is not None and is_transpose(above) and above.inputs[0] is head.weights.get("weight")
        self._sources["embedding.weight"] = (head.weights["weight"] if is_tied else self._read.weight(table),)
        rows, size = self._read.shape(self._sources["embedding.weight"][0])[:: -1 if is_tied else 1]
        if rows != head.rows:
            raise OtherFormError("the embedding has other rows than the head")
        config = ModelConfig(
            architecture="converted",
            vocab_size=rows,
            hidden_size=size,
            norm_epsilon=self._read.epsilons.pop(),
            layers=tuple(layers),
            ropes=tuple(self._ropes.values()),
            tied_embeddings=is_tied,
            norm_placement="sandwich" if self._post_norms.pop() else "pre",
            embedding_scale=scale,
            logit_softcap=softcap,
        )
        return Description(config, self._blocks, frozenset(self._apart), self._sources, self._products)

    def _head(self, logits: Tensor) -> tuple[float, ForeignLinear]:
        tensor, softcap = self._read.above(logits, "Cast"), 0.0
        node = producer(tensor)
        if node is not None and node.op == "Mul":
            softcap = self._scalar(node.inputs[1])
            divided = self._read.made_by(self._read.made_by(node.inputs[0], "Tanh").inputs[0], "Div")
            if self._scalar(divided.inputs[1]) != softcap:
                raise OtherFormError("the logits are scaled")
            tensor = divided.inputs[0]
        head = self._linear("head", tensor)
        if head.bias is not None:
            raise OtherFormError("the head has a bias")
        return softcap, head

    def _above_picks(self, tensor: Tensor) -> Tensor:
        """Go past what picks the last token."""
        node = producer(tensor)
        while node is not None and (node.op == "Unsqueeze" or any(node is pick for pick in self._picks)):
            tensor = node.inputs[0]
            node = producer(tensor)
        return tensor

    @staticmethod
    def _scalar(tensor: Tensor) -> float:
        if not isinstance(tensor, gs.Constant) or tensor.values.size != 1:
            raise OtherFormError(f"'{tensor.name}' is not one number")
        return float(tensor.values.reshape(()))

    def _norm(self, name: str, tensor: Tensor) -> ForeignNorm:
        norm = self._read.norm(tensor)
        self._sources[f"{name}.weight"] = (norm.weight,)
        return norm

    def _branch(self, path: str, norm: ForeignNorm, output: str) -> tuple[ForeignLinear, Tensor]:
        """Tell the last linear layer of a branch from the residual that it is added to."""
        for branch, residual in (norm.added, norm.added[::-1]):
            node = producer(residual)
            is_sum = node is not None and node.op == SKIP_NORM and node.outputs[SUM] is residual
            if is_sum or (node is not None and node.op in ("Gather", "Mul")):
                above = producer(branch)
                self._post_norms.add(above is not None and above.op in NORMS)
                if above is not None and above.op in NORMS:
                    branch = self._norm(f"{path}_post_norm", branch).x
                return self._linear(output, branch), residual
        raise OtherFormError(f"{path} has no residual")

    def _mlp(self, index: int, norm: ForeignNorm) -> tuple[MlpConfig, ForeignNorm]:
        """Read the MLP in front of a norm; returns the norm in front of it, too."""
        path = f"layers.{index}.mlp"
        down, residual = self._branch(path, norm, f"{path}.down")
        gate, up, activation = self._read.gate(down.x)
        before = self._norm(f"{path}_norm", gate.x)
        biases = {linear.bias is not None for linear in (gate, up, down)}
        if up.x is not gate.x or before.x is not residual or len(biases) != 1 or gate.rows != up.rows:
            raise OtherFormError(f"{path} is not a gated MLP")
        self._add(f"{path}.gate_up", {f"{path}.gate": gate, f"{path}.up": up})
        return MlpConfig(intermediate_size=gate.rows, activation=activation, bias=biases.pop()), before

    def _attention(self, index: int, mixer: AttentionConfig, norm: ForeignNorm) -> tuple[AttentionConfig, ForeignNorm]:
        """Read the attention in front of a norm; returns the norm in front of it, too."""
        path, attention = f"layers.{index}.attention", self._attentions[index]
        output, residual = self._branch(path, norm, f"{path}.output")
        if self._read.above(output.x, "Reshape") is not attention.node.outputs[0] or attention.smooth:
            raise OtherFormError(f"{path} is not followed by its output")
        reads, normed, rope = self._heads(path, attention)
        names = [f"{path}.{name}" for name in ("query", "key", "value")] if len(reads) > 1 else [f"{path}.qkv"]
        self._add(f"{path}.qkv", dict(zip(names, reads, strict=True)))
        before = self._norm(f"{path}_norm", reads[0].x)
        if before.x is not residual or any(read.x is not reads[0].x for read in reads):
            raise OtherFormError(f"{path} reads several values")
        biases = [read.bias is not None for read in reads] * (3 // len(reads))
        if attention.sinks is not None:
            self._sources[f"{path}.sink_logits"] = (self._read.weight(attention.sinks),)
        mixer = replace(
            mixer,
            rope=rope,
            qk_norm="head" if normed else "none",
            query_bias=biases[0],
            key_bias=biases[1],
            value_bias=biases[2],
            output_bias=output.bias is not None,
        )
        return mixer, before

    def _heads(self, path: str, attention: gqa.Attention) -> tuple[list[ForeignLinear], bool, str | None]:
        """Read projections, norms of heads and RoPE: the products, whether there are norms, and the rope."""
        ports = attention.node.inputs[gqa.QUERY : gqa.VALUE + 1]
        chains = [self._chain(tensor, at) for at, tensor in enumerate(ports[: 1 if attention.is_packed else 3])]
        products = chains[:1] if chains[0].is_part else chains
        norms = [chain.norm for chain in chains * 3][:3]
        ropes = [chain.rope for chain in chains * 3][:3]
        holds = all(chain.product is products[0].product for chain in chains) or len(products) > 1
        holds = holds and len({chain.is_part for chain in chains}) == 1
        if attention.norm is not None:  # it comes before the RoPE inside
            holds = holds and norms == ropes == [None] * 3
            self._read.epsilons.add(round(attention.norm.epsilon, 12))
            norms = [attention.norm.query_weight, attention.norm.key_weight, None]
        if attention.rotation is not None:
            holds, table = holds and ropes == [None] * 3, attention.rotation
            ropes = [self._rope(table.cosine, table.sine, table.interleaved)] * 2 + [None]
        holds = holds and ropes[0] == ropes[1] and ropes[2] is None
        if not holds or norms[2] is not None or (norms[0] is None) != (norms[1] is None):
            raise OtherFormError(f"{path} treats queries and keys differently")
        for name, weight in zip(("query", "key"), norms, strict=False):
            if weight is not None:
                self._sources[f"{path}.{name}_norm.weight"] = (self._read.weight(weight),)
                if self._read.shape(weight) != (attention.config.head_size,):
                    raise OtherFormError(f"{path} normalises whole projections")
        return [self._read.linear(chain.product) for chain in products], norms[0] is not None, ropes[0]

    def _chain(self, tensor: Tensor, at: int) -> _Chain:
        """Read what is done to one port's heads where norm and RoPE are nodes of their own."""
        tensor, rope, weight = self._read.above(tensor, "Reshape"), None, None
        node = producer(tensor)
        if node is not None and node.op == "RotaryEmbedding":
            first = 2 if node.domain == MICROSOFT else 1
            interleaved = int(node.attrs.get("interleaved", 0))
            rope = self._rope(node.inputs[first], node.inputs[first + 1], interleaved)
            tensor = self._read.above(node.inputs[0], "Reshape")
            node = producer(tensor)
        if node is not None and node.op in NORMS:
            norm = self._read.norm(tensor)
            weight, tensor = norm.weight, self._read.above(norm.x, "Reshape")
            node = producer(tensor)
        is_part = node is not None and node.op == "Split" and node.outputs[at] is tensor
        return _Chain(node.inputs[0] if node is not None and is_part else tensor, is_part, weight, rope)

    def _rope(self, cosine: Tensor, sine: Tensor, interleaved: int) -> str:
        """Name the rope of two tables; its tables may be two after each other."""
        if interleaved:
            raise OtherFormError("RoPE is interleaved")
        key = cosine.name, sine.name
        if key not in self._ropes:
            name = f"table_{len(self._ropes)}"
            members = {"cosine": self._table(cosine), "sine": self._table(sine)}
            shapes = [self._read.shape(member) for member in members["cosine"]]
            self._ropes[key] = RopeTable(
                name=name,
                rows=sum(shape[0] for shape in shapes),
                rotary_size=2 * shapes[0][1],
                first_rows=self._first_rows,
            )
            self._sources |= {f"rope.{name}.{part}": tables for part, tables in members.items()}
        return self._ropes[key].name

    def _table(self, tensor: Tensor) -> Members:
        node = producer(tensor)
        members = node.inputs if node is not None and node.op == "Concat" else [tensor]
        return tuple(self._read.weight(member) for member in members)

    def _embedding(self, hidden: Tensor) -> tuple[Tensor, float]:
        """Read what looks tokens up: the table, and what multiplies its rows."""
        node, scale = self._read.made_by(hidden, "Gather", "Mul"), 1.0
        if node.op == "Mul":
            scale = self._scalar(node.inputs[1])
            node = self._read.made_by(node.inputs[0], "Gather")
        return node.inputs[0], scale

    def _linear(self, stem: str, tensor: Tensor) -> ForeignLinear:
        """Read a linear layer that is a product of its own."""
        linear = self._read.linear(tensor)
        self._add("", {stem: linear})
        return linear

    def _add(self, whole: str, linears: dict[str, ForeignLinear]) -> None:
        """Note the weights of linear layers; those of one input are one product, named `whole`, where that can be.

        Args:
            whole: name of the product.
            linears: by name.
        """
        for stem, linear in linears.items():
            self._sources |= {f"{stem}.{port}": (tensor,) for port, tensor in linear.weights.items()}
            if linear.bias is not None:
                self._sources[f"{stem}.bias"] = (linear.bias,)
            if linear.blocks is not None:
                self._blocks[stem] = linear.blocks
            else:
                self._products.append(linear.node)
        if len(linears) > 1:
            self._join(whole, list(linears.values()))

    def _join(self, whole: str, linears: list[ForeignLinear]) -> None:
        blocks = [linear.blocks for linear in linears if linear.blocks is not None]
        if blocks:
            joined = None if len(blocks) < len(linears) else blocks[0].joined(blocks[1:])
            if joined is None:
                self._apart.add(whole)
                return
            self._blocks[whole] = joined
        for port in linears[0].weights:
            self._sources[f"{whole}.{port}"] = tuple(linear.weights[port] for linear in linears)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if len(biases) == len(linears):
            self._sources[f"{whole}.bias"] = tuple(biases)


@dataclass(frozen=True, slots=True)
class _Chain:
    """What is done to the heads of a product, or of its part at a port's place."""

    product: Tensor
    is_part: bool
    norm: Tensor | None
    rope: str | None

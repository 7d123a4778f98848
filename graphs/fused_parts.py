"""The pieces of the decoder in fewer, larger operators, where weights' formats and shapes allow them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_graphsurgeon as gs

from ortolan.graphs.builder import MICROSOFT, Node, Tensor, emitters
from ortolan.graphs.cached_attention import CachedAttention, JointHeads, attend
from ortolan.graphs.gates import Gated, gate_mul
from ortolan.graphs.parts import Columns, Linear, Normed, Parts, Rotation

GATE_UP, GATE_UP_MEMBERS = "gate_up", ("gate", "up")


class FusedParts(Parts):
    """A decoder under construction for one device.

    1. Gate and up are one product, as query, key and value are in every graph. Norms before linear layers, gates and
       residuals after them are folded in where the weight's format can on the device. A QkvAttention normalises
       heads, rotates, appends, captures and attends; where queries are scaled, a QkvRopeAppend does what stands before
       that. A NormRope normalises and rotates heads whose projections stay apart.
    2. A norm after a branch, its residual and a layer's scalar are one RmsNormAdd, and so is any other norm. A residual
       and the norm of the sum are one SkipSimplifiedLayerNormalization.
    3. A gate on rows, with its activation, the norm before it and the residual after it, is one GateMul; the gates of
       the gated delta rule are one DeltaGates.
    4. One GatherRows picks the rows that the head reads; on CUDA another looks embeddings up, whose launch overlaps
       with its neighbours', so that the first layer's weights are on their way. Where the last layers compute wanted
       rows alone, a NarrowStep tells what belongs to them.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sums: dict[str, Node] = {}  # by name of the sum

    def add_linear(self, linear: Linear) -> Tensor:
        """Add a linear layer as its weight's format has it for the device."""
        return self.format(linear.stem).fused(self, linear)

    def look_up(self, path: str, table: Tensor, token_ids: Tensor) -> Tensor:
        """Pick the rows [T, features] of tokens in a table [V, features]."""
        if self.options.fused_for != "cuda":
            return super().look_up(path, table, token_ids)
        return self.rows(path, table, token_ids)

    def columns(self, path: str, x: Tensor | Normed, whole: str, names: Sequence[str]) -> list[Columns]:
        """Add several linear layers of one input, by one product where they are stored as one."""
        stem = f"{path}/{whole}".replace("/", ".")
        members = [f"{path}/{name}".replace("/", ".") for name in names]
        if not self.joins(stem, members):
            return super().columns(path, x, whole, names)
        rows = self.linear(f"{path}/{whole}", x)
        sizes = [self.shapes[f"{member}.weight"][0] for member in members]
        return [Columns(rows, sum(sizes[:place])) for place in range(len(sizes))]

    def gated(self, path: str, x: Tensor | Normed, activation: str) -> Tensor:
        """Add activation(gate(x)) * up(x)."""
        stem = f"{path}/{GATE_UP}".replace("/", ".")
        members = [f"{path}/{name}".replace("/", ".") for name in GATE_UP_MEMBERS]
        if self.joins(stem, members) and self.format(stem).folds(self.options.fused_for):
            return self.add_linear(Linear(path=f"{path}/{GATE_UP}", stem=stem, x=x, activation=f"{activation}_mul"))
        gate, up = self.columns(path, self.value(x), GATE_UP, GATE_UP_MEMBERS)
        size = self.shapes[f"{path}/up.weight".replace("/", ".")][0]
        return gate_mul(self, path, Gated(x=up, gates=gate, size=size, activation=activation))

    def open_gate(self, path: str, x: Tensor, factor: Columns, size: int, activation: str) -> Tensor:
        """Add activation(gate(x)) * factor, of `size` columns."""
        stem = f"{path}/gate".replace("/", ".")
        weights = self.format(stem)
        if weights.takes_factors and weights.folds(self.options.fused_for):
            linear = Linear(path=f"{path}/gate", stem=stem, x=x, activation=f"{activation}_mul", factor=factor)
            return self.add_linear(linear)
        gate = Columns(self.linear(f"{path}/gate", x))
        return gate_mul(self, path, Gated(x=factor, gates=gate, size=size, activation=activation))

    def attend(self, cache: CachedAttention, x: Tensor | Normed, sink_logits: Tensor | None) -> Tensor:
        """Add projections, head norms, RoPE, the append, the capture and attention; returns [T, Hq, D]."""
        heads, config = self._joint_heads(cache, x), cache.config
        if heads is None:
            return super().attend(cache, x, sink_logits)
        if config.query_scale is None:
            return cache.attend_qkv(heads, sink_logits)
        query = self.scale_query(cache.path, config, cache.append_qkv(heads))
        cache.capture(query)
        return attend(cache, cache.path, config, query, sink_logits)

    def _joint_heads(self, cache: CachedAttention, x: Tensor | Normed) -> JointHeads | None:
        """Add the joint projection; None where there is none, or heads are not normalised each by itself."""
        config, stem = cache.config, cache.path.replace("/", ".")
        whole, names = ("qk", ("query", "key")) if config.value_is_key else ("qkv", ("query", "key", "value"))
        if config.qk_norm == "projection" or not self.joins(f"{stem}.{whole}", [f"{stem}.{name}" for name in names]):
            return None
        qkv = self.linear(f"{cache.path}/{whole}", x)
        rotation = self.rotations.get(config.rope or "")
        ports = {f"{name}_norm_weight": self.head_norm(f"{cache.path}/{name}", config) for name in ("query", "key")}
        if rotation is not None:
            ports |= {"cosine": rotation.cosine, "sine": rotation.sine}
        return JointHeads(qkv=qkv, ports=ports, epsilon=self.config.norm_epsilon)

    def norm_rope(
        self, path: str, flat: Tensor, weight: Tensor | None, rotation: Rotation | None, shape: tuple[int, int]
    ) -> Tensor:
        """Normalise and rotate (heads, D) in one operator, where they are rotated: [T, heads * D] -> [T, heads, D]."""
        if rotation is None:
            return super().norm_rope(path, flat, weight, rotation, shape)
        heads = self.graph.reshape(f"{path}/Reshape", flat, (0, *shape))
        ports = {"heads": heads, "cosine": rotation.cosine, "sine": rotation.sine, "norm_weight": weight}
        epsilon = self.config.norm_epsilon
        (rotated,) = self.graph.operator(f"{path}/NormRope", emitters.norm_rope, ports, epsilon=epsilon)
        return rotated

    def norm_add(self, path: str, norm: Normed, residual: Tensor, shape: tuple[str, int] | None = None) -> Tensor:
        """Add residual + norm in one operator; `shape` where it is not that of hidden states."""
        (y,) = self.graph.operator(
            f"{path}/RmsNormAdd",
            emitters.rms_norm_add,
            {"x": norm.x, "norm_weight": self.weight(norm.weight), "residual": residual},
            epsilon=norm.epsilon,
        )
        self.graph.describe(y, self.options.onnx_type, shape or (self.row_axis, self.config.hidden_size))
        return y

    def scale(self, path: str, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply by a scalar weight; the operator that adds a residual does so, too."""
        node = x.inputs[0]
        if node.op != "RmsNormAdd" or len(node.inputs) != 3:
            return super().scale(path, x, weight)
        node.inputs.append(weight)
        return x

    def add_residual(self, path: str, y: Tensor, residual: Tensor | None) -> Tensor:
        """Add a residual, by a node that a norm of the sum may take over."""
        total = super().add_residual(path, y, residual)
        if residual is not None:
            self._sums[total.name] = total.inputs[0]
        return total

    def _compute_norm(self, norm: Normed) -> Tensor:
        """Compute a norm; the operator that adds a residual gives that of the sum, too."""
        node = self._sums.get(norm.x.name)
        if node is None:
            return self._norm_rows(norm.path, norm.x, self.weight(norm.weight), norm.epsilon)
        path = f"{norm.path}/SkipSimplifiedLayerNormalization"
        normed = gs.Variable(f"{path}/output")
        node.op, node.domain, node.name = "SkipSimplifiedLayerNormalization", MICROSOFT, path
        node.attrs = {"epsilon": norm.epsilon}
        node.inputs = [*node.inputs, self.weight(norm.weight)]
        node.outputs = [normed, gs.Variable.empty(), gs.Variable.empty(), norm.x]
        return normed

    def _norm_rows(self, path: str, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ports = {"x": x, "norm_weight": weight}
        (y,) = self.graph.operator(f"{path}/RmsNormAdd", emitters.rms_norm_add, ports, epsilon=epsilon)
        return y

    def norm_heads(self, path: str, heads: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
        """Normalise each head as a row."""
        rows = self.graph.reshape(f"{path}/rows/Reshape", heads, (-1, shape[1]))
        normed = self._norm_rows(path, rows, weight, self.config.norm_epsilon)
        return self.graph.reshape(f"{path}/heads/Reshape", normed, (-1, *shape))

    def rows(self, path: str, x: Tensor, indices: Tensor) -> Tensor:
        """Pick rows [R, features] of [T, features]."""
        inputs = {"rows": x, "row_indices": indices}
        (y,) = self.graph.operator(f"{path}/GatherRows", emitters.gather_rows, inputs)
        return y

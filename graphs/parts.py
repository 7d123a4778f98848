"""The small pieces that every part of the decoder is made of, in standard operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ortolan.graphs.builder import FLOAT, GraphBuilder, Tensor
from ortolan.graphs.cached_attention import CachedAttention, Step, attend
from ortolan.graphs.config import AttentionConfig, ModelConfig, QueryScale
from ortolan.graphs.kinds import Shapes
from ortolan.graphs.options import Fusion, GraphOptions

EXPERT_WEIGHTS = ("gate_up", "down")  # of a mixture


@dataclass(frozen=True, slots=True)
class Normed:
    """The RMSNorm of a value, computed where it is read, or folded into what reads it.

    Attributes:
        x: [T, features].
        path: of the norm; its weight has the same name.
        epsilon: added to the mean of squares.
    """

    x: Tensor
    path: str
    epsilon: float

    @property
    def weight(self) -> str:
        """Name of its weight."""
        return self.path.replace("/", ".") + ".weight"


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of rows.

    Attributes:
        rows: [T, features].
        offset: the first of the columns.
    """

    rows: Tensor
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear layer to be added: y = residual + activation(x @ weight^T + bias).

    Attributes:
        path: of its nodes.
        stem: of its weights, which are "{stem}.weight" and, where it has one, "{stem}.bias".
        x: [T, in], a tensor or a Normed.
        residual: [T, out]; None for none.
        activation: of a fused gate: "none", "silu_mul", "gelu_mul" or "gelu_tanh_mul".
        factor: of the gate, where the weight does not give it.
        in_float32: whether y is float32 whatever the model's type.
    """

    path: str
    stem: str
    x: Tensor | Normed
    residual: Tensor | None = None
    activation: str = "none"
    factor: Columns | None = None
    in_float32: bool = False


class WeightFormat(Protocol):
    """How a linear weight is stored and multiplied."""

    @property
    def takes_factors(self) -> bool:
        """Whether a product that folds takes the factor of a gate."""

    def folds(self, device: Fusion | None) -> bool:
        """Tell whether its fused product on a device takes norms, gates and residuals."""

    def tensors(self, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """List the tensors that a weight of a shape is stored as: element type and shape by name."""

    def plain(self, parts: Parts, linear: Linear) -> Tensor:
        """Add a linear layer in operators that every device has."""

    def fused(self, parts: Parts, linear: Linear) -> Tensor:
        """Add a linear layer for the device that the options name."""


class ExpertFormat(Protocol):
    """How the weights of a mixture's experts are stored and multiplied."""

    def tensors(self, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """List the tensors that a weight [E, rows, columns] is stored as: element type and shape by name."""

    def experts(
        self, parts: Parts, path: str, inputs: Mapping[str, Tensor | None], attributes: Mapping[str, Any]
    ) -> Tensor:
        """Add the experts' operator with their weights, beside its other inputs and its attributes."""


class KeptState(Protocol):
    """What a layer keeps between steps besides keys and values."""

    def declare_outputs(self) -> None:
        """Declare what the step updated as outputs of the graph."""


class RowFormat(Protocol):
    """How an embedding is stored and looked up."""

    def rows(self, parts: Parts, stem: str, indices: Tensor) -> Tensor:
        """Look up rows, [T] -> [T, features]."""


class Parts:
    """A decoder under construction.

    Attributes:
        rotations: cosine and sine of the step's positions, by rope.
        query_scales: factors of queries of the step's positions, [T, 1, 1].
        attentions: of the layers so far that have caches of their own, by layer.
        states: of the layers so far that keep something else, by layer.
        row_axis: name of the axis of rows that layers compute: "T", or "R" where those of `logit_rows` are left.
    """

    def __init__(
        self, graph: GraphBuilder, config: ModelConfig, options: GraphOptions, shapes: Shapes, formats: Formats
    ) -> None:
        self.graph, self.config, self.options, self.shapes = graph, config, options, shapes
        self.formats = formats
        self.step: Step
        self.rotations: dict[str, Rotation] = {}
        self.query_scales: dict[QueryScale, Tensor] = {}
        self.attentions: dict[int, CachedAttention] = {}
        self.states: dict[int, KeptState] = {}
        self.row_axis = "T"
        self._normed: dict[str, Tensor] = {}
        self._ones: dict[int, Tensor] = {}

    def weight(self, name: str) -> Tensor:
        """Refer to a weight by its canonical name."""
        return self.graph.weight(name, self.options.onnx_type, self.shapes[name])

    def bias(self, stem: str) -> Tensor | None:
        """Refer to the bias of a linear layer; None where it has none."""
        return self.weight(f"{stem}.bias") if f"{stem}.bias" in self.shapes else None

    def format(self, stem: str) -> WeightFormat:
        """Return the format of a linear layer's weight."""
        return self.formats.of(stem)

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """Cast float32 to the model's type; nothing where that is float32."""
        if self.options.onnx_type == FLOAT:
            return tensor
        return self.graph.node(name, "Cast", [tensor], {"to": self.options.onnx_type})

    def in_float32(self, name: str, tensor: Tensor) -> Tensor:
        """Cast the model's type to float32; nothing where it is float32."""
        if self.options.onnx_type == FLOAT:
            return tensor
        return self.graph.node(name, "Cast", [tensor], {"to": FLOAT})

    def scalar(self, name: str, value: float) -> Tensor:
        """Make a scalar constant of the model's type."""
        return self.cast(f"{name}/Cast", self.graph.constant(name, value, np.float32))

    def vector(self, name: str, value: float) -> Tensor:
        """Make a constant [1] of the model's type."""
        return self.cast(f"{name}/Cast", self.graph.constant(name, [value], np.float32))

    def norm(self, path: str, tensor: Tensor) -> Tensor | Normed:
        """Describe the model's norm over the last axis, whose weight is named by the path."""
        if self.config.norm == "rms":
            return Normed(tensor, path, self.config.norm_epsilon)
        attributes = {"axis": -1, "epsilon": self.config.norm_epsilon, "stash_type": FLOAT}
        inputs = [tensor, self.weight(path.replace("/", ".") + ".weight")]
        return self.graph.node(f"{path}/LayerNormalization", "LayerNormalization", inputs, attributes)

    def post_norm(self, path: str, tensor: Tensor) -> Normed:
        """Describe an RMSNorm behind attention or MLP."""
        epsilon = self.config.post_norm_epsilon
        return Normed(tensor, path, self.config.norm_epsilon if epsilon is None else epsilon)

    def value(self, x: Tensor | Normed) -> Tensor:
        """Compute a norm, once for all its readers; a tensor stays what it is."""
        if not isinstance(x, Normed):
            return x
        if x.path not in self._normed:
            self._normed[x.path] = self._compute_norm(x)
        return self._normed[x.path]

    def _compute_norm(self, norm: Normed) -> Tensor:
        return self.rms_norm(norm.path, norm.x, self.weight(norm.weight), norm.epsilon)

    def ones(self, size: int) -> Tensor:
        """Return the weight of a norm that has none, [size]."""
        if size not in self._ones:
            constant = self.graph.constant(f"ones/{size}", np.ones(size), np.float32)
            self._ones[size] = self.cast(f"ones/{size}/Cast", constant)
        return self._ones[size]

    def rms_norm(self, path: str, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Add an RMSNorm over the last axis, always as an operator of its own."""
        attributes = {"axis": -1, "epsilon": epsilon, "stash_type": FLOAT}
        return self.graph.node(f"{path}/RMSNormalization", "RMSNormalization", [x, weight], attributes)

    def scale(self, path: str, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply by a scalar weight."""
        return self.graph.node(f"{path}/Mul", "Mul", [x, weight])

    def linear(self, path: str, x: Tensor | Normed, residual: Tensor | None = None) -> Tensor:
        """Add the linear layer that the path names, [T, in] -> [T, out]."""
        return self.add_linear(Linear(path=path, stem=path.replace("/", "."), x=x, residual=residual))

    def add_linear(self, linear: Linear) -> Tensor:
        """Add a linear layer as its weight's format has it."""
        return self.format(linear.stem).plain(self, linear)

    def add_residual(self, path: str, y: Tensor, residual: Tensor | None) -> Tensor:
        """Add a residual; nothing where there is none."""
        return y if residual is None else self.graph.node(f"{path}/Add", "Add", [residual, y])

    def joins(self, stem: str, members: Sequence[str]) -> bool:
        """Tell whether linear layers can be one: their formats agree, and all of them have a bias, or none has."""
        if stem in self.formats.apart:
            return False
        biases = [f"{member}.bias" in self.shapes for member in members]
        return f"{stem}.weight" in self.shapes and (not any(biases) or f"{stem}.bias" in self.shapes)

    def projections(self, path: str, x: Tensor | Normed, names: Sequence[str]) -> list[Tensor]:
        """Add several linear layers of one input: [T, out] of each.

        Query, key and value are one product where their weights are stored alike, which a Split parts.
        """
        stem = path.replace("/", ".")
        members = [f"{stem}.{name}" for name in names]
        if tuple(names) != ("query", "key", "value") or not self.joins(f"{stem}.qkv", members):
            shared = x if len(names) == 1 else self.value(x)
            return [self.linear(f"{path}/{name}", shared) for name in names]
        sizes = [self.shapes[f"{member}.weight"][0] for member in members]
        constant = self.graph.constant("sizes/" + "x".join(map(str, sizes)), sizes, np.int64)
        inputs = [self.linear(f"{path}/qkv", x), constant]
        return self.graph.nodes(f"{path}/qkv/Split", "Split", inputs, len(sizes), {"axis": 1})

    def columns(self, path: str, x: Tensor | Normed, whole: str, names: Sequence[str]) -> list[Columns]:
        """Add several linear layers of one input, whose results may be columns of one tensor, named by the whole."""
        return [Columns(rows) for rows in self.projections(path, self.value(x), names)]

    def gated(self, path: str, x: Tensor | Normed, activation: str) -> Tensor:
        """Add activation(gate(x)) * up(x)."""
        gate, up = self.projections(path, x, ("gate", "up"))
        return self.gate(path, gate, up, activation)

    def gate(self, path: str, gate: Tensor, factor: Tensor, activation: str) -> Tensor:
        """Add activation(gate) * factor."""
        if activation == "silu":
            sigmoid = self.graph.node(f"{path}/silu/Sigmoid", "Sigmoid", [gate])
            active = self.graph.node(f"{path}/silu/Mul", "Mul", [gate, sigmoid])
        else:
            approximate = "tanh" if activation == "gelu_tanh" else "none"
            active = self.graph.node(f"{path}/Gelu", "Gelu", [gate], {"approximate": approximate})
        return self.graph.node(f"{path}/Mul", "Mul", [active, factor])

    def open_gate(self, path: str, x: Tensor, factor: Columns, size: int, activation: str) -> Tensor:
        """Add activation(gate(x)) * factor, of `size` columns."""
        gate = self.linear(f"{path}/gate", x)
        edges = (factor.offset, factor.offset + size)
        begin, end = (self.graph.constant(f"{path}/edges/{edge}", [edge], np.int64) for edge in edges)
        axis = self.graph.constant("axes/last", [1], np.int64)
        taken = self.graph.node(f"{path}/Slice", "Slice", [factor.rows, begin, end, axis])  # [T, size]
        return self.gate(path, gate, taken, activation)

    def norm_add(self, path: str, norm: Normed, residual: Tensor, shape: tuple[str, int] | None = None) -> Tensor:
        """Add residual + norm; `shape` where it is not that of hidden states."""
        return self.add_residual(path, self.value(norm), residual)

    def rows(self, path: str, x: Tensor, indices: Tensor) -> Tensor:
        """Pick rows [R, features] of [T, features]."""
        return self.graph.node(f"{path}/Gather", "Gather", [x, indices])

    def look_up(self, path: str, table: Tensor, token_ids: Tensor) -> Tensor:
        """Pick the rows [T, features] of tokens in a table [V, features]."""
        return self.graph.node(f"{path}/Gather", "Gather", [table, token_ids])

    def attend(self, cache: CachedAttention, x: Tensor | Normed, sink_logits: Tensor | None) -> Tensor:
        """Add projections, norms, RoPE, the append, the capture and attention; returns [T, Hq, D]."""
        config, path = cache.config, cache.path
        names = ("query", "key") if config.value_is_key else ("query", "key", "value")
        flat = self.projections(path, x, names)
        query, key = (self.heads(path, config, name, part) for name, part in zip(names[:2], flat, strict=False))
        query = self.scale_query(path, config, query)
        value = self._value_heads(path, config, flat[-1])
        cache.append(key, value)
        cache.capture(query)
        return attend(cache, path, config, query, sink_logits)

    def heads(self, layer_path: str, config: AttentionConfig, name: str, flat: Tensor) -> Tensor:
        """Normalise and rotate a projection, "query" or "key": [T, heads * D] -> [T, heads, D]."""
        path = f"{layer_path}/{name}"
        count = config.num_heads if name == "query" else config.num_kv_heads
        if config.qk_norm == "projection":
            flat = self.value(Normed(flat, f"{path}_norm", self.config.norm_epsilon))
        weight, rotation = self.head_norm(path, config), self.rotations.get(config.rope or "")
        return self.norm_rope(path, flat, weight, rotation, (count, config.head_size))

    def head_norm(self, path: str, config: AttentionConfig) -> Tensor | None:
        """Return the weight [D] of the norm of each head of a projection; None where heads are not normalised."""
        if config.qk_norm == "unit":
            return self.ones(config.head_size)
        return self.weight(f"{path}_norm.weight".replace("/", ".")) if config.qk_norm == "head" else None

    def norm_rope(
        self, path: str, flat: Tensor, weight: Tensor | None, rotation: Rotation | None, shape: tuple[int, int]
    ) -> Tensor:
        """Normalise and rotate (heads, D) where there is a weight, and a rotation: [T, heads * D] -> [T, heads, D]."""
        if rotation is None or weight is not None:
            flat = self.graph.reshape(f"{path}/Reshape", flat, (0, *shape))
        if weight is not None:
            flat = self.norm_heads(f"{path}_norm", flat, weight, shape)
        return flat if rotation is None else self._rotate(path, rotation, flat, shape)

    def scale_query(self, layer_path: str, config: AttentionConfig, query: Tensor) -> Tensor:
        """Multiply queries [T, Hq, D] by the factors of their positions, where the layer has such."""
        if config.query_scale is None:
            return query
        factors = self.query_scales[config.query_scale]
        return self.graph.node(f"{layer_path}/query_scale/Mul", "Mul", [query, factors])

    def _value_heads(self, layer_path: str, config: AttentionConfig, flat: Tensor) -> Tensor:
        """Part the heads of values, and normalise them where the config says so: [T, Hkv * D] -> [T, Hkv, D]."""
        path, size = f"{layer_path}/value", config.head_size
        heads = self.graph.reshape(f"{path}/Reshape", flat, (0, config.num_kv_heads, size))
        if not config.value_norm:
            return heads
        return self.norm_heads(f"{path}_norm", heads, self.ones(size), (config.num_kv_heads, size))

    def norm_heads(self, path: str, heads: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
        """Add an RMSNorm of each of (heads, D): [T, heads, D] -> the same."""
        return self.rms_norm(path, heads, weight, self.config.norm_epsilon)

    def _rotate(self, path: str, rotation: Rotation, flat: Tensor, shape: tuple[int, int]) -> Tensor:
        """Rotate heads (heads, D) of any layout: [T, heads, D]."""
        heads, size = shape
        attributes = {"num_heads": heads, "interleaved": 0}
        if rotation.rotary_size != size:
            attributes["rotary_embedding_dim"] = rotation.rotary_size
        flat = self.graph.reshape(f"{path}/flatten/Reshape", flat, (1, -1, heads * size))
        inputs = [flat, rotation.cosine, rotation.sine]
        rotated = self.graph.node(f"{path}/RotaryEmbedding", "RotaryEmbedding", inputs, attributes)
        return self.graph.reshape(f"{path}/rotated/Reshape", rotated, (-1, heads, size))


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of the step's positions, [1, T, rotary / 2] each."""

    cosine: Tensor
    sine: Tensor
    rotary_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """The format of every linear weight.

    Attributes:
        default: of those that are not listed.
        by_stem: others, e.g. by "layers.0.mlp.up".
        experts: of mixtures that are not dense, e.g. by "layers.0.mlp.experts".
        apart: linear layers of one input whose weights cannot be one, by the name of the whole.
        lookup: format of the embedding; None where it is dense.
    """

    default: WeightFormat
    by_stem: Mapping[str, WeightFormat] = field(default_factory=dict)
    experts: Mapping[str, ExpertFormat] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    lookup: RowFormat | None = None

    def of(self, stem: str) -> WeightFormat:
        """Return the format of one weight."""
        return self.by_stem.get(stem, self.default)

    def stored(self, name: str) -> WeightFormat | ExpertFormat | None:
        """Return the format of the weight of a name, of linear layers and experts; None for others."""
        mixture, _, last = name.rpartition(".")
        if last in EXPERT_WEIGHTS:
            return self.experts.get(mixture)
        return self.of(mixture) if last == "weight" else None

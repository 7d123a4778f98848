"""The typed description of a decoder that the graph builder reads; no Hugging Face key lives past it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]
QkNorm = Literal["none", "head", "projection"]
NormPlacement = Literal["pre", "post", "sandwich"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeVariant:
    """One set of rotation frequencies.

    Attributes:
        limit: longest sequence (tokens) it serves.
        inv_freq: radians per position of each rotated pair, rotary_size / 2 values.
        attention_factor: multiplies cosine and sine (yarn, longrope).
    """

    limit: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary embedding: one variant, or several chosen by the sequence's length (longrope, dynamic).

    Attributes:
        name: identifies it in value names, e.g. "global" or "local".
        variants: ascending by limit; every rope of a model has the same limits.
    """

    name: str
    variants: tuple[RopeVariant, ...]

    @property
    def rotary_size(self) -> int:
        """Elements of a head that are rotated (a prefix of the head)."""
        return 2 * len(self.variants[0].inv_freq)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ between the layers of one model.

    Attributes:
        window: keys a query sees, itself included; -1 for full attention.
        rope: name of the model's rope that this layer uses; None where it has no position encoding.
    """

    window: int
    rope: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder, in the terms of the graph builder.

    Attributes:
        norm_placement: "pre" (Llama), "post" (OLMo 2: norm after attention and after MLP, none before),
            "sandwich" (Gemma 2/3: both).
        qk_norm: "none", "head" (one RMSNorm weight [D] for all heads), "projection" (over Hq*D, Hkv*D).
        embedding_scale: multiplies token embeddings (Gemma: sqrt(hidden_size)).
        attention_scale: softmax scale; 0 means 1/sqrt(D).
        attention_softcap, logit_softcap: 0 means none.
        learned_sinks: each layer has a logit per query head that joins the softmax's denominator (gpt-oss).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_epsilon: float
    activation: Activation
    layers: tuple[LayerConfig, ...]
    ropes: tuple[Rope, ...]
    qk_norm: QkNorm = "none"
    norm_placement: NormPlacement = "pre"
    query_bias: bool = False
    key_bias: bool = False
    value_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    learned_sinks: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


# Linear layers of one input that a fused graph reads as one: their weights lie back to back in the file.
JOINT_LINEARS = (
    ("attention.query", "attention.key", "attention.value"),
    ("mlp.gate", "mlp.up"),
)


def weight_groups(config: ModelConfig) -> list[tuple[str, ...]]:
    """List the weights in the order of the file; those of a group have no padding between them."""
    names = dict.fromkeys(weight_shapes(config))
    groups = []
    while names:
        first = next(iter(names))
        group = [name for name in _joint_names(first) if name in names] or [first]
        for name in group:
            del names[name]
        groups.append(tuple(group))
    return groups


def _joint_names(name: str) -> list[str]:
    """List the names that are joint with a weight's or bias's, itself included."""
    for members in JOINT_LINEARS:
        for member in members:
            for kind in (".weight", ".bias"):
                if name.endswith(f".{member}{kind}"):
                    stem = name.removesuffix(member + kind)
                    return [f"{stem}{other}{kind}" for other in members]
    return []


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """List every weight of the graph by its canonical name, with its shape ([out, in] for linear layers)."""
    c, d = config, config.head_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (c.vocab_size, c.hidden_size)}
    for i in range(len(c.layers)):
        prefix = f"layers.{i}"
        linear = {
            "attention.query": (c.num_heads * d, c.hidden_size, c.query_bias),
            "attention.key": (c.num_kv_heads * d, c.hidden_size, c.key_bias),
            "attention.value": (c.num_kv_heads * d, c.hidden_size, c.value_bias),
            "attention.output": (c.hidden_size, c.num_heads * d, c.output_bias),
            "mlp.gate": (c.intermediate_size, c.hidden_size, c.mlp_bias),
            "mlp.up": (c.intermediate_size, c.hidden_size, c.mlp_bias),
            "mlp.down": (c.hidden_size, c.intermediate_size, c.mlp_bias),
        }
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        for name in norm_names(c):
            shapes[f"{prefix}.{name}.weight"] = (c.hidden_size,)
        if c.learned_sinks:
            shapes[f"{prefix}.attention.sink_logits"] = (c.num_heads,)
        if c.qk_norm != "none":
            per_head = c.qk_norm == "head"
            shapes[f"{prefix}.attention.query_norm.weight"] = (d if per_head else c.num_heads * d,)
            shapes[f"{prefix}.attention.key_norm.weight"] = (d if per_head else c.num_kv_heads * d,)
    shapes["final_norm.weight"] = (c.hidden_size,)
    if not c.tied_embeddings:
        shapes["head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def norm_names(config: ModelConfig) -> tuple[str, ...]:
    """Name the hidden-size norms of one layer."""
    before = ("attention_norm", "mlp_norm")
    after = ("attention_post_norm", "mlp_post_norm")
    return {"pre": before, "post": after, "sandwich": before + after}[config.norm_placement]

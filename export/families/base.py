"""What a family is, and the parts of Llama's layout that most families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import build_rope, read_rope_spec, share_limits
from ortolan.graphs.config import AttentionConfig, ExpertsConfig, LayerConfig, MlpConfig, ModelConfig, Rope
from ortolan.graphs.weights import norm_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a weight comes from in the checkpoint.

    Attributes:
        name: the checkpoint's tensor.
        rows: half-open range of its rows, where several weights share one tensor.
        plus_one: add 1 (norms that store their distance from 1).
        transposed: the last two axes of the tensor are those of the weight, swapped.
        alternating: rows of the weight, its second axis, whose first half has the tensor's even ones, the last its odd
            ones.
        interleaved: size of heads whose pairs of rotated rows follow each other; in the weight, the first rows of all
            pairs of a head come before the second ones. 0 where they do in the tensor, too.
        strides: half-open ranges of rows within every `period` rows of the tensor; those of the first range, in all
            periods, come first in the weight, and so on. Empty: all rows, as they are.
        period: of `strides`.
        padded_rows: sizes of a head in the tensor's rows and, larger, in those of the weight, where zeros follow; None
            where they are one.
        padded_columns: the same of columns, the second axis.
        factor: that the tensor is multiplied by.
        squeezed: whether the tensor has a second axis of one element that the weight does not have.
        parts: tensors whose rows, one tensor after the other, are those of the weight; they are read from checkpoints
            without the tensor `name`.
    """

    name: str
    rows: tuple[int, int] | None = None
    plus_one: bool = False
    transposed: bool = False
    alternating: bool = False
    interleaved: int = 0
    strides: tuple[tuple[int, int], ...] = ()
    period: int = 0
    padded_rows: tuple[int, int] | None = None
    padded_columns: tuple[int, int] | None = None
    factor: float = 1.0
    squeezed: bool = False
    parts: tuple[str, ...] = ()

    @property
    def is_rearranged(self) -> bool:
        """Whether the weight is more than the tensor's rows as they are."""
        is_moved = self.transposed or self.alternating or bool(self.strides) or self.interleaved > 0
        return is_moved or self.plus_one or self.factor != 1.0 or bool(self.padded_rows or self.padded_columns)


Sources: TypeAlias = dict[str, Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        read: turns the text decoder's config and the longest context into a ModelConfig.
        sources: maps every weight of `weight_shapes` to the checkpoint's tensors.
        text_config: finds the text decoder's config in config.json; it is all of it where there is nothing else.
        prefixes: beginnings of tensor names in some checkpoints, and what `sources` calls them.
        left_out: parts of the checkpoint that are not exported, by the names of their modules.
        unread: modules that checkpoints may hold though the text decoder never reads them.
    """

    architecture: str
    read: Callable[[HfConfig, int], ModelConfig]
    sources: Callable[[ModelConfig], Sources]
    text_config: Callable[[HfConfig], HfConfig] = lambda config: config
    prefixes: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    unread: Callable[[ModelConfig], Sequence[str]] = lambda config: ()


LLAMA_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}

_LINEARS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def read_attention(config: HfConfig, **differences: Any) -> AttentionConfig:
    """Read the attention of a layer from the keys that all families spell alike; `differences` are its other fields."""
    values: dict[str, Any] = {
        "num_heads": config.integer("num_attention_heads"),
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "rope": "all",
    }
    return AttentionConfig(**{**values, **differences})


def read_mlp(config: HfConfig, **differences: Any) -> MlpConfig:
    """Read the gated MLP of a layer, as `read_attention` does its attention."""
    values: dict[str, Any] = {"intermediate_size": config.integer("intermediate_size")}
    if "activation" not in differences:
        values["activation"] = config.activation("hidden_act")
    return MlpConfig(**{**values, **differences})


def layers_of(mixers: Sequence[AttentionConfig], mlp: MlpConfig | ExpertsConfig) -> tuple[LayerConfig, ...]:
    """Describe layers that have one MLP."""
    return tuple(LayerConfig(mixer=mixer, mlp=mlp) for mixer in mixers)


def with_windows(mixer: AttentionConfig, windows: Sequence[int]) -> list[AttentionConfig]:
    """Describe layers that differ in their windows alone."""
    return [replace(mixer, window=window) for window in windows]


def read_common(
    config: HfConfig,
    architecture: str,
    layers: tuple[LayerConfig, ...],
    ropes: tuple[Rope, ...],
    **differences: Any,
) -> ModelConfig:
    """Read the keys that all families spell alike; `differences` are ModelConfig's other fields."""
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": config.integer("hidden_size"),
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "layers": layers,
        "ropes": share_limits(ropes),
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": config.eos_token_ids,
    }
    return ModelConfig(**{**values, **differences})


def one_rope(
    config: HfConfig, max_context: int, default_theta: float = 10_000.0, *, partial: bool = False
) -> tuple[Rope, ...]:
    """Read the rope of a model whose layers share one; `partial` as in `read_rope_spec`."""
    return (build_rope("all", read_rope_spec(config, default_theta, partial=partial), max_context),)


def same_layers(config: HfConfig, mixer: AttentionConfig, mlp: MlpConfig | ExpertsConfig) -> tuple[LayerConfig, ...]:
    """Describe layers that are all alike."""
    return (LayerConfig(mixer=mixer, mlp=mlp),) * config.integer("num_hidden_layers")


def attention_biases(config: HfConfig) -> dict[str, bool]:
    """Read the one key that gives all four projections a bias."""
    bias = config.flag("attention_bias")
    return {"query_bias": bias, "key_bias": bias, "value_bias": bias, "output_bias": bias}


def llama_sources(config: ModelConfig, norms: dict[str, str] = LLAMA_NORMS, *, plus_one: bool = False) -> Sources:
    """Map weights to the tensor names of Llama's layout."""
    sources: Sources = {
        "embedding.weight": Source(name="model.embed_tokens.weight"),
        "final_norm.weight": Source(name="model.norm.weight", plus_one=plus_one),
    }
    if not config.tied_embeddings:
        sources["head.weight"] = Source(name="lm_head.weight")
    for i in range(len(config.layers)):
        for ours, theirs in _LINEARS.items():
            for kind in ("weight", "bias"):
                sources[f"layers.{i}.{ours}.{kind}"] = Source(name=f"model.layers.{i}.{theirs}.{kind}")
        for ours in norm_names(config, i):
            sources[f"layers.{i}.{ours}.weight"] = Source(
                name=f"model.layers.{i}.{norms[ours]}.weight", plus_one=plus_one
            )
        sources[f"layers.{i}.attention.sink_logits"] = Source(name=f"model.layers.{i}.self_attn.sinks")
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            sources[f"layers.{i}.attention.{ours}.weight"] = Source(
                name=f"model.layers.{i}.self_attn.{theirs}.weight", plus_one=plus_one
            )
    return sources

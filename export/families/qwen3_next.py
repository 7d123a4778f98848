"""Qwen3-Next: gated delta networks in three of four layers, gated attention in the others, and mixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.export.families.base import (
    Family,
    Source,
    Sources,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    read_mlp,
)
from ortolan.export.families.experts import expert_sources, read_experts
from ortolan.export.families.layer_types import FULL
from ortolan.export.families.qwen3_moe import list_mixtures
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import (
    AttentionConfig,
    ExpertsConfig,
    GatedDeltaConfig,
    LayerConfig,
    MixerConfig,
    ModelConfig,
)

ARCHITECTURE = "Qwen3NextForCausalLM"
LINEAR = "linear_attention"
DEFAULTS: dict[str, Any] = {"head_dim": 256, "partial_rotary_factor": 0.25}


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json."""
    normalise = config.flag("norm_topk_prob", True)
    return read_hybrid(config, max_context, ARCHITECTURE, list_mixtures(config), normalise=normalise)


def read_hybrid(
    config: HfConfig, max_context: int, architecture: str, mixtures: list[bool], *, normalise: bool
) -> ModelConfig:
    """Read a decoder of gated delta networks and gated attention.

    Args:
        config: of the text decoder.
        max_context: longest sequence.
        architecture: its name.
        mixtures: of each layer, whether its MLP is a mixture.
        normalise: whether the shares of a token's experts are divided by their sum.
    """
    config = HfConfig({**DEFAULTS, **config.keys})
    attention, delta = _read_attention(config), read_delta(config)
    mixers: list[MixerConfig] = [attention if kind == FULL else delta for kind in read_layer_types(config)]
    layers = tuple(
        LayerConfig(mixer=mixer, mlp=_read_experts(config, normalise=normalise) if is_mixture else read_mlp(config))
        for mixer, is_mixture in zip(mixers, mixtures, strict=True)
    )
    rope = one_rope(config, max_context, partial=True)
    return read_common(config, architecture, layers, rope)


def _read_attention(config: HfConfig) -> AttentionConfig:
    bias = config.flag("attention_bias")
    if bias:
        raise UnsupportedModelError("config.json: attention_bias is true; gated attention with biases is not supported")
    return read_attention(config, qk_norm="head", output_gate="sigmoid")


def read_delta(config: HfConfig, **differences: Any) -> GatedDeltaConfig:
    """Read a gated delta network; `differences` are its other fields."""
    if config.activation("hidden_act") != "silu":
        raise UnsupportedModelError(
            f"config.json: hidden_act is {config.get('hidden_act')!r}; layers of {LINEAR} are supported with silu"
        )
    return GatedDeltaConfig(
        num_key_heads=config.integer("linear_num_key_heads", 16),
        key_size=config.integer("linear_key_head_dim", 128),
        num_value_heads=config.integer("linear_num_value_heads", 32),
        value_size=config.integer("linear_value_head_dim", 128),
        conv_taps=config.integer("linear_conv_kernel_dim", 4),
        **differences,
    )


def read_layer_types(config: HfConfig) -> list[str]:
    """List which layers have a state and which attend; at least one attends."""
    count, interval = config.integer("num_hidden_layers"), config.integer("full_attention_interval", 4)
    default = [LINEAR if (index + 1) % interval else FULL for index in range(count)]
    types = config.sequence("layer_types", str, default)
    if len(types) != count:
        raise CheckpointError(f"config.json: layer_types lists {len(types)} layers, num_hidden_layers is {count}")
    if unknown := sorted(set(types) - {FULL, LINEAR}):
        raise UnsupportedModelError(f"layer types {unknown} are not supported; supported: {FULL}, {LINEAR}")
    if FULL not in types:
        raise UnsupportedModelError(f"layer_types lists no {FULL}; a model without keys and values is not supported")
    return types


def _read_experts(config: HfConfig, *, normalise: bool) -> ExpertsConfig:
    return read_experts(
        config,
        size_key="moe_intermediate_size",
        normalise=normalise,
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def hybrid_sources(config: ModelConfig, delta: Callable[[str, str, GatedDeltaConfig], Sources]) -> Sources:
    """Map the weights of a hybrid.

    Args:
        config: of the model.
        delta: maps the projections of a gated delta network; takes our stem, the checkpoint's, and its options.
    """
    result = llama_sources(config, plus_one=True)
    for index, layer in enumerate(config.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        if isinstance(layer.mixer, GatedDeltaConfig):
            result |= _delta_sources(f"{ours}.delta", f"{theirs}.linear_attn")
            result |= delta(f"{ours}.delta", f"{theirs}.linear_attn", layer.mixer)
        else:
            size, name = layer.mixer.head_size, f"{theirs}.self_attn.q_proj.weight"
            result |= {
                f"{ours}.attention.query.weight": Source(name=name, strides=((0, size),), period=2 * size),
                f"{ours}.attention.gate.weight": Source(name=name, strides=((size, 2 * size),), period=2 * size),
            }
        if isinstance(layer.mlp, ExpertsConfig):
            result |= expert_sources(index, layer.mlp, names=("gate_proj", "up_proj", "down_proj"))
            shared = {f"shared.{name}": f"shared_expert.{name}_proj" for name in ("gate", "up", "down")}
            shared["shared_gate"] = "shared_expert_gate"
            result |= {
                f"{ours}.mlp.{mine}.weight": Source(name=f"{theirs}.mlp.{name}.weight") for mine, name in shared.items()
            }
    return result


def _delta_sources(ours: str, theirs: str) -> Sources:
    return {
        f"{ours}.conv": Source(name=f"{theirs}.conv1d.weight", squeezed=True),
        f"{ours}.a_log": Source(name=f"{theirs}.A_log"),
        f"{ours}.dt_bias": Source(name=f"{theirs}.dt_bias"),
        f"{ours}.norm.weight": Source(name=f"{theirs}.norm.weight"),
        f"{ours}.output.weight": Source(name=f"{theirs}.out_proj.weight"),
    }


def sources(config: ModelConfig) -> Sources:
    """Map the weights; the projections of a key head's queries, keys, values and gates follow each other."""

    def delta(ours: str, theirs: str, mixer: GatedDeltaConfig) -> Sources:
        values = mixer.num_value_heads // mixer.num_key_heads  # of a key head
        key, value = mixer.key_size, values * mixer.value_size
        wide, narrow = f"{theirs}.in_proj_qkvz.weight", f"{theirs}.in_proj_ba.weight"
        period, ends = 2 * key + 2 * value, (key, 2 * key, 2 * key + value)
        mixed = ((0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2]))
        return {
            f"{ours}.qkv.weight": Source(name=wide, strides=mixed, period=period),
            f"{ours}.gate.weight": Source(name=wide, strides=((ends[2], period),), period=period),
            f"{ours}.beta.weight": Source(name=narrow, strides=((0, values),), period=2 * values),
            f"{ours}.decay.weight": Source(name=narrow, strides=((values, 2 * values),), period=2 * values),
        }

    return hybrid_sources(config, delta)


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

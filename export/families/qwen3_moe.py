"""Qwen 3 MoE: Qwen 3 with mixtures of experts in the place of some or all MLPs."""

from __future__ import annotations

from ortolan.errors import CheckpointError
from ortolan.export.families.base import (
    Family,
    Sources,
    attention_biases,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    read_mlp,
)
from ortolan.export.families.experts import expert_sources, read_experts
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ExpertsConfig, LayerConfig, ModelConfig

ARCHITECTURE = "Qwen3MoeForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; the window, where it is used, is that of every layer."""
    window = config.integer("sliding_window", 4096) if config.flag("use_sliding_window") else -1
    mixer = read_attention(config, qk_norm="head", window=window, **attention_biases(config))
    layers = tuple(
        LayerConfig(mixer=mixer, mlp=_experts(config) if is_mixture else read_mlp(config))
        for is_mixture in list_mixtures(config)
    )
    return read_common(config, ARCHITECTURE, layers, one_rope(config, max_context))


def _experts(config: HfConfig) -> ExpertsConfig:
    return read_experts(
        config,
        size_key="moe_intermediate_size",
        default_count=128,
        default_taken=8,
        normalise=config.flag("norm_topk_prob"),
    )


def list_mixtures(config: HfConfig) -> list[bool]:
    """Say of each layer whether its MLP is a mixture: every decoder_sparse_step-th, unless it is listed."""
    count, step = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step", 1)
    dense = config.sequence("mlp_only_layers", int, [])
    unknown = sorted(layer for layer in dense if not 0 <= layer < count)
    if unknown:
        raise CheckpointError(f"config.json: mlp_only_layers lists {unknown}; the model has {count} layers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(count)]


def sources(config: ModelConfig) -> Sources:
    """Map the experts' names."""
    result = llama_sources(config)
    for index, layer in enumerate(config.layers):
        if isinstance(layer.mlp, ExpertsConfig):
            result |= expert_sources(index, layer.mlp, names=("gate_proj", "up_proj", "down_proj"))
    return result


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

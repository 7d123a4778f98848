"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from ortolan.export.families.base import (
    Family,
    Sources,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    same_layers,
)
from ortolan.export.families.experts import expert_sources, read_experts
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "MixtralForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; the window, where there is one, is that of every layer."""
    window = -1 if config.get("sliding_window") is None else config.integer("sliding_window")
    experts = read_experts(config, default_count=8, default_taken=2, normalise=True)
    return read_common(
        config,
        ARCHITECTURE,
        same_layers(config, read_attention(config, window=window), experts),
        one_rope(config, max_context, 1_000_000.0),
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
    )


def sources(config: ModelConfig) -> Sources:
    """Map the experts' names."""
    result = llama_sources(config)
    for index, layer in enumerate(config.layers):
        result |= expert_sources(index, layer.mlp, module="block_sparse_moe", names=("w1", "w3", "w2"))
    return result


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

"""OLMoE: a mixture of experts in every layer, and norms over the whole query and key projections."""

from __future__ import annotations

from ortolan.errors import UnsupportedModelError
from ortolan.export.families.base import (
    Family,
    Sources,
    attention_biases,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    same_layers,
)
from ortolan.export.families.experts import expert_sources, read_experts
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "OlmoeForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json.

    Raises:
        UnsupportedModelError: queries, keys and values are clipped.
    """
    if config.get("clip_qkv") is not None:
        raise UnsupportedModelError(f"config.json: clip_qkv is {config.get('clip_qkv')!r}; supported: null")
    mixer = read_attention(config, qk_norm="projection", **attention_biases(config))
    experts = read_experts(config, default_count=64, default_taken=8, normalise=config.flag("norm_topk_prob"))
    return read_common(
        config,
        ARCHITECTURE,
        same_layers(config, mixer, experts),
        one_rope(config, max_context),
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
    )


def sources(config: ModelConfig) -> Sources:
    """Map the experts' names."""
    result = llama_sources(config)
    for index, layer in enumerate(config.layers):
        result |= expert_sources(index, layer.mlp, names=("gate_proj", "up_proj", "down_proj"))
    return result


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

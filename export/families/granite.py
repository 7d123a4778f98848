"""Granite: Llama with factors of embeddings, attention, residuals and logits."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import (
    Family,
    attention_biases,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    read_mlp,
    same_layers,
)
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import AttentionConfig, ModelConfig

ARCHITECTURE = "GraniteForCausalLM"


def read_granite_attention(config: HfConfig, **differences: Any) -> AttentionConfig:
    """Read what the attention of all Granite models shares."""
    scale = config.positive("attention_multiplier", 1.0)
    return read_attention(config, scale=scale, **attention_biases(config), **differences)


def granite_factors(config: HfConfig) -> dict[str, Any]:
    """Read the factors of a Granite model, as fields of ModelConfig."""
    return {
        "embedding_scale": config.positive("embedding_multiplier", 1.0),
        "residual_scale": config.positive("residual_multiplier", 1.0),
        "logit_divisor": config.positive("logits_scaling", 1.0),
    }


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json."""
    mlp = read_mlp(config, bias=config.flag("mlp_bias"))
    return read_common(
        config,
        ARCHITECTURE,
        same_layers(config, read_granite_attention(config), mlp),
        one_rope(config, max_context),
        **granite_factors(config),
    )


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=llama_sources)

"""OLMo 2: norms after attention and MLP, and over the whole query and key projections."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import (
    Family,
    Sources,
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

ARCHITECTURE = "Olmo2ForCausalLM"
NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}


def read_olmo_attention(config: HfConfig, **differences: Any) -> AttentionConfig:
    """Read what all layers of OLMo 2 and 3 share."""
    return read_attention(config, qk_norm="projection", **attention_biases(config), **differences)


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json."""
    return read_common(
        config,
        ARCHITECTURE,
        same_layers(config, read_olmo_attention(config), read_mlp(config)),
        one_rope(config, max_context),
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
        norm_placement="post",
    )


def sources(config: ModelConfig) -> Sources:
    """Map the norms' names."""
    return llama_sources(config, NORMS)


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

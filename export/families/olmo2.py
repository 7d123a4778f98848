"""OLMo 2: norms after attention and MLP, and over the whole query and key projections."""

from __future__ import annotations

from ortolan.export.families.base import (
    Family,
    Sources,
    attention_biases,
    llama_sources,
    one_rope,
    read_common,
    same_layers,
)
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "Olmo2ForCausalLM"
NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json."""
    return read_common(
        config,
        ARCHITECTURE,
        same_layers(config, -1),
        one_rope(config, max_context),
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
        norm_placement="post",
        qk_norm="projection",
        **attention_biases(config),
    )


def sources(config: ModelConfig) -> Sources:
    """Map the norms' names."""
    return llama_sources(config, NORMS)


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

"""Llama 2 and 3: pre-norm, one rope, full attention."""

from __future__ import annotations

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
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "LlamaForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json."""
    return read_common(
        config,
        ARCHITECTURE,
        same_layers(
            config,
            read_attention(config, **attention_biases(config)),
            read_mlp(config, bias=config.flag("mlp_bias")),
        ),
        one_rope(config, max_context),
    )


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=llama_sources)

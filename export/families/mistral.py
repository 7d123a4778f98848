"""Mistral: Llama with one sliding window for every layer, or none."""

from __future__ import annotations

from ortolan.export.families.base import (
    Family,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    read_mlp,
    same_layers,
)
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "MistralForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; an absent `sliding_window` means 4096, null means none."""
    window = config.keys.get("sliding_window", 4096)
    window = -1 if window is None else config.integer("sliding_window", 4096)
    layers = same_layers(config, read_attention(config, window=window), read_mlp(config))
    return read_common(config, ARCHITECTURE, layers, one_rope(config, max_context))


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=llama_sources)

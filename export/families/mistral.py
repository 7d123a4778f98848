"""Mistral: Llama with one sliding window for every layer, for some of them, or none."""

from __future__ import annotations

from ortolan.export.families.base import (
    Family,
    layers_of,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    read_mlp,
    with_windows,
)
from ortolan.export.families.layer_types import FULL, SLIDING, read_layer_types
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "MistralForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; an absent `sliding_window` means 4096, null means none, and `layer_types` says where it is."""
    window = config.integer("sliding_window", 4096) if config.keys.get("sliding_window", 4096) is not None else None
    default = [FULL if window is None else SLIDING] * config.integer("num_hidden_layers")
    windows = read_layer_types(config, default, window)
    layers = layers_of(with_windows(read_attention(config), windows), read_mlp(config))
    return read_common(config, ARCHITECTURE, layers, one_rope(config, max_context))


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=llama_sources)

"""Qwen 2 and 2.5: Llama with biases on query, key and value, and windows in its upper layers if asked for."""

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
from ortolan.export.families.layer_types import read_layer_types
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "Qwen2ForCausalLM"


def read_windows(config: HfConfig) -> list[int]:
    """Read which layers have a window: `layer_types`, else those from `max_window_layers` on."""
    window = config.integer("sliding_window", 4096) if config.flag("use_sliding_window") else None
    first = config.number("max_window_layers", 28)
    count = config.integer("num_hidden_layers")
    default = ["sliding_attention" if window and i >= first else "full_attention" for i in range(count)]
    return read_layer_types(config, default, window)


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json."""
    mixer = read_attention(config, query_bias=True, key_bias=True, value_bias=True)
    return read_common(
        config,
        ARCHITECTURE,
        layers_of(with_windows(mixer, read_windows(config)), read_mlp(config)),
        one_rope(config, max_context),
    )


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=llama_sources)

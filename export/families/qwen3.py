"""Qwen 3: Qwen 2 without its biases, with an RMSNorm on each head of query and key."""

from __future__ import annotations

from ortolan.export.families.base import (
    Family,
    attention_biases,
    layers_of,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    read_mlp,
    with_windows,
)
from ortolan.export.families.qwen2 import read_windows
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "Qwen3ForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; heads have 128 elements unless it says otherwise."""
    with_head_size = HfConfig({"head_dim": 128, **config.keys})
    mixer = read_attention(with_head_size, qk_norm="head", **attention_biases(config))
    return read_common(
        with_head_size,
        ARCHITECTURE,
        layers_of(with_windows(mixer, read_windows(config)), read_mlp(config)),
        one_rope(with_head_size, max_context),
    )


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=llama_sources)

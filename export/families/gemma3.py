"""Gemma 3 (text): Gemma 2 with QK norm, a rope for each kind of layer, five windows to one full layer."""

from __future__ import annotations

from ortolan.export.families.base import Family, layers_of, read_common
from ortolan.export.families.gemma2 import (
    HEAD_SIZE,
    gemma_differences,
    read_gemma_attention,
    read_gemma_mlp,
    soft_cap,
    sources,
)
from ortolan.export.families.layer_types import FULL, SLIDING, read_layer_types
from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import build_rope, read_rope_spec
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "Gemma3ForCausalLM"
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; RoPE scaling applies to the full layers only, attn_logit_softcapping to none.

    Source: transformers' modeling_gemma3.py, which reads that key and does not pass it on.
    """
    config = HfConfig({"head_dim": HEAD_SIZE, **config.keys})
    pattern = config.integer("sliding_window_pattern", 6)
    default = [SLIDING if (i + 1) % pattern else FULL for i in range(config.integer("num_hidden_layers"))]
    windows = read_layer_types(config, default, config.integer("sliding_window", 4096))
    ropes = (
        build_rope("full", read_rope_spec(config, GLOBAL_THETA, FULL), max_context),
        build_rope("sliding", read_rope_spec(config, LOCAL_THETA, SLIDING), max_context),
    )
    mixers = [
        read_gemma_attention(config, qk_norm="head", window=w, rope="full" if w < 0 else "sliding") for w in windows
    ]
    return read_common(
        config,
        ARCHITECTURE,
        layers_of(mixers, read_gemma_mlp(config)),
        ropes,
        logit_softcap=soft_cap(config, "final_logit_softcapping", 0.0),
        **gemma_differences(config),
    )


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

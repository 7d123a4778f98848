"""Gemma 2: norms on both sides, softcapped attention and logits, a window in every other layer."""

from __future__ import annotations

import math
from typing import Any

from ortolan.errors import UnsupportedModelError
from ortolan.export.families.base import (
    Family,
    Sources,
    attention_biases,
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
from ortolan.graphs.config import AttentionConfig, MlpConfig, ModelConfig

ARCHITECTURE = "Gemma2ForCausalLM"
HEAD_SIZE = 256
NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def gemma_differences(config: HfConfig) -> dict[str, Any]:
    """Read what Gemma 2 and 3 share.

    Raises:
        UnsupportedModelError: attention is bidirectional.
    """
    if config.flag("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention is on; Ortolan runs causal decoders only")
    return {
        "norm_placement": "sandwich",
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "embedding_scale": math.sqrt(config.integer("hidden_size")),
    }


def read_gemma_attention(config: HfConfig, **differences: Any) -> AttentionConfig:
    """Read what the attention of all layers of Gemma 2 and 3 shares."""
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    return read_attention(config, scale=scale, **attention_biases(config), **differences)


def read_gemma_mlp(config: HfConfig) -> MlpConfig:
    """Read the MLP, whose activation has a key of its own."""
    return read_mlp(config, activation=config.activation("hidden_activation", "gelu_pytorch_tanh"))


def soft_cap(config: HfConfig, key: str, default: float) -> float:
    """Read a softcap; null means none, an absent key the family's default."""
    return 0.0 if config.keys.get(key, default) is None else config.number(key, default)


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; windows are in the even layers unless `layer_types` says otherwise."""
    config = HfConfig({"head_dim": HEAD_SIZE, **config.keys})
    default = [SLIDING if (i + 1) % 2 else FULL for i in range(config.integer("num_hidden_layers"))]
    windows = read_layer_types(config, default, config.integer("sliding_window", 4096))
    mixer = read_gemma_attention(config, softcap=soft_cap(config, "attn_logit_softcapping", 50.0))
    return read_common(
        config,
        ARCHITECTURE,
        layers_of(with_windows(mixer, windows), read_gemma_mlp(config)),
        one_rope(config, max_context),
        logit_softcap=soft_cap(config, "final_logit_softcapping", 30.0),
        **gemma_differences(config),
    )


def sources(config: ModelConfig) -> Sources:
    """Map the norms' names; Gemma stores their distance from 1."""
    return llama_sources(config, NORMS, plus_one=True)


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

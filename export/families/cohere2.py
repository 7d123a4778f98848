"""Cohere 2 (Command R7B, Command A): attention and MLP side by side, LayerNorms, and RoPE in windows alone."""

from __future__ import annotations

from dataclasses import replace

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
)
from ortolan.export.families.layer_types import FULL, SLIDING, read_layer_types
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "Cohere2ForCausalLM"
DEFAULT_LOGIT_SCALE = 0.0625


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; three of four layers have a window unless `layer_types` says otherwise.

    Heads share the hidden size, whatever `head_dim` says.
    """
    config = HfConfig({key: value for key, value in config.keys.items() if key != "head_dim"})
    count = config.integer("num_hidden_layers")
    pattern = config.integer("sliding_window_pattern", 4)
    default = [SLIDING if (i + 1) % pattern else FULL for i in range(count)]
    windows = read_layer_types(config, default, config.integer("sliding_window", 4096))
    biases = attention_biases(config)
    mixers = [read_attention(config, window=w, rope="all" if w > 0 else None, **biases) for w in windows]
    return read_common(
        config,
        ARCHITECTURE,
        layers_of(mixers, read_mlp(config)),
        one_rope(config, max_context),
        norm="layer",
        norm_placement="parallel",
        norm_epsilon=config.positive("layer_norm_eps", 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        logit_divisor=1 / config.positive("logit_scale", DEFAULT_LOGIT_SCALE),
    )


def sources(config: ModelConfig) -> Sources:
    """Map Llama's names; rotated pairs of rows, which follow each other, are moved apart."""
    found = llama_sources(config)
    for index, layer in enumerate(config.layers):
        for name in ("query", "key") if layer.mixer.rope else ():
            for kind in ("weight", "bias"):
                stem = f"layers.{index}.attention.{name}.{kind}"
                found[stem] = replace(found[stem], interleaved=layer.mixer.head_size)
    return found


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

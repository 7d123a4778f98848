"""Muse-Glimmer: gated attention, norms of heads without weights, a window and RoPE in three of four layers.

Source: transformers' modeling_muse_glimmer.py, of which this is the text decoder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ortolan.errors import CheckpointError
from ortolan.export.families.base import (
    Family,
    Source,
    Sources,
    attention_biases,
    layers_of,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    read_mlp,
)
from ortolan.export.families.gemma2 import NORMS
from ortolan.export.families.gemma3_vision import PREFIXES, text_section
from ortolan.export.families.layer_types import FULL, SLIDING, read_layer_types
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "MuseGlimmerForConditionalGeneration"
# transformers' MuseGlimmerTextConfig: checkpoints may leave out what does not differ from it.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "sliding_window": 2048,
    "bos_token_id": 200_000,
    "eos_token_id": 200_001,
}


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read the text decoder's config; counted from the last, every fourth layer is full, and has no RoPE."""
    count = config.integer("num_hidden_layers")
    is_full = [(count - 1 - i) % 4 == 0 for i in range(count)]
    default = [FULL if full else SLIDING for full in is_full]
    windows = read_layer_types(config, default, config.integer("sliding_window"))
    # Queries are multiplied by a factor behind their norm, and so are their logits.
    scale = config.positive("qk_scale_factor", 3.87) * config.head_size**-0.5
    mixers = [
        read_attention(
            config,
            window=window,
            rope="all" if has_rope else None,
            scale=scale,
            qk_norm="unit",
            output_gate="sigmoid",
            **attention_biases(config),
        )
        for window, has_rope in zip(windows, _have_rope(config, is_full), strict=True)
    ]
    return read_common(
        config,
        ARCHITECTURE,
        layers_of(mixers, read_mlp(config, activation=config.activation("hidden_activation"))),
        one_rope(config, max_context),
        norm_placement="sandwich",
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
        post_norm_epsilon=config.number("post_norm_eps", 1e-8),
        embedding_norm=True,
        logit_divisor=1 / config.positive("output_multiplier", 0.19611613513818404),
        logit_softcap=config.positive("final_logit_softcapping", 20.0),
    )


def _have_rope(config: HfConfig, is_full: list[bool]) -> list[bool]:
    """Say which layers have RoPE; of a base that is not 0, transformers reads no more than that."""
    given = config.sequence("layer_rope_theta", object, [not full for full in is_full])
    if len(given) != len(is_full):
        raise CheckpointError(
            f"config.json: layer_rope_theta lists {len(given)} layers, num_hidden_layers is {len(is_full)}"
        )
    return [bool(base) for base in given]


def sources(config: ModelConfig) -> Sources:
    """Map the norms, which store their distance from 1 but for the last one, and the gates."""
    found = llama_sources(config, NORMS, plus_one=True)
    found["final_norm.weight"] = replace(found["final_norm.weight"], plus_one=False)
    for index in range(len(config.layers)):
        gate = f"model.layers.{index}.self_attn.gate_proj.weight"
        found[f"layers.{index}.attention.gate.weight"] = Source(name=gate)
    return found


FAMILY = Family(
    architecture=ARCHITECTURE,
    read=read,
    sources=sources,
    text_config=lambda config: text_section(config, DEFAULTS),
    prefixes=PREFIXES,
    left_out=("vision_tower", "vision_adapter", "vision_projection"),
)

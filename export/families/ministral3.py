"""Ministral 3: Mistral with yarn, and queries that are scaled by their position."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import (
    Family,
    llama_sources,
    read_attention,
    read_common,
    read_mlp,
    same_layers,
)
from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import build_rope, read_rope_spec
from ortolan.graphs.config import ModelConfig, QueryScale

ARCHITECTURE = "Ministral3ForCausalLM"
# transformers' Ministral3Config: checkpoints may leave out what does not differ from it.
DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; the window, where there is one, is that of every layer."""
    config = HfConfig({"head_dim": 128, **config.keys, "rope_parameters": config.get("rope_parameters", DEFAULT_ROPE)})
    window = -1 if config.get("sliding_window") is None else config.integer("sliding_window")
    rope = read_rope_spec(config, 10_000.0)
    mixer = read_attention(config, window=window, query_scale=_query_scale(rope.parameters))
    return read_common(
        config,
        ARCHITECTURE,
        same_layers(config, mixer, read_mlp(config)),
        (build_rope("all", rope, max_context),),
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
    )


def _query_scale(parameters: HfConfig) -> QueryScale:
    return QueryScale(
        beta=parameters.number("llama_4_scaling_beta"),
        length=parameters.positive("original_max_position_embeddings"),
    )


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=llama_sources)

"""gpt-oss: learned attention sinks, a window in every other layer, and experts with a clamped activation and biases."""

from __future__ import annotations

from typing import Any

from ortolan.export.families.base import (
    Family,
    Source,
    Sources,
    layers_of,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    with_windows,
)
from ortolan.export.families.experts import read_experts
from ortolan.export.families.layer_types import FULL, SLIDING, read_layer_types
from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import rope_keys
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "GptOssForCausalLM"
DEFAULT_THETA = 150_000.0
DEFAULT_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; heads have 64 elements unless it says otherwise."""
    config = HfConfig({**_defaults(config), **config.keys})
    default = [FULL if i % 2 else SLIDING for i in range(config.integer("num_hidden_layers"))]
    windows = read_layer_types(config, default, config.integer("sliding_window", 128))
    bias = config.flag("attention_bias", True)
    biases = dict.fromkeys(("query_bias", "key_bias", "value_bias", "output_bias"), bias)
    mixer = read_attention(config, learned_sinks=True, **biases)
    experts = read_experts(
        config,
        default_count=128,
        default_taken=4,
        normalise=True,  # the softmax of the chosen logits is that of all, divided by the sum of the chosen
        activation="clamped_silu",
        limit=config.positive("swiglu_limit", 7.0),
        alpha=config.number("swiglu_alpha", 1.702),
        bias=True,
        router_bias=True,
    )
    return read_common(
        config,
        ARCHITECTURE,
        layers_of(with_windows(mixer, windows), experts),
        one_rope(config, max_context, DEFAULT_THETA),
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
    )


def _defaults(config: HfConfig) -> dict[str, Any]:
    return {"head_dim": 64} | ({} if rope_keys(config).keys else {"rope_parameters": DEFAULT_ROPE})


def sources(config: ModelConfig) -> Sources:
    """Map the experts' tensors: each matrix is [in, out], and the columns of gate and factor alternate."""
    result = llama_sources(config)
    for index in range(len(config.layers)):
        ours, theirs = f"layers.{index}.mlp", f"model.layers.{index}.mlp"
        experts = f"{theirs}.experts"
        result |= {
            f"{ours}.router.weight": Source(name=f"{theirs}.router.weight"),
            f"{ours}.router.bias": Source(name=f"{theirs}.router.bias"),
            f"{ours}.experts.gate_up": Source(name=f"{experts}.gate_up_proj", transposed=True, alternating=True),
            f"{ours}.experts.gate_up_bias": Source(name=f"{experts}.gate_up_proj_bias", alternating=True),
            f"{ours}.experts.down": Source(name=f"{experts}.down_proj", transposed=True),
            f"{ours}.experts.down_bias": Source(name=f"{experts}.down_proj_bias"),
        }
    return result


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

"""Granite SWA: Granite with learned sinks, a window in three of four layers, and a RoPE base for each layer.

Source: transformers' modeling_granite_swa.py, whose sigmoid(logsumexp - sink) is a logit in the softmax's denominator.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortolan.errors import CheckpointError
from ortolan.export.families.base import Family, layers_of, llama_sources, read_common, read_mlp
from ortolan.export.families.granite import granite_factors, read_granite_attention
from ortolan.export.families.layer_types import FULL, SLIDING, read_layer_types
from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import build_rope, read_rope_spec, rope_keys
from ortolan.graphs.config import AttentionConfig, ModelConfig, Rope

ARCHITECTURE = "GraniteSWAForCausalLM"
DEFAULT_THETA = 10_000.0
DEFAULT_WINDOW = 128


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; embeddings and head are one unless it says otherwise."""
    mixers, ropes = read_layers(config, max_context)
    return read_common(
        config,
        ARCHITECTURE,
        layers_of(mixers, read_mlp(config, bias=config.flag("mlp_bias"))),
        ropes,
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        **granite_factors(config),
    )


def read_layers(config: HfConfig, max_context: int) -> tuple[list[AttentionConfig], tuple[Rope, ...]]:
    """Read the attention of every layer, and the ropes that they use; every fourth layer is full by default."""
    count = config.integer("num_hidden_layers")
    default = [SLIDING if i % 4 else FULL for i in range(count)]
    windows = read_layer_types(config, default, config.integer("sliding_window", DEFAULT_WINDOW))
    thetas = _thetas(config, count)
    ropes = tuple(_rope(config, theta, max_context) for theta in dict.fromkeys(thetas) if theta)
    mixers = [
        read_granite_attention(config, window=window, rope=_name(theta) if theta else None, learned_sinks=True)
        for window, theta in zip(windows, thetas, strict=True)
    ]
    return mixers, ropes


def _thetas(config: HfConfig, count: int) -> Sequence[float]:
    """Return the RoPE base of every layer; 0 where it has no position encoding."""
    if config.get("layer_rope_theta") is None:
        return [read_rope_spec(config, DEFAULT_THETA).theta] * count
    given = config.sequence("layer_rope_theta", object, [])
    if len(given) != count:
        raise CheckpointError(f"config.json: layer_rope_theta lists {len(given)} layers, num_hidden_layers is {count}")
    bases = [HfConfig({"layer_rope_theta": base}).number("layer_rope_theta") for base in given]
    if wrong := [base for base in bases if base and base <= 1]:
        raise CheckpointError(f"config.json: layer_rope_theta has {wrong[0]}; expected 0, or a number above 1")
    return bases


def _rope(config: HfConfig, theta: float, max_context: int) -> Rope:
    parameters = {**rope_keys(config).keys, "rope_theta": theta}
    spec = read_rope_spec(HfConfig({**config.keys, "rope_scaling": None, "rope_parameters": parameters}), theta)
    return build_rope(_name(theta), spec, max_context)


def _name(theta: float) -> str:
    return f"theta_{theta:g}"


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=llama_sources)

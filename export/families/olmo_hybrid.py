"""OLMo Hybrid: gated delta networks behind a norm, and attention whose norms come after it, as in OLMo 3.

Source: transformers' modeling_olmo_hybrid.py, and the names of published tensors in its conversion_mapping.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ortolan.export.families.base import (
    LLAMA_NORMS,
    Family,
    Source,
    Sources,
    llama_sources,
    one_rope,
    read_common,
    read_mlp,
)
from ortolan.export.families.layer_types import FULL
from ortolan.export.families.olmo2 import NORMS, read_olmo_attention
from ortolan.export.families.qwen3_next import read_delta, read_layer_types
from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import rope_keys
from ortolan.graphs.config import GatedDeltaConfig, LayerConfig, ModelConfig, Rope

ARCHITECTURE = "OlmoHybridForCausalLM"
GATED_NORM_EPSILON = 1e-5  # whatever config.json says of the other norms
# Published checkpoints have other names for some norms, of layers with a state or of all.
PUBLISHED_NORMS = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json."""
    ropes = _read_ropes(config, max_context)
    config = HfConfig({**_defaults(config), **{key: value for key, value in config.keys.items() if value is not None}})
    attention = read_olmo_attention(config, rope=ropes[0].name if ropes else None)
    scale = 2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0
    delta = read_delta(config, beta_scale=scale, norm_epsilon=GATED_NORM_EPSILON)
    mlp = read_mlp(config)
    attends = LayerConfig(mixer=attention, mlp=mlp, norm_placement="post")
    keeps = LayerConfig(mixer=delta, mlp=mlp, norm_placement="pre")
    layers = tuple(attends if kind == FULL else keeps for kind in read_layer_types(config))
    return read_common(config, ARCHITECTURE, layers, ropes)


def _defaults(config: HfConfig) -> dict[str, Any]:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    key_heads = config.integer("linear_num_key_heads", heads)
    key_size = config.integer("linear_key_head_dim", 3 * hidden // (4 * key_heads))
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": 2 * key_size,
    }


def _read_ropes(config: HfConfig, max_context: int) -> tuple[Rope, ...]:
    """Read the rope; published checkpoints have none, and say so by a base that is null."""
    keys = rope_keys(config).keys or config.keys
    return () if keys.get("rope_theta", 0) is None else one_rope(config, max_context)


def sources(config: ModelConfig) -> Sources:
    """Map the weights."""
    named = llama_sources(config, LLAMA_NORMS | NORMS)
    result = {weight: _with_published(source) for weight, source in named.items()}
    for index, layer in enumerate(config.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        if isinstance(layer.mixer, GatedDeltaConfig):
            result |= _delta_sources(f"{ours}.delta", f"{theirs}.linear_attn")
    return result


def _with_published(source: Source) -> Source:
    """Add the other name that a norm may have."""
    for name, published in PUBLISHED_NORMS.items():
        if f".{name}." in source.name:
            return replace(source, parts=(source.name.replace(name, published),))
    return source


def _delta_sources(ours: str, theirs: str) -> Sources:
    """Map a gated delta network, whose queries, keys and values are tensors of their own."""
    names = ("q", "k", "v")
    linears = {"gate": "g_proj", "beta": "b_proj", "decay": "a_proj", "norm": "o_norm", "output": "o_proj"}
    projections = tuple(f"{theirs}.{name}_proj.weight" for name in names)
    convolutions = tuple(f"{theirs}.{name}_conv1d.weight" for name in names)
    return {f"{ours}.{mine}.weight": Source(name=f"{theirs}.{name}.weight") for mine, name in linears.items()} | {
        f"{ours}.qkv.weight": Source(name=f"{theirs}.qkv_proj.weight", parts=projections),
        f"{ours}.conv": Source(name=f"{theirs}.conv1d.weight", squeezed=True, parts=convolutions),
        f"{ours}.a_log": Source(name=f"{theirs}.A_log"),
        f"{ours}.dt_bias": Source(name=f"{theirs}.dt_bias"),
    }


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

"""Gemma 4: heads of their own on full layers, shared caches, per-layer embeddings, values made of keys, experts.

Where `attention_k_eq_v` is on, the full layers have one projection for both. Keys are its heads normalised, times a
weight, and rotated; values are the same heads normalised alone. So the cache holds two tensors: neither can be had from
the other where keys are read.

Source: transformers' modeling_gemma4.py and modeling_gemma4_unified.py, of which this is the text decoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.export.families.base import (
    Family,
    Source,
    Sources,
    attention_biases,
    llama_sources,
    read_attention,
    read_common,
)
from ortolan.export.families.experts import read_experts
from ortolan.export.families.gemma2 import NORMS, read_gemma_mlp, soft_cap
from ortolan.export.families.gemma3_vision import PREFIXES, text_section
from ortolan.export.families.layer_types import FULL, SLIDING, layer_types
from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import build_rope, read_rope_spec
from ortolan.graphs.config import AttentionConfig, BesideConfig, LayerConfig, LayerInputs, MlpConfig, ModelConfig

# transformers' Gemma4TextConfig: checkpoints may leave out what does not differ from it.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# Gemma4UnifiedTextConfig, which knows no per-layer embeddings.
UNIFIED_DEFAULTS = {
    **DEFAULTS,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
ARCHITECTURE = "Gemma4ForCausalLM"
GLOBAL_HEAD_SIZE = 512
SLIDING_PATTERN = 6
ROPE_DEFAULTS = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
OWN_KEYS = ("head_dim", "num_key_value_heads")  # what a layer may have of its own
CACHE_WRITERS = ("k_proj", "v_proj", "k_norm", "v_norm")
LAYER_SOURCES = {
    "layer_input.gate": "per_layer_input_gate",
    "layer_input.out": "per_layer_projection",
    "layer_input_norm": "post_per_layer_input_norm",
}
EXPERT_SOURCES = {
    "dense_post_norm.weight": "post_feedforward_layernorm_1.weight",
    "experts_norm.weight": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm.weight": "post_feedforward_layernorm_2.weight",
    "router_norm.weight": "router.scale",
    "router.weight": "router.proj.weight",
    "router.expert_scale": "router.per_expert_scale",
    "experts.gate_up": "experts.gate_up_proj",
    "experts.down": "experts.down_proj",
}
MODEL_SOURCES = {
    "embedding": "embed_tokens_per_layer",
    "projection": "per_layer_model_projection",
    "norm": "per_layer_projection_norm",
}


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read the text decoder's config.

    Raises:
        UnsupportedModelError: it has attention in both directions, or a small second vocabulary.
        CheckpointError: it contradicts itself.
    """
    _check_supported(config)
    config = HfConfig({**config.keys, "rope_parameters": config.get("rope_parameters", ROPE_DEFAULTS)})
    types = _layer_types(config)
    sections = [_layer_section(config, index, kind) for index, kind in enumerate(types)]
    ropes = {kind: read_rope_spec(section, 10_000.0, kind) for kind, section in zip(types, sections, strict=True)}
    return read_common(
        config,
        ARCHITECTURE,
        _read_layers(config, types, sections),
        tuple(build_rope(kind, spec, max_context) for kind, spec in ropes.items()),
        norm_placement="sandwich",
        embedding_scale=math.sqrt(config.integer("hidden_size")),
        logit_softcap=soft_cap(config, "final_logit_softcapping", 0.0),
        layer_inputs=_read_layer_inputs(config),
    )


def _check_supported(config: HfConfig) -> None:
    direction = config.get("use_bidirectional_attention")
    if direction not in (None, "vision"):  # texts are read causally under "vision", too
        raise UnsupportedModelError(
            f'config.json: use_bidirectional_attention is {direction!r}; supported: null and "vision"'
        )


def _layer_types(config: HfConfig) -> list[str]:
    """Return the type of each layer; the last one is full, whatever the config says, as in transformers."""
    count = config.integer("num_hidden_layers")
    types = layer_types(config, [SLIDING if (i + 1) % SLIDING_PATTERN else FULL for i in range(count)])
    return [*types[:-1], FULL]


def _layer_section(config: HfConfig, index: int, kind: str) -> HfConfig:
    """Return the keys as one layer has them.

    Published configs say what the full layers have of their own; those that transformers 5 writes list each layer's.
    """
    own: dict[str, Any] = {}
    if config.get("per_layer_config") is not None:
        own = dict(config.section("per_layer_config").section(str(index)).keys)
    elif kind == FULL:
        own["head_dim"] = config.get("global_head_dim", GLOBAL_HEAD_SIZE)
        if config.flag("attention_k_eq_v"):
            own["num_key_value_heads"] = config.get("num_global_key_value_heads", config.num_kv_heads)
    if unknown := sorted(set(own) - set(OWN_KEYS)):
        raise UnsupportedModelError(
            f"config.json: per_layer_config gives layer {index} its own {', '.join(unknown)}; supported: "
            f"{', '.join(OWN_KEYS)}"
        )
    return HfConfig({**config.keys, **own})


def _read_layers(config: HfConfig, types: list[str], sections: list[HfConfig]) -> tuple[LayerConfig, ...]:
    own_mlp = read_gemma_mlp(config)
    widening = 2 if config.flag("use_double_wide_mlp") else 1
    shared_mlp = replace(own_mlp, intermediate_size=own_mlp.intermediate_size * widening)
    owners = _cache_owners(config, types)
    return tuple(
        LayerConfig(
            mixer=_read_mixer(section, kind, owner),
            mlp=_beside(config, own_mlp if owner is None else shared_mlp),
            scaled=True,
        )
        for section, kind, owner in zip(sections, types, owners, strict=True)
    )


def _beside(config: HfConfig, dense: MlpConfig) -> MlpConfig | BesideConfig:
    """Add the mixture of experts to a layer's MLP, where the model has one (26B-A4B)."""
    if not config.flag("enable_moe_block"):
        return dense
    experts = read_experts(
        config, size_key="moe_intermediate_size", taken_key="top_k_experts", normalise=True, activation=dense.activation
    )
    return BesideConfig(dense=dense, experts=experts)


def _read_mixer(section: HfConfig, kind: str, owner: int | None) -> AttentionConfig:
    is_full = kind == FULL
    return read_attention(
        section,
        window=-1 if is_full else section.integer("sliding_window"),
        rope=kind,
        scale=1.0,
        qk_norm="head",
        value_norm=True,
        value_is_key=is_full and section.flag("attention_k_eq_v"),
        shares_cache_with=owner,
        **attention_biases(section),
    )


def _cache_owners(config: HfConfig, types: list[str]) -> list[int | None]:
    """Return whose cache each layer reads, None for its own.

    The last `num_kv_shared_layers` read that of the last layer of their type before them.

    Raises:
        CheckpointError: there is no such layer.
    """
    shared = _count(config, "num_kv_shared_layers")
    first = len(types) - shared
    last = {kind: index for index, kind in enumerate(types[: max(first, 0)])}
    missing = sorted(set(types[max(first, 0) :]) - set(last))
    if missing:
        raise CheckpointError(
            f"config.json: num_kv_shared_layers is {shared}, which leaves no {' and no '.join(missing)} layer of "
            f"{len(types)} with a cache of its own; lower it"
        )
    return [None if index < first else last[kind] for index, kind in enumerate(types)]


def _read_layer_inputs(config: HfConfig) -> LayerInputs | None:
    size, vocabulary = _count(config, "hidden_size_per_layer_input"), config.integer("vocab_size")
    if not size:
        return None
    rows = config.integer("vocab_size_per_layer_input")
    if rows < vocabulary:
        raise UnsupportedModelError(
            f"config.json: vocab_size_per_layer_input is {rows}; it must be at least vocab_size, {vocabulary}"
        )
    return LayerInputs(
        size=size, activation=config.activation("hidden_activation", "gelu_pytorch_tanh"), vocab_size=rows
    )


def _count(config: HfConfig, key: str) -> int:
    """Return a number that may be 0, or absent."""
    return config.integer(key) if config.get(key, 0) != 0 else 0


def sources(config: ModelConfig) -> Sources:
    """Map the names of norms, scalars and per-layer embeddings."""
    found = llama_sources(config, NORMS)
    for ours, theirs in MODEL_SOURCES.items():
        found[f"layer_inputs.{ours}.weight"] = Source(name=f"model.{theirs}.weight")
    for i in range(len(config.layers)):
        for ours, theirs in EXPERT_SOURCES.items():
            found[f"layers.{i}.mlp.{ours}"] = Source(name=f"model.layers.{i}.{theirs}")
        found[f"layers.{i}.scale"] = Source(name=f"model.layers.{i}.layer_scalar")
        for ours, theirs in LAYER_SOURCES.items():
            found[f"layers.{i}.{ours}.weight"] = Source(name=f"model.layers.{i}.{theirs}.weight")
    return found


def unread(config: ModelConfig) -> Sequence[str]:
    """Name what published checkpoints hold of keys and values of layers that read another layer's cache."""
    sharing = [i for i, layer in enumerate(config.layers) if layer.mixer.shares_cache_with is not None]
    return [f"layers.{i}.self_attn.{module}" for i in sharing for module in CACHE_WRITERS]


def _family(architecture: str, defaults: dict[str, Any], left_out: tuple[str, ...] = ()) -> Family:
    """Describe the text model of an architecture, or what an architecture without `left_out` is all of."""

    def text_config(config: HfConfig) -> HfConfig:
        return text_section(config, defaults) if left_out else HfConfig({**defaults, **config.keys})

    return Family(
        architecture=architecture,
        read=read,
        sources=sources,
        text_config=text_config,
        prefixes=PREFIXES if left_out else {},
        left_out=left_out,
        unread=unread,
    )


FAMILIES = (
    _family(ARCHITECTURE, DEFAULTS),
    _family("Gemma4UnifiedForCausalLM", UNIFIED_DEFAULTS),
    _family("Gemma4ForConditionalGeneration", DEFAULTS, ("vision_tower", "audio_tower", "embed_vision", "embed_audio")),
    _family(
        "Gemma4UnifiedForConditionalGeneration", UNIFIED_DEFAULTS, ("vision_embedder", "embed_vision", "embed_audio")
    ),
)

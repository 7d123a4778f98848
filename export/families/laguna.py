"""Laguna: gated attention with heads of their own in each layer, windows, and mixtures with a shared expert."""

from __future__ import annotations

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
    read_mlp,
)
from ortolan.export.families.experts import expert_sources, read_experts
from ortolan.export.families.layer_types import FULL, SLIDING, layer_types, read_mixtures
from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import build_rope, read_rope_spec
from ortolan.graphs.config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig

ARCHITECTURE = "LagunaForCausalLM"
ROPE_DEFAULTS: dict[str, Any] = {
    FULL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
PER_HEAD = {True: True, "per-head": True, "per-element": False}


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; all layers are full, and all but the first are mixtures, unless it lists their types.

    Raises:
        UnsupportedModelError: weights of experts multiply their inputs, or the gate is of another kind.
        CheckpointError: a list has another length than the model has layers.
    """
    if config.flag("moe_apply_router_weight_on_input"):
        raise UnsupportedModelError("config.json: moe_apply_router_weight_on_input is true; supported: false")
    ropes = config.get("rope_parameters", ROPE_DEFAULTS)
    config = HfConfig({"head_dim": 128, **config.keys, "rope_parameters": ropes})
    count = config.integer("num_hidden_layers")
    types = layer_types(config, [FULL] * count)
    are_mixtures = read_mixtures(config, [i > 0 for i in range(count)])
    layers = tuple(
        LayerConfig(
            mixer=_read_mixer(config, kind, heads), mlp=_read_experts(config) if is_mixture else read_mlp(config)
        )
        for kind, heads, is_mixture in zip(types, _heads(config, count), are_mixtures, strict=True)
    )
    specs = {kind: read_rope_spec(config, 10_000.0, kind, partial=True) for kind in dict.fromkeys(types)}
    return read_common(
        config, ARCHITECTURE, layers, tuple(build_rope(kind, spec, max_context) for kind, spec in specs.items())
    )


def _heads(config: HfConfig, count: int) -> list[int]:
    """Return the number of query heads of each layer."""
    heads = config.sequence("num_attention_heads_per_layer", int, [config.integer("num_attention_heads")] * count)
    if len(heads) != count:
        raise CheckpointError(
            f"config.json: num_attention_heads_per_layer lists {len(heads)} layers, num_hidden_layers is {count}"
        )
    return heads


def _read_mixer(config: HfConfig, kind: str, heads: int) -> AttentionConfig:
    gating = config.get("gating", True)
    if not isinstance(gating, bool | str) or gating not in PER_HEAD:
        raise UnsupportedModelError(f'config.json: gating is {gating!r}; supported: true, "per-head" and "per-element"')
    section = HfConfig({**config.keys, "num_attention_heads": heads})
    return read_attention(
        section,
        window=-1 if kind == FULL else config.integer("sliding_window", 512),
        rope=kind,
        qk_norm="head",
        output_gate="softplus",
        gate_per_head=PER_HEAD[gating],
        **attention_biases(config),
    )


def _read_experts(config: HfConfig) -> ExpertsConfig:
    return read_experts(
        config,
        size_key="moe_intermediate_size",
        default_count=256,
        default_taken=8,
        scoring="sigmoid",
        normalise=True,
        scale=config.number("moe_routed_scaling_factor", 1.0),
        logit_softcap=max(config.number("moe_router_logit_softcapping", 0.0), 0.0),
        selection_bias=True,
        shared_size=config.integer("shared_expert_intermediate_size", 512),
    )


def sources(config: ModelConfig) -> Sources:
    """Map gates, experts, their bias, and the shared expert; transformers 5 calls the last two otherwise."""
    result = llama_sources(config)
    for index, layer in enumerate(config.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        result[f"{ours}.attention.gate.weight"] = Source(name=f"{theirs}.self_attn.g_proj.weight")
        if not isinstance(layer.mlp, ExpertsConfig):
            continue
        result |= expert_sources(index, layer.mlp, names=("gate_proj", "up_proj", "down_proj"))
        result[f"{ours}.mlp.router.selection_bias"] = Source(
            name=f"{theirs}.mlp.gate.e_score_correction_bias",
            parts=(f"{theirs}.mlp.experts.e_score_correction_bias",),
        )
        for name in ("gate", "up", "down"):
            result[f"{ours}.mlp.shared.{name}.weight"] = Source(
                name=f"{theirs}.mlp.shared_experts.{name}_proj.weight",
                parts=(f"{theirs}.mlp.shared_expert.{name}_proj.weight",),
            )
    return result


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

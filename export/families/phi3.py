"""Phi-3 and Phi-4-mini: Llama with fused projections, longrope, partial rotation and an optional window."""

from __future__ import annotations

from ortolan.export.families.base import (
    Family,
    Source,
    Sources,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    read_mlp,
    same_layers,
)
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "Phi3ForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; longrope's short factors serve up to 4096 tokens unless it says otherwise."""
    config = HfConfig({"original_max_position_embeddings": 4096, **config.keys})
    window = config.get("sliding_window")
    window = -1 if window is None else config.integer("sliding_window")
    layers = same_layers(config, read_attention(config, window=window), read_mlp(config))
    epsilon = config.number("rms_norm_eps", 1e-5)
    ropes = one_rope(config, max_context, partial=True)
    return read_common(config, ARCHITECTURE, layers, ropes, norm_epsilon=epsilon)


def sources(config: ModelConfig) -> Sources:
    """Cut query, key and value out of qkv_proj, gate and up out of gate_up_proj."""
    result = llama_sources(config)
    for i, layer in enumerate(config.layers):
        mixer, inner = layer.mixer, layer.mlp.intermediate_size
        query, key = mixer.num_heads * mixer.head_size, mixer.num_kv_heads * mixer.head_size
        cuts = {
            "attention.query": ("self_attn.qkv_proj", (0, query)),
            "attention.key": ("self_attn.qkv_proj", (query, query + key)),
            "attention.value": ("self_attn.qkv_proj", (query + key, query + 2 * key)),
            "mlp.gate": ("mlp.gate_up_proj", (0, inner)),
            "mlp.up": ("mlp.gate_up_proj", (inner, 2 * inner)),
        }
        for ours, (theirs, rows) in cuts.items():
            result[f"layers.{i}.{ours}.weight"] = Source(name=f"model.layers.{i}.{theirs}.weight", rows=rows)
    return result


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

"""Mellum 2: Qwen 3 MoE whose layers have windows, mixtures and ropes one by one."""

from __future__ import annotations

from ortolan.export.families import qwen3_moe
from ortolan.export.families.base import Family, attention_biases, read_attention, read_common, read_mlp
from ortolan.export.families.experts import read_experts
from ortolan.export.families.layer_types import FULL, SLIDING, read_layer_types, read_mixtures
from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import build_rope, read_rope_spec
from ortolan.graphs.config import LayerConfig, ModelConfig

ARCHITECTURE = "MellumForCausalLM"
THETAS = {FULL: 500_000.0, SLIDING: 10_000.0}


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; all layers are full, and mixtures, unless it lists their types."""
    config = HfConfig({"head_dim": 128, **config.keys})
    count = config.integer("num_hidden_layers")
    windows = read_layer_types(config, [FULL] * count, config.integer("sliding_window", 1024))
    kinds = {w: FULL if w < 0 else SLIDING for w in windows}
    ropes = [
        build_rope(kind, read_rope_spec(config, THETAS[kind], kind), max_context)
        for kind in dict.fromkeys(kinds.values())
    ]
    experts = read_experts(
        config,
        size_key="moe_intermediate_size",
        default_count=64,
        default_taken=8,
        normalise=config.flag("norm_topk_prob", True),
    )
    layers = tuple(
        LayerConfig(
            mixer=read_attention(config, qk_norm="head", window=w, rope=kinds[w], **attention_biases(config)),
            mlp=experts if is_mixture else read_mlp(config),
        )
        for w, is_mixture in zip(windows, read_mixtures(config, [True] * count), strict=True)
    )
    return read_common(config, ARCHITECTURE, layers, tuple(ropes))


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=qwen3_moe.sources)

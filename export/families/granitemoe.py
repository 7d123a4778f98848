"""Granite MoE: a mixture of experts in every layer, and factors of embeddings, attention, residuals and logits."""

from __future__ import annotations

from ortolan.export.families.base import (
    Family,
    Source,
    Sources,
    llama_sources,
    one_rope,
    read_common,
    same_layers,
)
from ortolan.export.families.experts import read_experts
from ortolan.export.families.granite import granite_factors, read_granite_attention
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "GraniteMoeForCausalLM"

# What the published checkpoints call the tensors, and what transformers 5 calls them.
_NAMES = {
    "router.weight": ("router.layer.weight", "router.weight"),
    "experts.gate_up": ("input_linear.weight", "experts.gate_up_proj"),
    "experts.down": ("output_linear.weight", "experts.down_proj"),
}


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json."""
    # The softmax of the chosen logits is that of all, divided by the sum of the chosen.
    experts = read_experts(config, default_count=8, default_taken=2, normalise=True)
    return read_common(
        config,
        ARCHITECTURE,
        same_layers(config, read_granite_attention(config), experts),
        one_rope(config, max_context),
        **granite_factors(config),
    )


def sources(config: ModelConfig) -> Sources:
    """Map the tensors of all experts."""
    result = llama_sources(config)
    for index in range(len(config.layers)):
        module = f"model.layers.{index}.block_sparse_moe"
        for ours, (published, fused) in _NAMES.items():
            result[f"layers.{index}.mlp.{ours}"] = Source(name=f"{module}.{fused}", parts=(f"{module}.{published}",))
    return result


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

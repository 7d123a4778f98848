"""Granite MoE SWA: the attention of Granite SWA, and a mixture in every layer, maybe with a shared expert."""

from __future__ import annotations

from ortolan.export.families import granitemoe
from ortolan.export.families.base import Family, Source, Sources, layers_of, read_common
from ortolan.export.families.experts import read_experts
from ortolan.export.families.granite import granite_factors
from ortolan.export.families.granite_swa import read_layers
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "GraniteMoeSWAForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json."""
    shared = config.integer("shared_intermediate_size") if config.get("shared_intermediate_size", 0) != 0 else 0
    mixers, ropes = read_layers(config, max_context)
    experts = read_experts(config, default_count=8, default_taken=2, normalise=True, shared_size=shared)
    return read_common(config, ARCHITECTURE, layers_of(mixers, experts), ropes, **granite_factors(config))


def sources(config: ModelConfig) -> Sources:
    """Cut gate and up of shared experts out of one tensor."""
    found = granitemoe.sources(config)
    for index, layer in enumerate(config.layers):
        ours, theirs, size = f"layers.{index}.mlp.shared", f"model.layers.{index}.shared_mlp", layer.mlp.shared_size
        found |= {
            f"{ours}.gate.weight": Source(name=f"{theirs}.input_linear.weight", rows=(0, size)),
            f"{ours}.up.weight": Source(name=f"{theirs}.input_linear.weight", rows=(size, 2 * size)),
            f"{ours}.down.weight": Source(name=f"{theirs}.output_linear.weight"),
        }
    return found


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

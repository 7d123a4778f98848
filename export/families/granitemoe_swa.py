"""Granite MoE SWA: the attention of Granite SWA, and a mixture of experts in every layer."""

from __future__ import annotations

from ortolan.errors import UnsupportedModelError
from ortolan.export.families import granitemoe
from ortolan.export.families.base import Family, layers_of, read_common
from ortolan.export.families.experts import read_experts
from ortolan.export.families.granite import granite_factors
from ortolan.export.families.granite_swa import read_layers
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "GraniteMoeSWAForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json.

    Raises:
        UnsupportedModelError: it has a shared expert.
    """
    if config.get("shared_intermediate_size", 0) != 0:
        raise UnsupportedModelError(
            f"config.json: shared_intermediate_size is {config.get('shared_intermediate_size')!r}; supported: 0, a "
            "mixture without a shared expert"
        )
    mixers, ropes = read_layers(config, max_context)
    experts = read_experts(config, default_count=8, default_taken=2, normalise=True)
    return read_common(config, ARCHITECTURE, layers_of(mixers, experts), ropes, **granite_factors(config))


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=granitemoe.sources)

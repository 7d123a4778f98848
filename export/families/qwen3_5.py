"""Qwen 3.5 (text), dense and with mixtures: Qwen3-Next with projections apart; what reads images is left out."""

from __future__ import annotations

from collections.abc import Callable

from ortolan.export.families.base import Family, Source, Sources
from ortolan.export.families.gemma3_vision import PREFIXES, text_section
from ortolan.export.families.qwen3_next import hybrid_sources, read_hybrid
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import GatedDeltaConfig, ModelConfig

DENSE, MIXTURE = "Qwen3_5", "Qwen3_5Moe"


def reader(architecture: str, *, mixtures: bool) -> Callable[[HfConfig, int], ModelConfig]:
    """Return what reads config.json: all MLPs of a model are dense, or all are mixtures."""

    def read(config: HfConfig, max_context: int) -> ModelConfig:
        every = [mixtures] * config.integer("num_hidden_layers")
        return read_hybrid(config, max_context, architecture, every, normalise=True)

    return read


def sources(config: ModelConfig) -> Sources:
    """Map the weights."""

    def delta(ours: str, theirs: str, mixer: GatedDeltaConfig) -> Sources:
        names = {"qkv": "in_proj_qkv", "gate": "in_proj_z", "beta": "in_proj_b", "decay": "in_proj_a"}
        return {f"{ours}.{mine}.weight": Source(name=f"{theirs}.{name}.weight") for mine, name in names.items()}

    return hybrid_sources(config, delta)


def _family(name: str, suffix: str) -> Family:
    architecture, has_images = f"{name}For{suffix}", suffix == "ConditionalGeneration"
    return Family(
        architecture=architecture,
        read=reader(architecture, mixtures=name == MIXTURE),
        sources=sources,
        text_config=(lambda config: text_section(config, {})) if has_images else (lambda config: config),
        prefixes=PREFIXES if has_images else {},
        left_out=("visual",) if has_images else (),
    )


FAMILIES = tuple(_family(name, suffix) for name in (DENSE, MIXTURE) for suffix in ("CausalLM", "ConditionalGeneration"))

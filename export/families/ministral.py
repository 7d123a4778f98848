"""Ministral: Mistral by another name, which its config has where layers differ in their windows."""

from __future__ import annotations

from dataclasses import replace

from ortolan.export.families import mistral
from ortolan.export.families.base import Family, llama_sources
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "MinistralForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json, as Mistral's is read."""
    return replace(mistral.read(config, max_context), architecture=ARCHITECTURE)


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=llama_sources)

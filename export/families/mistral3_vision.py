"""Mistral 3 and Ministral 3 with images: the text decoder is that of Mistral or Ministral 3; the rest is left out."""

from __future__ import annotations

from typing import Any

from ortolan.errors import UnsupportedModelError
from ortolan.export.families import ministral3, mistral
from ortolan.export.families.base import Family, llama_sources
from ortolan.export.families.gemma3_vision import PREFIXES, text_section
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "Mistral3ForConditionalGeneration"
_SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# What transformers' MistralConfig and Ministral3Config say where a checkpoint says nothing.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {**_SIZES, "vocab_size": 32000, "num_hidden_layers": 32, "max_position_embeddings": 131072},
    "ministral3": {**_SIZES, "vocab_size": 131072, "num_hidden_layers": 34, "max_position_embeddings": 262144},
}
READERS = {"mistral": mistral.read, "ministral3": ministral3.read}


def text_config(config: HfConfig) -> HfConfig:
    """Return the keys of the text decoder.

    Raises:
        UnsupportedModelError: it is of another type than `READERS` has.
    """
    kind = config.section("text_config").get("model_type", "mistral")
    if kind not in READERS:
        raise UnsupportedModelError(f"config.json: text_config.model_type is {kind!r}; supported: {', '.join(READERS)}")
    return text_section(config, {"model_type": kind, **DEFAULTS[kind]})


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read the text decoder's config, as its own family does."""
    return READERS[config.get("model_type")](config, max_context)


FAMILY = Family(
    architecture=ARCHITECTURE,
    read=read,
    sources=llama_sources,
    text_config=text_config,
    prefixes=PREFIXES,
    left_out=("vision_tower", "multi_modal_projector"),
)

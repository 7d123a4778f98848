"""Gemma 3 with images: the text decoder is that of Gemma 3 (text); what reads images is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortolan.export.families import gemma3
from ortolan.export.families.base import Family
from ortolan.export.hf_config import HfConfig

ARCHITECTURE = "Gemma3ForConditionalGeneration"
# Published checkpoints name only what differs from these, the defaults of transformers' Gemma3TextConfig.
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# What transformers 5 writes, and what it calls the modules.
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


def text_config(config: HfConfig) -> HfConfig:
    """Return the keys of the text decoder."""
    return text_section(config, TEXT_DEFAULTS)


def text_section(config: HfConfig, defaults: Mapping[str, Any]) -> HfConfig:
    """Return the keys of `text_config`, and defaults; texts end at the end tokens of the whole model, too."""
    keys = {**defaults, **config.section("text_config").keys}
    ends = dict.fromkeys((*config.eos_token_ids, *HfConfig(keys).eos_token_ids))
    tied = config.get("tie_word_embeddings")
    return HfConfig({**keys, "eos_token_id": list(ends), **({} if tied is None else {"tie_word_embeddings": tied})})


FAMILY = Family(
    architecture=ARCHITECTURE,
    read=gemma3.read,
    sources=gemma3.FAMILY.sources,
    text_config=text_config,
    prefixes=PREFIXES,
    left_out=("vision_tower", "multi_modal_projector"),
)

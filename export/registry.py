"""Finds the family of a checkpoint by the architecture that its config names."""

from __future__ import annotations

from ortolan.errors import UnsupportedModelError
from ortolan.export.families import (
    gemma2,
    gemma3,
    gemma3_vision,
    gemma4,
    gpt_oss,
    granitemoe,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from ortolan.export.families.base import Family
from ortolan.export.hf_config import HfConfig

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY
    for module in (
        *(gemma2, gemma3, gemma3_vision, gpt_oss, granitemoe, llama, mistral, mixtral, olmo2),
        *(olmo3, olmoe, phi3, qwen2, qwen3, qwen3_moe, smollm3),
    )
} | {family.architecture: family for family in gemma4.FAMILIES}

# What onnxruntime-genai's model builder writes in a form that is converted, as far as it was tried.
CONVERTIBLE = frozenset(
    {
        "Ernie4_5ForCausalLM",
        "GemmaForCausalLM",
        "GraniteForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "NemotronForCausalLM",
        "OlmoForCausalLM",
        "PhiForCausalLM",
    }
)


def find_family(config: HfConfig) -> Family:
    """Return the family of the first architecture that the config lists.

    Raises:
        UnsupportedModelError: there is none.
    """
    names = config.sequence("architectures", str, [])
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    if any(name in CONVERTIBLE for name in names):
        advice = (
            "onnxruntime-genai's model builder exports it, and `ortolan convert` makes a model folder of that: see "
            "docs/convert.md"
        )
    else:
        advice = f"supported: {', '.join(sorted(FAMILIES))}"
    raise UnsupportedModelError(
        f"`ortolan export` does not support architecture {', '.join(names) or 'none'}; {advice}"
    )

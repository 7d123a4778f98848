"""Finds the family of a checkpoint by the architecture that its config names."""

from __future__ import annotations

from ortolan.errors import UnsupportedModelError
from ortolan.export.families import (
    cohere2,
    exaone4,
    gemma2,
    gemma3,
    gemma3_vision,
    gemma4,
    gpt_oss,
    granite,
    granite_swa,
    granitemoe,
    granitemoe_swa,
    laguna,
    llama,
    mellum,
    mimo_v2_flash,
    ministral,
    ministral3,
    mistral,
    mistral3_vision,
    mixtral,
    muse_glimmer,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from ortolan.export.families.base import Family
from ortolan.export.hf_config import HfConfig

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY
    for module in (
        *(cohere2, exaone4, gemma2, gemma3, gemma3_vision, gpt_oss, granite, granite_swa, granitemoe, granitemoe_swa),
        *(laguna, llama, mellum, mimo_v2_flash, ministral, ministral3, mistral, mistral3_vision, mixtral, muse_glimmer),
        *(olmo2, olmo3, olmo_hybrid, olmoe, phi3, qwen2, qwen3, qwen3_moe, qwen3_next, smollm3),
    )
} | {family.architecture: family for family in (*gemma4.FAMILIES, *qwen3_5.FAMILIES)}

# What onnxruntime-genai's model builder writes in a form that is converted, as far as it was tried.
CONVERTIBLE = frozenset(
    {
        "Ernie4_5ForCausalLM",
        "GemmaForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "NemotronForCausalLM",
        "OlmoForCausalLM",
        "PhiForCausalLM",
    }
)

# What a family would need that Ortolan does not have, with the keys of config.json that say so.
_GEMMA3N = "its layers keep several hidden states (altup_num_inputs) and have low-rank branches (laurel_rank)"
_MAMBA2 = "it has Mamba-2 layers (mamba_n_heads, mamba_num_heads or layer_types), whose recurrence is not implemented"
REFUSED = {
    "BambaForCausalLM": _MAMBA2,
    "FalconH1ForCausalLM": _MAMBA2,
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": _GEMMA3N,
    "GraniteMoeHybridForCausalLM": _MAMBA2,
    "Mamba2ForCausalLM": _MAMBA2,
    "NemotronHForCausalLM": _MAMBA2,
}


def find_family(config: HfConfig) -> Family:
    """Return the family of the first architecture that the config lists.

    Raises:
        UnsupportedModelError: there is none.
    """
    names = config.sequence("architectures", str, [])
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    for name in names:
        if name in REFUSED:
            raise UnsupportedModelError(f"`ortolan export` does not support architecture {name}: {REFUSED[name]}")
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

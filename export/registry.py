"""Finds the family of a checkpoint by the architecture that its config names."""

from __future__ import annotations

import difflib

from ortolan.errors import UnsupportedModelError
from ortolan.export.families import (
    gemma2,
    gemma3,
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
        *(gemma2, gemma3, gpt_oss, granitemoe, llama, mistral, mixtral, olmo2),
        *(olmo3, olmoe, phi3, qwen2, qwen3, qwen3_moe, smollm3),
    )
}


def find_family(config: HfConfig) -> Family:
    """Return the family of the first architecture that the config lists.

    Raises:
        UnsupportedModelError: there is none, or the weights are quantized.
    """
    names = config.sequence("architectures", str, [])
    supported = ", ".join(sorted(FAMILIES))
    if config.get("quantization_config"):
        raise UnsupportedModelError("the checkpoint is quantized (quantization_config); give the unquantized one")
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    close = difflib.get_close_matches(names[0], FAMILIES, n=1) if names else []
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UnsupportedModelError(f"architecture {names or 'none'} is not supported; supported: {supported}{hint}")

"""EXAONE 4: norms after attention and MLP, an RMSNorm on each head, and no RoPE in the full layers between windows."""

from __future__ import annotations

from ortolan.export.families.base import (
    Family,
    layers_of,
    one_rope,
    read_attention,
    read_common,
    read_mlp,
)
from ortolan.export.families.layer_types import FULL, SLIDING, read_layer_types
from ortolan.export.families.olmo2 import sources
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "Exaone4ForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; an absent `sliding_window` means 4096, null means none, and RoPE in every layer."""
    window = config.integer("sliding_window", 4096) if config.keys.get("sliding_window", 4096) is not None else None
    windows = read_layer_types(config, _default_types(config, window), window)
    mixers = [
        read_attention(config, qk_norm="head", window=each, rope="all" if window is None or each > 0 else None)
        for each in windows
    ]
    return read_common(
        config,
        ARCHITECTURE,
        layers_of(mixers, read_mlp(config)),
        one_rope(config, max_context),
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
        norm_placement="post",
    )


def _default_types(config: HfConfig, window: int | None) -> list[str]:
    """Return the types of layers of a config that does not list them."""
    count = config.integer("num_hidden_layers")
    if config.get("layer_types") is not None or window is None:
        return [FULL] * count
    pattern = config.integer("sliding_window_pattern", 4)
    return [SLIDING if (i + 1) % pattern else FULL for i in range(count)]


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

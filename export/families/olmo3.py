"""OLMo 3: OLMo 2 with a sliding window in three of four layers; RoPE scaling in the full ones only."""

from __future__ import annotations

from ortolan.export.families.base import Family, layers_of, read_common, read_mlp
from ortolan.export.families.layer_types import FULL, SLIDING, read_layer_types
from ortolan.export.families.olmo2 import read_olmo_attention, sources
from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import build_rope, read_rope_spec
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "Olmo3ForCausalLM"
DEFAULT_THETA = 500_000.0


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; in transformers 4's spelling both ropes share `rope_theta`."""
    count = config.integer("num_hidden_layers")
    default = [SLIDING if (i + 1) % 4 else FULL for i in range(count)]
    windows = read_layer_types(config, default, config.integer("sliding_window", 4096))
    theta = config.positive("rope_theta", DEFAULT_THETA)
    ropes = (
        build_rope("full", read_rope_spec(config, theta, FULL), max_context),
        build_rope("sliding", read_rope_spec(config, theta, SLIDING), max_context),
    )
    mixers = [read_olmo_attention(config, window=w, rope="full" if w < 0 else "sliding") for w in windows]
    return read_common(
        config,
        ARCHITECTURE,
        layers_of(mixers, read_mlp(config)),
        ropes,
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
        norm_placement="post",
    )


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources)

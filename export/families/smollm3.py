"""SmolLM 3: Llama whose every fourth layer has no position encoding."""

from __future__ import annotations

from ortolan.errors import CheckpointError
from ortolan.export.families.base import (
    Family,
    attention_biases,
    layers_of,
    llama_sources,
    one_rope,
    read_attention,
    read_common,
    read_mlp,
)
from ortolan.export.families.layer_types import FULL, SLIDING, read_layer_types
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ModelConfig

ARCHITECTURE = "SmolLM3ForCausalLM"


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; where layers slide, it is those without rope unless `layer_types` says otherwise."""
    count, interval = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    has_rope = config.sequence("no_rope_layers", int, [int((i + 1) % interval != 0) for i in range(count)])
    if len(has_rope) != count:
        raise CheckpointError(f"config.json: no_rope_layers lists {len(has_rope)} layers of {count}")
    slides = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    window = config.integer("sliding_window") if slides else None
    default = [SLIDING if slides and not rope else FULL for rope in has_rope]
    # The modelling code ignores a layer's type where use_sliding_window is off.
    windows = read_layer_types(config, default, window) if slides else [-1] * count
    biases = attention_biases(config)
    mixers = [
        read_attention(config, window=w, rope="all" if rope else None, **biases)
        for w, rope in zip(windows, has_rope, strict=True)
    ]
    return read_common(
        config,
        ARCHITECTURE,
        layers_of(mixers, read_mlp(config, bias=config.flag("mlp_bias"))),
        one_rope(config, max_context, default_theta=2_000_000.0),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=llama_sources)

"""MiMo-V2-Flash: windows with learned sinks in five of six layers, mixtures, and values of smaller heads than keys.

A cache has one head size, so values are padded by zeros up to the size of keys, and the output projection ignores
what is behind them: the same sums. The scale of values is multiplied into their projection.

Source: transformers' modeling_mimo_v2_flash.py, and the keys of the published checkpoint's config.json.
"""

from __future__ import annotations

from dataclasses import replace

from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.export.families.base import (
    Family,
    Source,
    Sources,
    llama_sources,
    read_attention,
    read_common,
    read_mlp,
)
from ortolan.export.families.experts import expert_sources, read_experts
from ortolan.export.families.layer_types import DENSE, FULL, SLIDING, SPARSE, layer_types, read_mixtures
from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import build_rope, read_rope_spec
from ortolan.graphs.config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig

ARCHITECTURE = "MiMoV2FlashForCausalLM"
THETAS = {FULL: ("rope_theta", 5_000_000.0), SLIDING: ("swa_rope_theta", 10_000.0)}  # as published, and by default
ROTARY_SHARE, VALUE_SIZE, VALUE_SCALE = 0.334, 128, 0.707
_ALIKE = (  # keys of windowed layers that are read from those of the others
    ("swa_head_dim", "head_dim"),
    ("swa_v_head_dim", "v_head_dim"),
    ("swa_num_attention_heads", "num_attention_heads"),
)


def read(config: HfConfig, max_context: int) -> ModelConfig:
    """Read config.json; where it lists no types, every sixth layer and the first are full, and only that one is dense.

    Raises:
        UnsupportedModelError: experts are chosen by groups, windowed layers have heads of another size, or full ones
            sinks.
        CheckpointError: a list has another length than the model has layers, or values are larger than keys.
    """
    count = config.integer("num_hidden_layers")
    config = HfConfig({"head_dim": 192, "partial_rotary_factor": ROTARY_SHARE, **config.keys, **_lists(config)})
    _refuse(config)
    types = layer_types(config, [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(count)])
    are_mixtures = read_mixtures(config, [i > 0 for i in range(count)])
    layers = tuple(
        LayerConfig(mixer=_read_mixer(config, kind), mlp=_read_experts(config) if is_mixture else read_mlp(config))
        for kind, is_mixture in zip(types, are_mixtures, strict=True)
    )
    ropes = tuple(
        build_rope(kind, read_rope_spec(_with_ropes(config), THETAS[kind][1], kind, partial=True), max_context)
        for kind in dict.fromkeys(types)
    )
    epsilon = config.number("rms_norm_eps", config.number("layernorm_epsilon", 1e-5))
    return read_common(config, ARCHITECTURE, layers, ropes, norm_epsilon=epsilon)


def _lists(config: HfConfig) -> dict[str, list[str]]:
    """Return the lists of types that the published config has as ones and zeros."""
    found = {}
    for published, key, names in (
        ("hybrid_layer_pattern", "layer_types", (FULL, SLIDING)),
        ("moe_layer_freq", "mlp_layer_types", (DENSE, SPARSE)),
    ):
        if config.get(key) is None and config.get(published) is not None:
            found[key] = [names[bool(each)] for each in config.sequence(published, int, [])]
    return found


def _with_ropes(config: HfConfig) -> HfConfig:
    """Return the config with the keys of each type's rope, as transformers writes them."""
    if config.get("rope_parameters") is not None:
        return config
    ropes = {kind: {"rope_theta": config.number(key, theta)} for kind, (key, theta) in THETAS.items()}
    return HfConfig({**config.keys, "rope_parameters": ropes})


def _refuse(config: HfConfig) -> None:
    groups = config.integer("n_group", 1)
    if groups > 1 and config.integer("topk_group", 1) < groups:
        raise UnsupportedModelError(f"config.json: n_group is {groups}, with a smaller topk_group; supported: 1")
    if config.flag("add_full_attention_sink_bias"):
        raise UnsupportedModelError("config.json: add_full_attention_sink_bias is true; supported: false")
    for key, whole in _ALIKE:
        if config.get(key) is not None and config.get(key) != config.get(whole):
            raise UnsupportedModelError(
                f"config.json: {key} is {config.get(key)!r}, {whole} {config.get(whole)!r}; supported: both alike"
            )
    if _value_size(config) > config.head_size:
        raise CheckpointError(
            f"config.json: v_head_dim is {_value_size(config)}; expected head_dim {config.head_size} at most"
        )


def _value_size(config: HfConfig) -> int:
    return config.integer("v_head_dim", VALUE_SIZE)


def _window(config: HfConfig) -> int:
    """Return how many keys a query sees, itself included; `sliding_window_size` does not count it."""
    before = config.get("sliding_window_size")
    return config.integer("sliding_window", 129) if before is None else config.integer("sliding_window_size") + 1


def _read_mixer(config: HfConfig, kind: str) -> AttentionConfig:
    """Read the attention of a layer; windowed ones have twice the kv heads where the config does not say."""
    is_unscaled = config.keys.get("attention_value_scale", VALUE_SCALE) is None
    is_full, heads, bias = kind == FULL, config.integer("num_key_value_heads"), config.flag("attention_bias")
    return read_attention(
        config,
        num_kv_heads=heads if is_full else config.integer("swa_num_key_value_heads", 2 * heads),
        window=-1 if is_full else _window(config),
        rope=kind,
        learned_sinks=not is_full and config.flag("add_swa_attention_sink_bias", True),
        value_size=_value_size(config),
        value_scale=1.0 if is_unscaled else config.number("attention_value_scale", VALUE_SCALE),
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
    )


def _read_experts(config: HfConfig) -> ExpertsConfig:
    """Read a mixture."""
    count = config.integer("n_routed_experts", 256)
    return read_experts(
        HfConfig({**config.keys, "num_local_experts": count}),
        size_key="moe_intermediate_size",
        default_taken=8,
        scoring="sigmoid",
        normalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        selection_bias=True,
    )


def sources(config: ModelConfig) -> Sources:
    """Map experts and their bias, sinks as published, and values, whose heads are padded."""
    result = llama_sources(config)
    for index, layer in enumerate(config.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        sinks = result[f"{ours}.attention.sink_logits"]
        result[f"{ours}.attention.sink_logits"] = replace(sinks, parts=(f"{theirs}.self_attn.attention_sink_bias",))
        assert isinstance(layer.mixer, AttentionConfig), "this family has attention alone"
        heads = (layer.mixer.value_size, layer.mixer.head_size)
        for name in ("weight", "bias"):
            key = f"{ours}.attention.value.{name}"
            result[key] = replace(result[key], padded_rows=heads, factor=layer.mixer.value_scale)
        key = f"{ours}.attention.output.weight"
        result[key] = replace(result[key], padded_columns=heads)
        if isinstance(layer.mlp, ExpertsConfig):
            result |= expert_sources(index, layer.mlp, names=("gate_proj", "up_proj", "down_proj"))
            bias = Source(name=f"{theirs}.mlp.gate.e_score_correction_bias")
            result[f"{ours}.mlp.router.selection_bias"] = bias
    return result


FAMILY = Family(architecture=ARCHITECTURE, read=read, sources=sources, unread=lambda config: ("mtp",))

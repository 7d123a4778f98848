"""Frequencies of every RoPE type, in both spellings, are transformers'."""

import copy

import numpy as np
import pytest
import torch
from tolerances import FREQUENCIES_RELATIVE
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.export.hf_config import HfConfig
from ortolan.export.rope import build_rope, read_rope_spec, share_limits

BASE = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
FACTORS = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
TYPES = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_scaled": {
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "beta_fast": 16.0,
    },
    "dynamic": {"factor": 2.0},
    "proportional": {"partial_rotary_factor": 0.3, "factor": 4.0},
    "longrope": {**FACTORS, "original_max_position_embeddings": 128},
}
YARN = TYPES["yarn"] | {"rope_type": "yarn"}


def transformers_frequencies(kind, parameters, length):
    config = LlamaConfig(**BASE, rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **parameters})
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    return frequencies.numpy(), factor


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "old_type_key"])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("length", [100, 2000])
def test_frequencies(name, spelling, length):
    kind = name.split("_")[0]
    parameters = TYPES[name]
    if spelling == "rope_parameters":
        keys = {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **parameters}}
    else:
        key = "rope_type" if spelling == "rope_scaling" else "type"
        keys = {"rope_theta": 5000.0, "rope_scaling": {key: kind, **parameters}}
    rope = build_rope("all", read_rope_spec(HfConfig(BASE | keys), 10_000.0), max_context=2000)
    variant = next(v for v in rope.variants if v.limit >= length)
    expected, factor = transformers_frequencies(kind, parameters, length)
    np.testing.assert_allclose(variant.inv_freq, expected, rtol=FREQUENCIES_RELATIVE)
    assert variant.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}, "rope_theta": 5000.0},
        {"rope_scaling": {}, "rope_parameters": {**YARN, "rope_theta": 5000.0}},
        {"rope_parameters": {**YARN, "rope_theta": 5000.0}, "original_max_position_embeddings": 32},
        {"rope_scaling": YARN, "original_max_position_embeddings": 32},
    ],
    ids=["rope_scaling", "its_own_theta", "empty", "outer_length", "outer_length_of_rope_scaling"],
)
def test_of_two_spellings_the_one_wins_that_wins_in_transformers(keys):
    config = LlamaConfig(**BASE, **copy.deepcopy(keys))
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    variant = build_rope("all", read_rope_spec(HfConfig(BASE | keys), 10_000.0), max_context=256).variants[0]
    np.testing.assert_allclose(variant.inv_freq, expected.numpy(), rtol=FREQUENCIES_RELATIVE)
    assert variant.attention_factor == pytest.approx(factor)


def test_rope_scaling_is_added_to_the_ropes_of_full_layers():
    ropes = {"full_attention": {"rope_theta": 5000.0}, "sliding_attention": {"rope_theta": 500.0}}
    keys = BASE | {"rope_parameters": ropes, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    specs = [read_rope_spec(HfConfig(keys), 1e4, kind) for kind in ropes]
    assert [(spec.rope_type, spec.theta) for spec in specs] == [("linear", 5000.0), ("default", 500.0)]


def test_default_rope_and_partial_rotation():
    spec = read_rope_spec(HfConfig(BASE | {"partial_rotary_factor": 0.5}), 10_000.0, partial=True)
    rope = build_rope("all", spec, 512)
    assert rope.rotary_size == 8
    np.testing.assert_allclose(
        rope.variants[0].inv_freq, 10_000.0 ** (-np.arange(0, 8, 2) / 8), rtol=FREQUENCIES_RELATIVE
    )


def test_families_that_turn_whole_heads_read_no_share():
    keys = BASE | {"partial_rotary_factor": 0.5}
    assert read_rope_spec(HfConfig(keys), 10_000.0).rotary_size == read_rope_spec(HfConfig(BASE), 10_000.0).rotary_size
    scaled = HfConfig(keys | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        read_rope_spec(scaled, 10_000.0)


def test_short_contexts_need_one_variant_and_ropes_share_limits():
    config = HfConfig(BASE | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **TYPES["longrope"]}})
    assert len(build_rope("all", read_rope_spec(config, 1e4), 128).variants) == 1
    long = build_rope("long", read_rope_spec(config, 1e4), 512)
    plain = build_rope("plain", read_rope_spec(HfConfig(BASE), 1e4), 512)
    shared = share_limits((long, plain))
    assert [[v.limit for v in rope.variants] for rope in shared] == [[128, 512]] * 2
    assert shared[1].variants[0].inv_freq == shared[1].variants[1].inv_freq


def test_unknown_types_and_missing_numbers_are_refused():
    with pytest.raises(UnsupportedModelError, match="supported: default, linear"):
        read_rope_spec(HfConfig(BASE | {"rope_scaling": {"rope_type": "spiral"}}), 1e4)
    with pytest.raises(CheckpointError, match="factor"):
        build_rope("all", read_rope_spec(HfConfig(BASE | {"rope_scaling": {"rope_type": "linear"}}), 1e4), 64)
    broken = {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0]}}
    spec = read_rope_spec(HfConfig(BASE | broken), 1e4)
    with pytest.raises(CheckpointError, match="long"):
        build_rope("all", spec, 512)

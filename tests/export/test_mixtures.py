"""Mixtures of experts in checkpoints: how their tensors are named and stacked, and what is refused."""

import numpy as np
import pytest
from edited_checkpoints import edit_config, edit_tensors
from families import shared_checkpoint, tiny_checkpoint
from parity import oracle_logits, relative_difference
from safetensors.numpy import load_file
from tolerances import LOGITS_RELATIVE
from transformers import AutoModelForCausalLM

import ortolan
from ortolan.errors import CheckpointError, UnsupportedModelError

PROMPT = list(range(3, 40))
MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "granitemoe", "laguna", "mellum", "mimo_v2_flash")
EXPERT = "model.layers.2.mlp.experts.4.up_proj.weight"


@pytest.fixture
def checkpoint(tmp_path):
    return tiny_checkpoint("qwen3_moe", tmp_path / "hf", seed=5)


def logits(folder):
    return ortolan.load(folder, device="cpu").session().prefill(PROMPT)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_names_of_transformers_5_give_the_same_model(family, tmp_path):
    """It can keep the tensors of all experts in one, under names of its own."""
    published = shared_checkpoint(family, seed=5)
    model = AutoModelForCausalLM.from_pretrained(published)
    model.save_pretrained(tmp_path / "hf", save_original_format=False)
    names = load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    assert names != load_file(published / "model.safetensors").keys()
    rows = [
        logits(ortolan.export(folder, tmp_path / name, max_context=64))
        for name, folder in (("a", published), ("b", tmp_path / "hf"))
    ]
    np.testing.assert_array_equal(*rows)


def test_the_number_of_experts_has_two_spellings(checkpoint, tmp_path):
    new = logits(ortolan.export(checkpoint, tmp_path / "new", max_context=64))
    edit_config(checkpoint, num_local_experts=..., num_experts=6)
    np.testing.assert_array_equal(logits(ortolan.export(checkpoint, tmp_path / "old", max_context=64)), new)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoe"])
def test_a_mixture_may_be_of_one_expert(family, tmp_path):
    count = {"num_local_experts" if family != "qwen3_moe" else "num_experts": 1, "num_experts_per_tok": 1}
    checkpoint = tiny_checkpoint(family, tmp_path / "hf", seed=5, **count)
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert relative_difference(logits(folder), oracle_logits(checkpoint, PROMPT)[-1]) <= LOGITS_RELATIVE


def test_every_other_layer_may_be_a_mixture(tmp_path):
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "hf", decoder_sparse_step=2, mlp_only_layers=[])
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert relative_difference(logits(folder), oracle_logits(checkpoint, PROMPT)[-1]) <= LOGITS_RELATIVE


def test_gpt_oss_has_a_rope_of_its_own_by_default(tmp_path):
    checkpoint = tiny_checkpoint("gpt_oss", tmp_path / "hf", seed=5, rope_parameters=None)
    edit_config(checkpoint, rope_parameters=...)
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert relative_difference(logits(folder), oracle_logits(checkpoint, PROMPT)[-1]) <= LOGITS_RELATIVE


def test_transposed_tensors_are_checked(tmp_path):
    checkpoint = tiny_checkpoint("gpt_oss", tmp_path / "hf", seed=5)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    edit_tensors(checkpoint, lambda t: t.update({name: t[name].transpose(1, 2).contiguous()}))
    with pytest.raises(
        CheckpointError, match=rf"{name} .* has shape \[4, 160, 48\], which does not hold \[4, 48, 160\]"
    ):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)


def test_half_precision_stacks_are_written(checkpoint, tmp_path):
    wide = logits(ortolan.export(checkpoint, tmp_path / "wide", max_context=64))
    half = logits(ortolan.export(checkpoint, tmp_path / "half", dtype="float16", max_context=64))
    assert np.abs(half - wide).max() / np.std(wide) < 0.1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(EXPERT), rf"lacks the tensor {EXPERT} of shape \[40, 48\]"),
        (lambda t: t.update({EXPERT: t[EXPERT][:-1]}), r"experts.4.up_proj.weight in .* has shape \[39, 48\]"),
        (lambda t: t.update({EXPERT: t[EXPERT].int()}), "experts.4.up_proj.weight in .* is I32"),
        (
            lambda t: t.update({EXPERT.replace(".4.", ".6."): t[EXPERT].clone()}),
            "does not explain, e.g. .*experts.6.up_proj",
        ),
    ],
)
def test_tensors_of_experts_are_checked(checkpoint, tmp_path, edit, message):
    edit_tensors(checkpoint, edit)
    with pytest.raises(CheckpointError, match=message):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, CheckpointError, "num_experts_per_tok is 7; the model has 6 experts"),
        ("qwen3_moe", {"num_local_experts": 0}, CheckpointError, "num_local_experts is 0"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [4]},
            CheckpointError,
            r"mlp_only_layers lists \[4\]; the model has 4 layers",
        ),
        ("qwen3_moe", {"mlp_only_layers": 1}, CheckpointError, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, CheckpointError, "decoder_sparse_step"),
        ("qwen3_moe", {"hidden_act": "relu6"}, UnsupportedModelError, "hidden_act is 'relu6'"),
        ("olmoe", {"clip_qkv": 8.0}, UnsupportedModelError, "clip_qkv is 8.0; supported: null"),
        (
            "laguna",
            {"moe_apply_router_weight_on_input": True},
            UnsupportedModelError,
            "moe_apply_router_weight_on_input",
        ),
        ("laguna", {"gating": "per-row"}, UnsupportedModelError, "gating is 'per-row'; supported: true, \"per-head\""),
        ("laguna", {"gating": False}, UnsupportedModelError, "gating is False"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, CheckpointError, "num_attention_heads_per_layer lists 1 "),
        ("laguna", {"mlp_layer_types": ["dense"] * 3}, CheckpointError, "mlp_layer_types lists 3 layers"),
        ("mellum", {"mlp_layer_types": ["dense", "thin"] * 2}, UnsupportedModelError, "mlp_layer_types has thin"),
        ("granitemoe_swa", {"layer_rope_theta": [0, 1e4]}, CheckpointError, "layer_rope_theta lists 2 layers"),
        ("granitemoe_swa", {"layer_rope_theta": [0, 1e4, 1, 0]}, CheckpointError, "layer_rope_theta has 1"),
        ("gemma4_moe", {"top_k_experts": 7}, CheckpointError, "top_k_experts is 7; the model has 6 experts"),
        ("granitemoe", {"residual_multiplier": 0}, CheckpointError, "residual_multiplier"),
    ],
)
def test_configs_are_refused_by_key(family, changes, error, message, tmp_path):
    checkpoint = tiny_checkpoint(family, tmp_path / "hf")
    edit_config(checkpoint, **changes)
    with pytest.raises(error, match=message):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert not (tmp_path / "model").exists()


def test_a_gate_can_have_a_factor_for_each_feature(tmp_path):
    checkpoint = tiny_checkpoint("laguna", tmp_path / "hf", seed=5, gating="per-element")
    expected = oracle_logits(checkpoint, PROMPT)[-1]
    assert relative_difference(logits(ortolan.export(checkpoint, tmp_path / "model")), expected) <= LOGITS_RELATIVE


def test_a_mixture_may_have_no_shared_expert(tmp_path):
    checkpoint = tiny_checkpoint("granitemoe_swa", tmp_path / "hf", seed=5, shared_intermediate_size=0)
    expected = oracle_logits(checkpoint, PROMPT)[-1]
    assert relative_difference(logits(ortolan.export(checkpoint, tmp_path / "model")), expected) <= LOGITS_RELATIVE

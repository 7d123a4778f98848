"""MiMo-V2-Flash: values of smaller heads than keys are padded, and the keys of its published config are read."""

import numpy as np
import onnx
import pytest
from edited_checkpoints import edit_config, edit_tensors
from families import tiny_checkpoint
from parity import oracle_logits, relative_difference
from published import FORMS, write_published
from safetensors.numpy import load_file
from stored_weights import read_tensor
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.manifest import MODEL_FILE

PROMPT = list(range(3, 60))
HEADS, SIZE, VALUE_SIZE = 4, 24, 16
VALUE_SCALE = np.float32(0.707)
PUBLISHED = {
    "layer_types": ...,
    "mlp_layer_types": ...,
    "rope_parameters": ...,
    "rms_norm_eps": ...,
    "sliding_window": ...,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1],
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "layernorm_epsilon": 1e-5,
    "sliding_window_size": 11,
    "swa_num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}


def checkpoint_at(folder, **overrides):
    return tiny_checkpoint("mimo_v2_flash", folder, seed=5, **overrides)


def logits(folder):
    return ortolan.load(folder, device="cpu").session().prefill(PROMPT)


def stored(folder, name):
    graph = onnx.load(folder / MODEL_FILE, load_external_data=False).graph
    return read_tensor(folder, next(tensor for tensor in graph.initializer if tensor.name == name))


def test_values_are_padded_and_scaled(tmp_path):
    checkpoint = checkpoint_at(tmp_path / "hf")
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    tensors = load_file(checkpoint / "model.safetensors")
    for layer, kv_heads in ((0, 1), (1, 2)):
        module = f"model.layers.{layer}.self_attn"
        value = stored(folder, f"layers.{layer}.attention.qkv.weight")[(HEADS + kv_heads) * SIZE :]
        value = value.reshape(kv_heads, SIZE, -1)
        given = tensors[f"{module}.v_proj.weight"].reshape(kv_heads, VALUE_SIZE, -1)
        np.testing.assert_array_equal(value[:, :VALUE_SIZE], given * VALUE_SCALE)
        assert not value[:, VALUE_SIZE:].any()
        output = stored(folder, f"layers.{layer}.attention.output.weight").reshape(-1, HEADS, SIZE)
        given = tensors[f"{module}.o_proj.weight"].reshape(-1, HEADS, VALUE_SIZE)
        np.testing.assert_array_equal(output[..., :VALUE_SIZE], given)
        assert not output[..., VALUE_SIZE:].any()


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_value_scale": None},
        {"attention_value_scale": 0.5, "attention_bias": True},
        {"v_head_dim": 24},
        {"norm_topk_prob": False},
        {"n_group": 2, "topk_group": 2},
    ],
    ids=str,
)
def test_options_are_those_of_transformers(tmp_path, overrides):
    checkpoint = checkpoint_at(tmp_path / "hf", **overrides)
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert relative_difference(logits(folder), oracle_logits(checkpoint, PROMPT)[-1]) <= LOGITS_RELATIVE


def test_the_published_keys_give_the_same_model(tmp_path):
    checkpoint = checkpoint_at(tmp_path / "hf")
    expected = logits(ortolan.export(checkpoint, tmp_path / "model", max_context=64))
    edit_config(checkpoint, **PUBLISHED)
    np.testing.assert_array_equal(logits(ortolan.export(checkpoint, tmp_path / "other", max_context=64)), expected)


def test_the_types_of_layers_have_defaults(tmp_path):
    checkpoint = checkpoint_at(tmp_path / "hf", num_hidden_layers=7, layer_types=None, mlp_layer_types=None)
    edit_config(checkpoint, layer_types=..., mlp_layer_types=...)
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    windows = [layer.window for layer in ortolan.load(folder, device="cpu").manifest.layers]
    assert windows == [-1, 12, 12, 12, 12, -1, 12]
    assert relative_difference(logits(folder), oracle_logits(checkpoint, PROMPT)[-1]) <= LOGITS_RELATIVE


def test_heads_for_more_tokens_are_left_out(tmp_path):
    checkpoint = checkpoint_at(tmp_path / "hf")
    expected = logits(ortolan.export(checkpoint, tmp_path / "model", max_context=64))
    edit_tensors(checkpoint, lambda t: t.update({"model.mtp.layers.0.eh_proj.weight": t["lm_head.weight"].clone()}))
    np.testing.assert_array_equal(logits(ortolan.export(checkpoint, tmp_path / "other", max_context=64)), expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"n_group": 2}, UnsupportedModelError, "n_group is 2, with a smaller topk_group; supported: 1"),
        ({"add_full_attention_sink_bias": True}, UnsupportedModelError, "add_full_attention_sink_bias is true"),
        ({"swa_head_dim": 16}, UnsupportedModelError, "swa_head_dim is 16, head_dim 24; supported: both alike"),
        ({"swa_v_head_dim": 24}, UnsupportedModelError, "swa_v_head_dim is 24, v_head_dim 16"),
        ({"v_head_dim": 32}, CheckpointError, "v_head_dim is 32; expected head_dim 24 at most"),
        ({"v_head_dim": 8}, CheckpointError, r"v_proj.weight .* has shape \[16, 48\], which does not hold \[8, 48\]"),
        ({"moe_layer_freq": [0, 1], "mlp_layer_types": ...}, CheckpointError, "mlp_layer_types lists 2 layers"),
    ],
    ids=str,
)
def test_configs_are_refused_by_key(tmp_path, changes, error, message):
    checkpoint = checkpoint_at(tmp_path / "hf")
    edit_config(checkpoint, **changes)
    with pytest.raises(error, match=message):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert not (tmp_path / "model").exists()


def test_values_in_low_bits_are_refused(tmp_path):
    experts, types = ("down_proj", "gate_proj", "up_proj"), ["full_attention", "sliding_attention"]
    checkpoint = write_published(tmp_path, FORMS["float8"], "mimo_v2_flash", dense=experts, layer_types=types)
    with pytest.raises(UnsupportedModelError, match=r"v_proj.weight cannot be read in low bits: .* arranged anew"):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert not (tmp_path / "model").exists()

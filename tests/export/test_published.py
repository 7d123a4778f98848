"""Checkpoints that are published in low bits keep their bits, and compute what their weights stand for."""

import json

import numpy as np
import onnx
import pytest
import torch
from parity import relative_difference
from published import FORMS, write_published
from safetensors.torch import load_file, save_file
from stored_weights import low_bit_stems, read_weight
from tolerances import ROUNDED_INPUTS_RELATIVE

import ortolan
from ortolan.errors import CheckpointError, ConfigError, UnsupportedModelError
from ortolan.manifest import FUSED_FILE, MODEL_FILE, read_manifest

PROMPT = list(range(3, 60))
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
QUERY = "layers.1.attention.query"


def logits(folder):
    return ortolan.load(folder, device="cpu").session().prefill(PROMPT)


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_those_that_are_published(name, tmp_path):
    source = write_published(tmp_path, FORMS[name])
    folder = ortolan.export(source, tmp_path / "out", max_context=128)
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    for ours, theirs in ((QUERY, "layers.1.self_attn.q_proj"), ("layers.0.mlp.down", "layers.0.mlp.down_proj")):
        expected = tensors[f"model.{theirs}.weight"].numpy()
        np.testing.assert_array_equal(read_weight(folder, model, ours).astype(np.float32), expected)
    dense = ortolan.export(tmp_path / "dense", tmp_path / "plain", max_context=128)
    assert relative_difference(logits(folder), logits(dense)) <= ROUNDED_INPUTS_RELATIVE
    assert read_manifest(folder).weight_format == FORMS[name].section["quant_method"]


@pytest.mark.parametrize("name", ["awq", "float8-blocks", "nvfp4"])
def test_fused_graphs_read_query_key_and_value_as_one(name, tmp_path):
    folder = ortolan.export(write_published(tmp_path, FORMS[name]), tmp_path / "out", max_context=128)
    fused = onnx.load(folder / FUSED_FILE, load_external_data=False)
    products = [node for node in fused.graph.node if node.op_type == "LowBitLinear"]
    wanted = 4 if name != "float8-blocks" else 6  # query and key have rows that are not whole blocks
    assert len(products) == wanted * 2
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    whole = [tensors[f"model.layers.0.mlp.{part}_proj.weight"].numpy() for part in ("gate", "up")]
    joint = read_weight(folder, fused, "layers.0.mlp.gate_up").astype(np.float32)
    np.testing.assert_array_equal(joint, np.concatenate(whole))


def test_modules_that_are_not_converted_stay_dense(tmp_path):
    source = write_published(tmp_path, FORMS["awq"], dense=("v_proj", "down_proj"))
    folder = ortolan.export(source, tmp_path / "out", max_context=128)
    dense = ortolan.export(tmp_path / "dense", tmp_path / "plain", max_context=128)
    assert relative_difference(logits(folder), logits(dense)) <= ROUNDED_INPUTS_RELATIVE
    products = [n for n in onnx.load(folder / MODEL_FILE, load_external_data=False).graph.node if n.op_type == "Gemm"]
    assert len(products) == 2 * 2 + 1


def _edit(source, edit):
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, source / "model.safetensors")


def _set(name, value):
    return lambda tensors: tensors[f"model.layers.1.self_attn.q_proj{name}"].view(-1)[5:6].fill_(value)


def _drop(name):
    return lambda tensors: tensors.pop(f"model.layers.1.self_attn.q_proj{name}")


def _cut(name):
    key = f"model.layers.1.self_attn.q_proj{name}"
    return lambda tensors: tensors.update({key: tensors[key][:-1].clone()})


def _input_scale(values):
    return lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.input_scale": torch.tensor(values)})


def _shuffle(tensors):
    key = "model.layers.1.self_attn.q_proj.g_idx"
    tensors[key] = tensors[key].flip(0).clone()


@pytest.mark.parametrize(
    ("form", "edit", "error", "message"),
    [
        ("gptq", _set(".scales", 0.0), CheckpointError, r"layers\.1\..*q_proj\.scales has scales that are 0"),
        ("awq", _set(".scales", float("nan")), CheckpointError, r"q_proj\.scales has scales that are not finite"),
        ("float8", _set(".weight_scale", float("inf")), CheckpointError, "weight_scale has scales that are not finite"),
        ("gptq", _drop(".scales"), CheckpointError, r"lacks the tensor model\.layers\.1\.self_attn\.q_proj\.scales"),
        ("float8-blocks", _drop(".weight_scale_inv"), CheckpointError, "lacks the tensor .*q_proj.weight_scale"),
        ("packed-4", _cut(".weight_scale"), CheckpointError, r"weight_scale has shape \[127, 4\], expected \[128, 4\]"),
        ("awq", _cut(".qzeros"), CheckpointError, r"qzeros has shape \[3, 16\], expected \[4, 16\]"),
        ("gptq", _cut(".scales"), CheckpointError, "3 groups of scales do not divide 256 input features"),
        ("nvfp4", _set(".weight_global_scale", 0.0), CheckpointError, "scales that are 0"),
        (
            "float8-tensor",
            _drop(".activation_scale"),
            CheckpointError,
            r"lacks the tensor .*layers\.1\..*q_proj\.input_scale",
        ),
        (
            "float8-static",
            _drop(".input_scale"),
            CheckpointError,
            r"lacks the tensor .*layers\.1\..*q_proj\.input_scale",
        ),
        ("float8-static", _input_scale([0.0]), CheckpointError, r"q_proj\.input_scale has scales that are 0"),
        ("float8-static", _input_scale([float("nan")]), CheckpointError, r"q_proj\.input_scale .* not finite"),
        (
            "float8-static",
            _input_scale([1.0, 1.0]),
            CheckpointError,
            r"input_scale has shape \[2\], expected one scale",
        ),
        ("gptq", _shuffle, UnsupportedModelError, r"by activation order \(desc_act\), which is not supported"),
    ],
)
def test_damaged_layers_are_refused_by_name(form, edit, error, message, tmp_path):
    source = write_published(tmp_path, FORMS[form])
    if message.startswith("scales that are 0"):
        _edit(source, lambda t: t.update({k: v * 0 for k, v in t.items() if k.endswith("weight_global_scale")}))
    else:
        _edit(source, edit)
    with pytest.raises(error, match=message):
        ortolan.export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported: gptq, awq"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in the form 'gemv' is not supported"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq in the form 'marlin'"),
        ({"quant_method": "fp8", "activation_scheme": "block"}, "activation_scheme 'block' is not supported"),
    ],
)
def test_other_methods_are_refused_by_name(section, message, tmp_path):
    source = write_published(tmp_path, FORMS["awq"])
    keys = json.loads((source / "config.json").read_text()) | {"quantization_config": section}
    (source / "config.json").write_text(json.dumps(keys))
    with pytest.raises(UnsupportedModelError, match=message):
        ortolan.export(source, tmp_path / "out")


def test_what_is_quantized_is_not_quantized_again(tmp_path):
    source = write_published(tmp_path, FORMS["awq"])
    with pytest.raises(ConfigError, match=r"is quantized already \(awq\); leave weight_format out"):
        ortolan.export(source, tmp_path / "out", weight_format="int4")


def test_a_head_that_is_quantized_is_not_quantized_again(tmp_path):
    form = FORMS["gptq-symmetric"]
    source = write_published(tmp_path, form)
    tensors = load_file(source / "model.safetensors")
    shape = tuple(tensors.pop("lm_head.weight").shape)
    written = form.write(np.random.default_rng(3), shape, **form.options)
    tensors |= {f"lm_head{ending}": tensor for ending, tensor in written.tensors.items()}
    save_file(tensors, source / "model.safetensors")
    folder = ortolan.export(source, tmp_path / "out", max_context=128)
    assert "head" in low_bit_stems(onnx.load(folder / MODEL_FILE, load_external_data=False))
    message = r"head_format is 'int8', but the checkpoint's head is quantized already \(int4\)"
    with pytest.raises(ConfigError, match=message):
        ortolan.export(source, tmp_path / "again", max_context=128, head_format="int8")
    assert not (tmp_path / "again").exists()


def test_random_weights_need_a_config_that_is_not_quantized(tmp_path):
    source = write_published(tmp_path, FORMS["awq"])
    with pytest.raises(ConfigError, match=r"weights='random' needs a config.json without quantization_config"):
        ortolan.export(source, tmp_path / "out", weights="random")


def test_a_joint_tensor_of_the_checkpoint_is_parted(tmp_path):
    """Phi-3 stores query, key and value as one."""
    source = write_published(tmp_path, FORMS["packed-4"], family="phi3", head_dim=None, rope_parameters=PLAIN_ROPE)
    folder = ortolan.export(source, tmp_path / "out", max_context=128)
    dense = ortolan.export(tmp_path / "dense", tmp_path / "plain", max_context=128)
    assert relative_difference(logits(folder), logits(dense)) <= ROUNDED_INPUTS_RELATIVE
    assert torch.is_tensor(load_file(source / "model.safetensors")["model.layers.0.self_attn.qkv_proj.weight_packed"])


@pytest.mark.parametrize(("family", "name"), [("llama", "gptq"), ("qwen2", "gptq-8"), ("llama", "awq")])
def test_biases_of_zeros_are_left_out(family, name, tmp_path):
    """AutoGPTQ writes one for every layer, also of models whose layers have none."""
    source = write_published(tmp_path, FORMS[name], family=family)
    expected = logits(ortolan.export(source, tmp_path / "without", max_context=128))

    def add_biases(tensors):
        stems = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
        new = {f"{stem}.bias": torch.zeros(tensors[f"{stem}.scales"].shape[1]) for stem in stems}
        tensors |= {bias: values for bias, values in new.items() if bias not in tensors}

    _edit(source, add_biases)
    np.testing.assert_array_equal(logits(ortolan.export(source, tmp_path / "with", max_context=128)), expected)
    _edit(source, lambda tensors: tensors["model.layers.1.self_attn.o_proj.bias"].fill_(0.5))
    with pytest.raises(CheckpointError, match=r"does not explain, e\.g\. model\.layers\.1\.self_attn\.o_proj\.bias"):
        ortolan.export(source, tmp_path / "refused", max_context=128)


def test_a_weight_of_several_tensors_must_be_dense(tmp_path):
    """OLMo Hybrid's networks have queries, keys and values apart, the graph as one."""
    differences = {"head_dim": None, "layer_types": ["linear_attention", "full_attention"]}
    source = write_published(tmp_path, FORMS["float8"], family="olmo_hybrid", **differences)
    message = r"linear_attn\.q_proj\.weight cannot be read in low bits: it is one of 3 tensors of one weight"
    with pytest.raises(UnsupportedModelError, match=message):
        ortolan.export(source, tmp_path / "out")


@pytest.mark.parametrize(
    "groups",
    [
        [{"num_bits": 8, "dynamic": True}],
        [{"num_bits": 8, "dynamic": False}, None],
        [{"num_bits": 4, "dynamic": False}],
    ],
)
def test_layers_without_a_scale_of_inputs_are_read_unless_each_group_has_one(groups, tmp_path):
    source = write_published(tmp_path, FORMS["float8-static"])
    keys = json.loads((source / "config.json").read_text())
    named = {f"group_{index}": {"input_activations": inputs} for index, inputs in enumerate(groups)}
    keys["quantization_config"]["config_groups"] = named
    (source / "config.json").write_text(json.dumps(keys))
    _edit(source, _drop(".input_scale"))
    folder = ortolan.export(source, tmp_path / "out", max_context=128)
    assert read_manifest(folder).weight_format == "compressed-tensors"

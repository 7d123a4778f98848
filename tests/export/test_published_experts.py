"""Mixtures that are published in low bits keep their bits, and compute what their weights stand for."""

import json

import numpy as np
import onnx
import pytest
import torch
from parity import relative_difference
from published import FORMS, write_gpt_oss, write_published
from safetensors.torch import load_file, save_file
from stored_weights import read_tensor, read_weight
from tolerances import ROUNDED_INPUTS_RELATIVE
from transformers import AutoModelForCausalLM, Mxfp4Config

import ortolan
from ortolan.errors import CheckpointError, ConfigError, UnsupportedModelError
from ortolan.manifest import MODEL_FILE, read_manifest

PROMPT = list(range(3, 60))
GATE_UP = "layers.1.mlp.experts.gate_up"
MIXTURE = {"moe_intermediate_size": 128, "num_experts": 4, "mlp_only_layers": [], "num_hidden_layers": 2}
SWAPPED = {"gptq": "gptq-symmetric", "packed-zero-points": "packed-4"}


def logits(folder):
    return ortolan.load(folder, device="cpu").session().prefill(PROMPT)


def load(folder):
    return onnx.load(folder / MODEL_FILE, load_external_data=False)


def test_gpt_oss_keeps_its_blocks_and_scales(tmp_path):
    source = write_gpt_oss(tmp_path)
    folder = ortolan.export(source, tmp_path / "out", max_context=128)
    published = load_file(source / "model.safetensors")
    stored = {tensor.name: tensor for tensor in load(folder).graph.initializer}
    blocks = published["model.layers.1.mlp.experts.gate_up_proj_blocks"].numpy()
    codes = read_tensor(folder, stored[f"{GATE_UP}.codes"])
    np.testing.assert_array_equal(codes[:, :96], blocks[:, ::2].reshape(4, 96, 32))
    np.testing.assert_array_equal(codes[:, 96:], blocks[:, 1::2].reshape(4, 96, 32))
    scales = published["model.layers.0.mlp.experts.down_proj_scales"].numpy()
    np.testing.assert_array_equal(read_tensor(folder, stored["layers.0.mlp.experts.down.scale_codes"]), scales)
    assert read_manifest(folder).weight_format == "mxfp4"
    products = [node.op_type for node in load(folder).graph.node]
    assert products.count("LowBitExperts") == 2
    assert products.count("Gemm") == 2 * (2 + 1) + 1  # attention, routers and the head are dense


def test_gpt_oss_may_have_a_head_of_few_bits(tmp_path):
    source = write_gpt_oss(tmp_path)
    dense = ortolan.export(source, tmp_path / "dense-head", max_context=128)
    folder = ortolan.export(source, tmp_path / "out", max_context=128, head_format="int8")
    before, after = ({t.name: t for t in load(each).graph.initializer} for each in (dense, folder))
    assert {name for name in after if name not in before} >= {"head.codes", "head.scales"}
    for name in (f"{GATE_UP}.codes", f"{GATE_UP}.scale_codes"):
        np.testing.assert_array_equal(read_tensor(folder, after[name]), read_tensor(dense, before[name]))
    assert 0 < relative_difference(logits(folder), logits(dense)) < 0.05


def test_gpt_oss_computes_what_transformers_does(tmp_path):
    source = write_gpt_oss(tmp_path)
    folder = ortolan.export(source, tmp_path / "out", max_context=128)
    config = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.float32)
    weight = load_file(tmp_path / "dense" / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(model.model.layers[1].mlp.experts.gate_up_proj.detach().float(), weight)
    tokens = [*PROMPT, 5, 90, 17, 64]
    with torch.no_grad():
        expected = model.float()(torch.tensor([tokens])).logits[0, len(PROMPT) - 1 :].numpy()
    session = ortolan.load(folder, device="cpu").session()
    found = np.stack([session.prefill(PROMPT), *(session.step(token) for token in tokens[len(PROMPT) :])])
    assert relative_difference(found, expected) <= ROUNDED_INPUTS_RELATIVE


def test_gpt_oss_computes_what_its_dense_weights_do(tmp_path):
    folder = ortolan.export(write_gpt_oss(tmp_path), tmp_path / "out", max_context=128)
    dense = ortolan.export(tmp_path / "dense", tmp_path / "plain", max_context=128)
    assert relative_difference(logits(folder), logits(dense)) <= ROUNDED_INPUTS_RELATIVE


@pytest.mark.parametrize("name", FORMS)
def test_experts_are_those_that_are_published(name, tmp_path):
    source = write_published(tmp_path, FORMS[name], "qwen3_moe", **MIXTURE)
    folder = ortolan.export(source, tmp_path / "out", max_context=128)
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    model = load(folder)
    experts = "model.layers.1.mlp.experts"
    for ours, parts in ((GATE_UP, ("gate", "up")), ("layers.1.mlp.experts.down", ("down",))):
        each = [[tensors[f"{experts}.{e}.{part}_proj.weight"].numpy() for part in parts] for e in range(4)]
        expected = np.stack([np.concatenate(expert) for expert in each])
        np.testing.assert_array_equal(read_weight(folder, model, ours).astype(np.float32), expected)
    dense = ortolan.export(tmp_path / "dense", tmp_path / "plain", max_context=128)
    assert relative_difference(logits(folder), logits(dense)) <= ROUNDED_INPUTS_RELATIVE


def _edit(source, edit):
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, source / "model.safetensors")


@pytest.mark.parametrize("dense", [("gate_proj", "up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")])
def test_modules_that_are_not_converted_stay_dense(dense, tmp_path):
    source = write_published(tmp_path, FORMS["awq"], "qwen3_moe", dense, **MIXTURE)
    folder = ortolan.export(source, tmp_path / "out", max_context=128)
    plain = ortolan.export(tmp_path / "dense", tmp_path / "plain", max_context=128)
    assert relative_difference(logits(folder), logits(plain)) <= ROUNDED_INPUTS_RELATIVE
    kinds = {node.op_type for node in load(folder).graph.node}
    assert ("MoeExperts" in kinds) == ("gate_proj" in dense)
    assert ("LowBitExperts" in kinds) == ("gate_proj" not in dense)


@pytest.mark.parametrize("name", SWAPPED)
def test_experts_with_and_without_zero_points_fit_together(name, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    source = write_published(tmp_path / "one", FORMS[name], "qwen3_moe", **MIXTURE)
    other = write_published(tmp_path / "other", FORMS[SWAPPED[name]], "qwen3_moe", **MIXTURE)
    expert = "model.layers.1.mlp.experts.2."
    for kind in ("hf", "dense"):
        new = {k: v for k, v in load_file(other.parent / kind / "model.safetensors").items() if k.startswith(expert)}
        file = source.parent / kind / "model.safetensors"
        kept = {k: v for k, v in load_file(file).items() if not k.startswith(expert)}
        save_file(kept | new, file)
    folder = ortolan.export(source, tmp_path / "out", max_context=128)
    dense = ortolan.export(source.parent / "dense", tmp_path / "plain", max_context=128)
    assert relative_difference(logits(folder), logits(dense)) <= ROUNDED_INPUTS_RELATIVE


def _drop(name):
    return lambda tensors: tensors.pop(name)


def _set_scale(tensors):
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255


def _cut_blocks(tensors):
    name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    tensors[name] = tensors[name][:, :-2]


def _retype(tensors):
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name].to(torch.int32)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set_scale, r"layers\.1\.mlp\.experts\.down_proj_scales has scales that are not finite"),
        (_cut_blocks, r"gate_up_proj_blocks has shape \[4, 190, 2, 16\], expected \[4, 192, 2, 16\]"),
        (_drop("model.layers.0.mlp.experts.gate_up_proj_scales"), r"lacks the tensor .*gate_up_proj_scales"),
        (_retype, r"down_proj_scales is I32, expected U8"),
        (_drop("model.layers.0.mlp.experts.gate_up_proj_bias"), r"lacks the tensor .*gate_up_proj_bias"),
    ],
)
def test_damaged_blocks_are_refused_by_name(edit, message, tmp_path):
    source = write_gpt_oss(tmp_path)
    _edit(source, edit)
    with pytest.raises(CheckpointError, match=message):
        ortolan.export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _plain_expert(tensors):
    """Make one expert's layer dense."""
    stem = "model.layers.1.mlp.experts.2.up_proj"
    for name in [name for name in tensors if name.startswith(stem)]:
        del tensors[name]
    tensors[f"{stem}.weight"] = torch.zeros(128, 256)


def _plain_down(tensors):
    for expert in range(4):
        stem = f"model.layers.0.mlp.experts.{expert}.down_proj"
        for name in [name for name in tensors if name.startswith(stem)]:
            del tensors[name]
        tensors[f"{stem}.weight"] = torch.zeros(256, 128)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (_plain_expert, CheckpointError, r"layers\.1\.mlp\.experts\.2\.up_proj"),
        (_plain_down, UnsupportedModelError, r"layers\.0\.mlp\.experts.* is in low bits, the other is dense"),
    ],
)
def test_experts_that_are_not_alike_are_refused_by_name(edit, error, message, tmp_path):
    source = write_published(tmp_path, FORMS["awq"], "qwen3_moe", **MIXTURE)
    _edit(source, edit)
    with pytest.raises(error, match=message):
        ortolan.export(source, tmp_path / "out")


def test_experts_in_two_formats_are_refused_by_name(tmp_path):
    (tmp_path / "other").mkdir()
    source = write_published(tmp_path, FORMS["packed-4"], "qwen3_moe", **MIXTURE)
    other = write_published(tmp_path / "other", FORMS["packed-8"], "qwen3_moe", **MIXTURE)
    stem = "model.layers.1.mlp.experts.2.up_proj"
    new = {k: v for k, v in load_file(other / "model.safetensors").items() if k.startswith(stem)}
    _edit(source, lambda tensors: tensors.update(new))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp.* stored in different ways \(int4, int8;"):
        ortolan.export(source, tmp_path / "out")


def test_what_is_published_is_not_quantized_again(tmp_path):
    source = write_gpt_oss(tmp_path)
    with pytest.raises(ConfigError, match=r"quantized already \(mxfp4\); leave weight_format out"):
        ortolan.export(source, tmp_path / "out", weight_format="int4")


def test_a_checkpoint_without_blocks_contradicts_its_config(tmp_path):
    source = write_gpt_oss(tmp_path)
    keys = json.loads((source / "config.json").read_text())
    (tmp_path / "dense" / "config.json").write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match="quant_method mxfp4, but the checkpoint has no weights in its form"):
        ortolan.export(tmp_path / "dense", tmp_path / "out")

"""W8A8: layers of fp8 that round their inputs, too, against transformers' layers with inputs rounded by PyTorch."""

import json

import numpy as np
import onnx
import pytest
import torch
import transformers
from families import tiny_checkpoint
from parity import relative_difference
from published import FORMS, write_published
from safetensors.torch import load_file, save_file
from tolerances import LOGITS_RELATIVE, ROUNDED_ACTIVATIONS_RELATIVE

import ortolan
from ortolan.errors import CheckpointError, ConfigError
from ortolan.manifest import FUSED_FILE, MODEL_FILE

PROMPT = list(range(3, 60))
PROMPTS = [list(range(first, first + 1 + first // 2)) for first in range(3, 40, 4)]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
# By form: columns that share a scale of a token, or None for the checkpoint's own scale of all.
SCALES = {"float8": 0, "float8-blocks": 128, "float8-tensor": None, "float8-static": None}


def rounded(x, columns, scale):
    """Round rows of a linear layer's inputs to float8."""
    groups = x.unflatten(-1, (-1, columns or x.shape[-1]))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    scales, units = (largest / 448, groups * (448 / largest)) if scale is None else (scale, groups * (1 / scale))
    return (units.clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * scales).flatten(-2)


def rounding_oracle(dense, published, columns):
    """Load transformers' model of the dense weights, and let its linear layers round their inputs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    tensors = load_file(published / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            given = [tensors.get(f"{name}{ending}") for ending in (".input_scale", ".activation_scale")]
            static = next((float(scale) for scale in given if scale is not None), None) if columns is None else None
            module.register_forward_pre_hook(
                lambda _, inputs, scale=static: (rounded(inputs[0], columns, scale), *inputs[1:])
            )
    return model


def differences(folder, oracle):
    """Return the relative differences of the logits after each prompt, sorted."""
    model = ortolan.load(folder, device="cpu")
    found = []
    for prompt in PROMPTS:
        with torch.no_grad():
            expected = oracle(torch.tensor([prompt])).logits[0, -1].numpy()
        found.append(relative_difference(model.session().prefill(prompt), expected))
    return sorted(found)


def assert_rounds_as(folder, oracle):
    """Compare the answers to most prompts closely; in the others, last bits decide a code, a step of an eighth."""
    found = differences(folder, oracle)
    assert found[len(found) // 2] <= LOGITS_RELATIVE
    assert found[-1] <= ROUNDED_ACTIVATIONS_RELATIVE


def logits(folder):
    return ortolan.load(folder, device="cpu").session().prefill(PROMPT)


def products(folder, file=MODEL_FILE):
    """Return the attributes of the graph's products of fp8."""
    nodes = onnx.load(folder / file, load_external_data=False).graph.node
    found = [{a.name: onnx.helper.get_attribute_value(a) for a in n.attribute} for n in nodes if "LowBit" in n.op_type]
    return [attributes for attributes in found if attributes["format"] == b"fp8"]


@pytest.mark.parametrize("form", SCALES)
def test_published_checkpoints_compute_what_they_ask_for(form, tmp_path):
    source = write_published(tmp_path, FORMS[form])
    folder = ortolan.export(source, tmp_path / "out", max_context=128, activation_format="fp8")
    oracle = rounding_oracle(tmp_path / "dense", source, SCALES[form])
    assert_rounds_as(folder, oracle)
    without = ortolan.export(source, tmp_path / "weights", max_context=128)
    assert differences(without, oracle)[0] > 10 * LOGITS_RELATIVE
    assert not any(attributes.get("input_format") == b"fp8" for attributes in products(without))


def test_layers_that_share_an_input_stay_apart_where_their_scales_differ(tmp_path):
    source = write_published(tmp_path, FORMS["float8-static"])
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.input_scale"] = torch.tensor([0.25])
    save_file(tensors, source / "model.safetensors")
    folder = ortolan.export(source, tmp_path / "out", max_context=128, activation_format="fp8")
    scales = [attributes["input_scale"] for attributes in products(folder, FUSED_FILE)]
    assert scales.count(0.25) == 1
    assert len(scales) == 4 + 6
    assert_rounds_as(folder, rounding_oracle(tmp_path / "dense", source, None))


# In blocks, 64 rows of keys are not whole ones, so that they are products of their own.
@pytest.mark.parametrize(("group_size", "plain", "fused"), [(None, 5, 4), (128, 7, 6)])
def test_own_exports_round_inputs_of_linear_layers_but_not_of_the_head(group_size, plain, fused, tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES)
    options = {"weight_format": "fp8", "group_size": group_size, "max_context": 128}
    folder = ortolan.export(source, tmp_path / "out", activation_format="fp8", **options)
    for file, count in ((MODEL_FILE, plain * 2), (FUSED_FILE, fused * 2)):
        found = products(folder, file)
        assert [attributes["input_format"] for attributes in found] == [b"fp8"] * count
        assert {attributes.get("input_scale", 0.0) for attributes in found} == {0.0}
    exact = logits(ortolan.export(source, tmp_path / "weights", **options))
    difference = relative_difference(logits(folder), exact)
    assert 0.005 < difference < 0.6


def test_chunks_and_decoding_give_what_one_prompt_gives(tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES)
    folder = ortolan.export(source, tmp_path / "out", weight_format="fp8", activation_format="fp8", max_context=128)
    model = ortolan.load(folder, device="cpu")
    whole, parts = model.session(), model.session(chunk_size=16)
    assert relative_difference(parts.prefill(PROMPT), whole.prefill(PROMPT)) <= LOGITS_RELATIVE
    assert parts.generate([7], max_new_tokens=12).tokens == whole.generate([7], max_new_tokens=12).tokens


def test_experts_keep_their_inputs(tmp_path):
    source = tiny_checkpoint("qwen3_moe", tmp_path / "hf")
    folder = ortolan.export(
        source, tmp_path / "out", weight_format="fp8", activation_format="fp8", max_context=128, weights="random"
    )
    graph = onnx.load(folder / MODEL_FILE, load_external_data=False).graph
    experts = [node for node in graph.node if node.op_type == "LowBitExperts"]
    assert experts
    assert not any(attribute.name == "input_format" for node in experts for attribute in node.attribute)
    assert np.isfinite(logits(folder)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_format": "int8"}, "activation_format is 'int8'; allowed: fp8"),
        ({"activation_format": "fp8"}, "activation_format='fp8' needs linear layers of fp8; give weight_format='fp8'"),
        ({"activation_format": "fp8", "weight_format": "int4"}, "needs weights of fp8; weight_format is 'int4'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES)
    with pytest.raises(ConfigError, match=message):
        ortolan.export(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_checkpoints_of_other_formats_are_refused(tmp_path):
    source = write_published(tmp_path, FORMS["awq"])
    with pytest.raises(ConfigError, match="needs linear layers of fp8"):
        ortolan.export(source, tmp_path / "out", activation_format="fp8")


def test_a_scale_below_zero_is_refused(tmp_path):
    source = write_published(tmp_path, FORMS["float8-static"])
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.input_scale"] = torch.tensor([-0.5])
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.input_scale is -0\.5, a scale below 0"):
        ortolan.export(source, tmp_path / "out")


def test_inspect_and_the_command_line_name_it(tmp_path, capsys):
    from ortolan.cli import main

    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES)
    arguments = [str(source), str(tmp_path / "out"), "--weight-format", "fp8", "--activation-format", "fp8"]
    assert main(["export", *arguments]) == 0
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert "fp8 by row, fp8 inputs" in json.dumps(report)

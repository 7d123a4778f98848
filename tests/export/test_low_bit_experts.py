"""Mixtures in low bits: what is stored is near the checkpoint, and the model computes what is stored."""

import json

import numpy as np
import onnx
import pytest
from families import shared_checkpoint
from parity import relative_difference
from stored_weights import low_bit_stems, read_weight, store_dequantized
from tolerances import ROUNDED_INPUTS_RELATIVE, ROUNDED_MIXTURE_RELATIVE

import ortolan
from ortolan.cli import main
from ortolan.errors import ConfigError
from ortolan.manifest import FUSED_FILE, MODEL_FILE, read_manifest

FAMILIES = (
    *("gpt_oss", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "granitemoe_swa"),
    *("gemma4_moe", "laguna", "mellum", "mimo_v2_flash", "qwen3_next", "qwen3_5_moe"),
)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
SHARED_SIZES = {
    "qwen3_next": {"shared_expert_intermediate_size": 32},
    "qwen3_5_moe": {"shared_expert_intermediate_size": 32},
    "laguna": {"shared_expert_intermediate_size": 32},
    "granitemoe_swa": {"shared_intermediate_size": 32},
}
SEEDS = {"qwen3_next": 3}  # where with 0 the last bits choose an expert
PROMPT = list(range(3, 60))
# As in test_weight_formats: above the root mean square error of a weight drawn from a normal distribution.
FORMATS = {
    "int4": ({"weight_format": "int4", "group_size": 32}, 0.1),
    "int4-zero-points": ({"weight_format": "int4", "group_size": 32, "asymmetric": True}, 0.1),
    "int8": ({"weight_format": "int8", "group_size": 32}, 0.01),
    "int8-channel": ({"weight_format": "int8", "group_size": "channel"}, 0.01),
    "fp8": ({"weight_format": "fp8"}, 0.03),
    "mxfp4": ({"weight_format": "mxfp4"}, 0.13),
}
CASES = [(family, form) for family in FAMILIES for form in ("int4", "int8")]
CASES += [("gpt_oss", form) for form in FORMATS if form not in ("int4", "int8")]
CASES += [("granitemoe_swa", "mxfp4"), ("qwen3_moe", "fp8")]


def checkpoint(family):
    return shared_checkpoint(family, SEEDS.get(family, 0), **SIZES, **SHARED_SIZES.get(family, {}))


def logits(folder):
    """Read a prompt, then four tokens one by one."""
    session = ortolan.load(folder, device="cpu").session()
    return np.stack([session.prefill(PROMPT), *(session.step(token) for token in (5, 90, 17, 64))])


@pytest.mark.parametrize(("family", "form"), CASES)
def test_a_mixture_computes_what_it_stores_which_is_near_the_checkpoint(family, form, tmp_path):
    options, limit = FORMATS[form]
    source = checkpoint(family)
    low = ortolan.export(source, tmp_path / "low", max_context=128, **options)
    dense = ortolan.export(source, tmp_path / "dense", max_context=128)
    errors = store_dequantized(low, dense)
    assert max(errors.values()) <= limit, errors
    rounds = options["weight_format"] in ("int4", "int8")
    bound = ROUNDED_MIXTURE_RELATIVE if rounds else ROUNDED_INPUTS_RELATIVE
    assert relative_difference(logits(low), logits(dense)) <= bound
    assert read_manifest(low).weight_format == options["weight_format"]
    experts = [name for name in errors if name.endswith((".experts.gate_up", ".experts.down"))]
    layers = [node for node in load(low).graph.node if node.op_type == "LowBitExperts"]
    assert len(experts) == 2 * len(layers) > 0
    assert any(".shared." in name for name in errors) == (family in SHARED_SIZES)


def load(folder, file=MODEL_FILE):
    return onnx.load(folder / file, load_external_data=False)


@pytest.mark.parametrize("family", ["laguna", "qwen3_next", "gpt_oss"])
def test_routers_stay_dense(family, tmp_path):
    folder = ortolan.export(checkpoint(family), tmp_path / "out", max_context=128, weight_format="int4")
    stems = low_bit_stems(load(folder))
    dense = {tensor.name for tensor in load(folder).graph.initializer}
    routers = [name for name in dense if name.endswith((".mlp.router.weight", ".mlp.shared_gate.weight"))]
    assert routers
    assert not any("router" in stem or "shared_gate" in stem for stem in stems)


def test_the_fused_graph_reads_the_same_experts(tmp_path):
    folder = ortolan.export(checkpoint("mixtral"), tmp_path / "out", max_context=128, weight_format="int4")
    plain, fused = (
        [list(node.input[3:]) for node in load(folder, file).graph.node if node.op_type == "LowBitExperts"]
        for file in (MODEL_FILE, FUSED_FILE)
    )
    assert [names[:6] for names in plain] == [names[:6] for names in fused]
    assert not any(node.op_type == "MoeExperts" for node in load(folder, FUSED_FILE).graph.node)


def test_bytes_are_those_of_the_format(tmp_path):
    folder = ortolan.export(checkpoint("mixtral"), tmp_path / "out", max_context=128, weight_format="mxfp4")
    tensors = {tensor.name: tensor for tensor in load(folder).graph.initializer}
    lengths = {
        name: {entry.key: entry.value for entry in tensor.external_data}["length"]
        for name, tensor in tensors.items()
        if ".experts." in name
    }
    weights = 4 * 2 * 96 * 64
    assert lengths["layers.0.mlp.experts.gate_up.codes"] == str(weights // 2)
    assert lengths["layers.0.mlp.experts.gate_up.scale_codes"] == str(weights // 32)


def test_random_mixtures_take_a_format(tmp_path):
    source = checkpoint("qwen3_moe")
    folder = ortolan.export(source, tmp_path / "out", max_context=128, weights="random", weight_format="mxfp4")
    assert np.isfinite(logits(folder)).all()


@pytest.mark.parametrize("form", FORMATS)
def test_large_random_weights_have_whole_tensors_of_a_format(form, tmp_path):
    source = shared_checkpoint("qwen3_moe", **SIZES | {"moe_intermediate_size": 224}, num_experts=48)
    options, error = FORMATS[form]
    folder = ortolan.export(source, tmp_path / "out", max_context=128, weights="random", **options)
    deviation = json.loads((source / "config.json").read_text())["initializer_range"]
    experts = read_weight(folder, load(folder), "layers.0.mlp.experts.gate_up")
    assert experts.shape == (48, 448, 64)  # more values than are drawn
    assert np.abs(experts.std(axis=(1, 2)) / deviation - 1).max() < error
    assert np.isfinite(logits(folder)).all()


def test_inspect_names_the_formats_of_experts(tmp_path, capsys):
    folder = ortolan.export(checkpoint("mixtral"), tmp_path / "out", max_context=128, weight_format="mxfp4")
    assert main(["inspect", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    formats = {row["format"]: row for row in facts["weights"]}
    experts, attention = 4 * 4 * 3 * 96 * 64, 4 * 64 * (64 + 2 * 32 + 64)
    assert formats["mxfp4 in blocks of 32"]["parameters"] == experts + attention
    assert formats["mxfp4 in blocks of 32"]["bytes"] == (experts + attention) * 17 // 32
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "mxfp4 in blocks of 32" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weight_format": "int4", "group_size": 64},
            "group_size 64 does not divide the input features 96 of layers.0.m",
        ),
        ({"weight_format": "mxfp4", "group_size": 64}, "group_size is 64; allowed: 32"),
        ({"weight_format": "mxfp4", "group_size": "channel"}, "group_size is 'channel'; allowed: 32"),
        ({"weight_format": "mxfp4", "asymmetric": True}, "asymmetric is for int4 and int8; mxfp4 has no zero points"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        ortolan.export(checkpoint("mellum"), tmp_path / "out", **options)
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_mxfp4_needs_blocks_of_32(tmp_path):
    source = shared_checkpoint("mixtral", **SIZES | {"intermediate_size": 80})
    with pytest.raises(ConfigError, match=r"does not divide the input features 80 of .*; mxfp4 has no other"):
        ortolan.export(source, tmp_path / "out", weight_format="mxfp4")

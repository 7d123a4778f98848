"""Exports in low bits: what is stored is near the checkpoint, and the model computes what is stored."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from families import tiny_checkpoint
from parity import relative_difference
from safetensors.torch import load_file, save_file
from stored_weights import low_bit_stems, read_weight
from tolerances import FLOAT32, ROUNDED_INPUTS_RELATIVE

import ortolan
from ortolan.errors import CheckpointError, ConfigError
from ortolan.manifest import FUSED_FILE, MODEL_FILE, read_manifest

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
PROMPT = list(range(3, 60))
# Root mean square error of a weight drawn from a normal distribution, relative to its deviation: above the figures of
# a uniform step over the largest of a group (int4: step 2 * 2.6 / 15, rms step / sqrt(12)), and of e4m3's 3 bits.
CASES = {
    "int4": ({"weight_format": "int4", "group_size": 32}, 0.1),
    "int4-zero-points": ({"weight_format": "int4", "group_size": 32, "asymmetric": True}, 0.1),
    "int4-nearest": ({"weight_format": "int4", "group_size": 64, "quantizer": "nearest"}, 0.12),
    "int4-channel": ({"weight_format": "int4", "group_size": "channel"}, 0.14),
    "int4-head": ({"weight_format": "int4", "group_size": 32, "head_format": "int4"}, 0.13),
    "int8": ({"weight_format": "int8"}, 0.01),
    "int8-channel-zero-points": ({"weight_format": "int8", "group_size": "channel", "asymmetric": True}, 0.01),
    "fp8": ({"weight_format": "fp8"}, 0.03),
    "mxfp4": ({"weight_format": "mxfp4"}, 0.13),
    "mxfp4-nearest": ({"weight_format": "mxfp4", "quantizer": "nearest"}, 0.13),
    "fp8-blocks": ({"weight_format": "fp8", "group_size": 128}, 0.03),
}


def logits(folder):
    return ortolan.load(folder, device="cpu").session().prefill(PROMPT)


def stored_checkpoint(folder, source, target):
    """Write the weights that a model folder stores as a dense checkpoint."""
    model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    names = {"attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj"}
    names |= {"attention.value": "self_attn.v_proj", "attention.output": "self_attn.o_proj"}
    names |= {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    linear = {f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for i in range(2) for ours, theirs in names.items()}
    heads = {"head": "lm_head", "embedding": "model.embed_tokens"}
    held = {tensor.name for tensor in model.graph.initializer}
    linear |= {ours: theirs for ours, theirs in heads.items() if f"{ours}.codes" in held}
    tensors = load_file(source / "model.safetensors")
    errors = {}
    for ours, theirs in linear.items():
        weight = read_weight(folder, model, ours).astype(np.float32)
        before = tensors[f"{theirs}.weight"].numpy()
        errors[ours] = float(np.sqrt(np.mean((weight - before) ** 2)) / before.std())
        tensors[f"{theirs}.weight"][:] = load_file(source / "model.safetensors")[f"{theirs}.weight"] * 0
        tensors[f"{theirs}.weight"].numpy()[:] = weight
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file(tensors, target / "model.safetensors")
    return errors


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_model_computes_what_it_stores_which_is_near_the_checkpoint(name, tied, tmp_path):
    options, limit = CASES[name]
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES, tie_word_embeddings=tied)
    folder = ortolan.export(source, tmp_path / "out", max_context=128, **options)
    errors = stored_checkpoint(folder, source, tmp_path / "stored")
    assert max(errors.values()) <= limit, errors
    head = limit if options.get("head_format") == "int4" else CASES["int8"][1]
    assert errors["embedding" if tied else "head"] <= head
    dense = ortolan.export(tmp_path / "stored", tmp_path / "dense", max_context=128)
    assert relative_difference(logits(folder), logits(dense)) <= ROUNDED_INPUTS_RELATIVE
    assert read_manifest(folder).weight_format == options["weight_format"]


def test_the_search_is_nearer_than_rounding(tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES)
    errors = {}
    for method in ("search", "nearest"):
        options = {"weight_format": "int4", "group_size": 128, "quantizer": method}
        folder = ortolan.export(source, tmp_path / method, max_context=128, **options)
        errors[method] = stored_checkpoint(folder, source, tmp_path / f"{method}-stored")["layers.0.mlp.up"]
    assert errors["search"] < 0.97 * errors["nearest"]


def test_bytes_are_those_of_the_formats(tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES, tie_word_embeddings=True)
    folder = ortolan.export(source, tmp_path / "out", weight_format="int4", group_size=32, max_context=128)
    tensors = load_file(source / "model.safetensors")
    linear = sum(v.numel() for k, v in tensors.items() if k.endswith("proj.weight"))
    embedding = tensors["model.embed_tokens.weight"].numel()
    others = 4 * sum(v.numel() for v in tensors.values() if v.ndim == 1)
    codes_and_scales = linear // 2 + 4 * linear // 32 + embedding + 4 * embedding // 128
    assert codes_and_scales + others <= (folder / "model.onnx.data").stat().st_size < codes_and_scales + others + 2**18


def test_the_head_can_stay_dense(tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES)
    folder = ortolan.export(source, tmp_path / "out", weight_format="int4", head_format="dense", max_context=128)
    graph = onnx.load(folder / MODEL_FILE, load_external_data=False).graph
    assert [node.name for node in graph.node if node.op_type == "Gemm"] == ["head/Gemm"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head_format", ["int8", "int4"])
def test_the_head_alone_can_be_quantized(head_format, tied, tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES, tie_word_embeddings=tied)
    folder = ortolan.export(source, tmp_path / "out", head_format=head_format, max_context=128)
    model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    ours, theirs = ("embedding", "model.embed_tokens.weight") if tied else ("head", "lm_head.weight")
    assert low_bit_stems(model) == [ours]
    tensors = load_file(source / "model.safetensors")
    stored = read_weight(folder, model, ours).astype(np.float32)
    error = np.sqrt(np.mean((stored - tensors[theirs].numpy()) ** 2)) / tensors[theirs].numpy().std()
    assert 0 < error <= CASES[head_format if head_format == "int8" else "int4-head"][1]
    tensors[theirs].numpy()[:] = stored
    save_file(tensors, source / "model.safetensors")
    dense = ortolan.export(source, tmp_path / "dense", max_context=128)
    assert relative_difference(logits(folder), logits(dense)) <= ROUNDED_INPUTS_RELATIVE
    assert read_manifest(folder).weight_format == "dense"


@pytest.mark.parametrize("head_format", ["int8", "int4"])
def test_both_graphs_look_up_the_rows_that_are_stored(head_format, tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES, tie_word_embeddings=True)
    options = {"weight_format": "int4", "group_size": 32, "head_format": head_format}
    folder = ortolan.export(source, tmp_path / "out", max_context=128, **options)
    plain = onnx.load(folder / MODEL_FILE, load_external_data=False)
    expected = read_weight(folder, plain, "embedding")[PROMPT].astype(np.float32)
    for file in (MODEL_FILE, FUSED_FILE):
        graph = onnx.load(folder / file)
        nodes = [node for node in graph.graph.node if node.name.startswith("embedding/")]
        row = onnx.helper.make_tensor_value_info(nodes[-1].output[0], onnx.TensorProto.FLOAT, None)
        used = {name for node in nodes for name in node.input}
        alone = onnx.helper.make_graph(
            nodes,
            "lookup",
            [value for value in graph.graph.input if value.name in used],
            [row],
            [tensor for tensor in graph.graph.initializer if tensor.name in used],
        )
        model = onnx.helper.make_model(alone, opset_imports=graph.opset_import, ir_version=graph.ir_version)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        found = session.run(None, {"token_ids": np.array(PROMPT)})[0]
        np.testing.assert_allclose(found, expected, rtol=FLOAT32)


def test_the_fused_graph_folds_norms_gates_and_residuals(tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES)
    folder = ortolan.export(source, tmp_path / "out", weight_format="int4", max_context=128)
    graph = onnx.load(folder / FUSED_FILE, load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("LowBitLinear") == 4 * 2 + 1
    assert not {"MatMulNBits", "FusedLinear", "Gemm", "RMSNormalization", "Mul"} & set(kinds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weight_format": "int4", "group_size": 128, "sizes": {"intermediate_size": 192}},
            "does not divide the input",
        ),
        ({"weight_format": "int4", "group_size": 48}, 'group_size is 48; allowed: 32, 64, 128, or "channel"'),
        ({"weight_format": "fp8", "group_size": 32}, 'group_size is 32; allowed: 128, or "channel"'),
        ({"weight_format": "int3"}, "weight_format is 'int3'; allowed: dense, int4, int8, fp8, mxfp4"),
        ({"group_size": 32}, "group_size needs a weight_format: int4, int8, fp8"),
        ({"weight_format": "dense", "asymmetric": True}, "asymmetric needs a weight_format"),
        ({"quantizer": "nearest"}, "quantizer needs a weight_format"),
        ({"quantizer": "nearest", "head_format": "dense"}, "quantizer needs a weight_format"),
        ({"weight_format": "fp8", "asymmetric": True}, "fp8 has no zero points"),
        ({"weight_format": "int4", "quantizer": "best"}, "quantizer is 'best'; allowed: search, nearest, gptq"),
        ({"weight_format": "int4", "head_format": "int2"}, "head_format is 'int2'; allowed: int8, int4, dense"),
        ({"head_format": "fp8"}, "head_format is 'fp8'; allowed: int8, int4, dense"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "hf", **{**SIZES, **options.pop("sizes", {})})
    with pytest.raises(ConfigError) as error:
        ortolan.export(source, tmp_path / "out", **options)
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up\.weight has values that are not finite"):
        ortolan.export(source, tmp_path / "out", weight_format="int4")
    assert not (tmp_path / "out").exists()


def test_inspect_names_the_formats(tmp_path, capsys):
    source = tiny_checkpoint("llama", tmp_path / "hf", **SIZES)
    arguments = [str(source), str(tmp_path / "out"), "--weight-format", "fp8", "--group-size", "channel"]
    from ortolan.cli import main

    assert main(["export", *arguments, "--max-context", "128"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    formats = {row["format"]: row["parameters"] for row in facts["weights"]}
    linear = 2 * (128 * (128 + 2 * 64 + 128) + 3 * 128 * 256)
    assert formats["fp8 by row"] == linear
    assert formats["8 bits in blocks of 128"] == 131 * 128

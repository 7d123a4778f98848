"""The fused graphs of conversions."""

from __future__ import annotations

from collections import Counter

import foreign
import numpy as np
import onnx
import pytest
from conversions import DECODED_TOKENS, PROMPT_TOKENS, SPECS, expected_rows, prompt_of, rows_of
from expand_fused import expanded_folder
from foreign import Foreign
from parity import relative_difference
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan.errors import ConfigError
from ortolan.graphs.external_data import read_external_data
from ortolan.manifest import CPU_FILE, FUSED_FILE, MODEL_FILE, read_manifest

NOT_FUSED = {  # MLPs are mixtures, RoPE is interleaved or arithmetic, the softmax is smooth, weights are computed
    "gpt_oss", "gptj", "int4_embedding", "int4_initializers", "rope_lookups", "rope_lookups_long", "smooth",
}  # fmt: skip
PRODUCTS = {"int4": {"FusedLinear": 1, "MatMulNBits": 8, "GateMul": 2}}


def test_fused_graphs_compute_what_plain_ones_do(converted, tmp_path):
    spec, source, folder = converted
    name = next(name for name, each in SPECS.items() if each is spec)
    assert (read_manifest(folder).fused_model is None) == (name in NOT_FUSED)
    if name in NOT_FUSED:
        with pytest.raises(ConfigError, match="no fused graph"):
            ortolan.load(folder, device="cpu", fused=True)
        return
    fused = onnx.load(folder / FUSED_FILE, load_external_data=False)
    counts = Counter(node.op_type for node in fused.graph.node)
    expected = PRODUCTS["int4"] if spec.int4 else {"FusedLinear": 9, "MatMulNBits": 0, "GateMul": 0}
    assert {op: counts[op] for op in expected} == expected
    assert (counts["QkvAttention"], counts["QkvRopeAppend"], counts["SwaAttention"]) == (2, 0, 0)
    assert counts["RotaryEmbedding"] == counts["RingKvAppend"] == 0
    assert counts["SkipSimplifiedLayerNormalization"] == (3 if spec.int4 else 0)
    prompt = prompt_of(PROMPT_TOKENS)
    expanded = ortolan.load(expanded_folder(folder, tmp_path / "expanded"), device="cpu")
    for model in (expanded, ortolan.load(folder, device="cpu", fused=True)):
        rows, tokens = rows_of(model.session(), prompt, DECODED_TOKENS)
        assert relative_difference(rows, expected_rows(source, spec, tokens, len(prompt))) <= LOGITS_RELATIVE


@pytest.mark.parametrize("name", ["llama", "int4_qwen3", "phi3_long", "phi_partial", "sinks"])
def test_both_graphs_of_a_conversion_read_every_byte_once(name, tmp_path):
    source = foreign.write(SPECS[name], tmp_path / "source")
    folder = ortolan.convert(source, tmp_path / "model", max_context=512)
    covered = []
    for file in (MODEL_FILE, FUSED_FILE, CPU_FILE):
        bytes_read = np.zeros((folder / "model.onnx.data").stat().st_size, np.uint8)
        tensors = onnx.load(folder / file, load_external_data=False).graph.initializer
        assert len({tensor.name for tensor in tensors}) == len(tensors)
        for tensor in tensors:
            if tensor.external_data:
                place = read_external_data(tensor)
                bytes_read[place.offset : place.end] += 1
        assert bytes_read.max() == 1
        covered.append(bytes_read)
    for fused in covered[1:]:
        np.testing.assert_array_equal(covered[0], fused)


def test_conversions_of_mixed_products_keep_them_apart(tmp_path):
    source = foreign.write(Foreign(int4=True, head_norm=True), tmp_path / "source")
    model = onnx.load(source / "model.onnx", load_external_data=False)
    first = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    next(a for a in first.attribute if a.name == "accuracy_level").i = 1
    (source / "model.onnx").write_bytes(model.SerializeToString())
    folder = ortolan.convert(source, tmp_path / "model", max_context=512)
    fused = onnx.load(folder / FUSED_FILE, load_external_data=False)
    counts = Counter(node.op_type for node in fused.graph.node)
    assert (counts["MatMulNBits"], counts["QkvAttention"], counts["RingKvAppend"]) == (10, 1, 1)
    session = ortolan.load(expanded_folder(folder, tmp_path / "expanded"), device="cpu").session()
    expected = foreign.source_logits(source, prompt_of(30))[-1]
    assert relative_difference(session.prefill(prompt_of(30)), expected) <= LOGITS_RELATIVE


def test_weights_that_are_read_twice_are_not_fused(tmp_path):
    source = foreign.write(Foreign(), tmp_path / "source")
    model = onnx.load(source / "model.onnx", load_external_data=False)
    first, second, *_ = (node for node in model.graph.node if node.op_type == "SkipSimplifiedLayerNormalization")
    second.input[2] = first.input[2]
    (source / "model.onnx").write_bytes(model.SerializeToString())
    folder = ortolan.convert(source, tmp_path / "model", max_context=64)
    assert read_manifest(folder).fused_model is None
    assert "MatMul" in {n.op_type for n in onnx.load(folder / MODEL_FILE, load_external_data=False).graph.node}
    logits = ortolan.load(folder, device="cpu").session().prefill(prompt_of(20))
    assert relative_difference(logits, foreign.source_logits(source, prompt_of(20))[-1]) <= LOGITS_RELATIVE


def test_the_fused_graph_can_be_left_out(source, tmp_path):
    folder = ortolan.convert(source, tmp_path / "model", max_context=64, fuse=False)
    assert read_manifest(folder).fused_model is None
    assert not (folder / FUSED_FILE).exists()
    operators = {node.op_type for node in onnx.load(folder / MODEL_FILE, load_external_data=False).graph.node}
    assert "MatMul" in operators, "weights stay as they are"
    with pytest.raises(ConfigError, match="fuse"):
        ortolan.convert(source, tmp_path / "other", fuse="yes")


@pytest.mark.parametrize(
    ("name", "weight_format"), [("llama", "dense"), ("int4", "mixed"), ("int4_initializers", "mixed")]
)
def test_the_manifest_names_the_weights_format(name, weight_format, tmp_path):
    source = foreign.write(SPECS[name], tmp_path / "source")
    manifest = read_manifest(ortolan.convert(source, tmp_path / "model", max_context=64))
    assert (manifest.weight_format, manifest.cache_dtype) == (weight_format, "float32")

"""Exports calibrated on a text: outputs are nearer than those of the data-free search, and bad calls leave nothing."""

import errno
import os
import shutil
import tracemalloc

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from edited_checkpoints import edit_tensors
from families import tiny_checkpoint
from tolerances import FEEDBACK_RELATIVE

import ortolan
from ortolan.cli import main
from ortolan.errors import CheckpointError, ConfigError, StorageError
from ortolan.export.calibration import Calibration, factor_of
from ortolan.retrieval import shipped_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 384}
TEXT = "def area(width, height):\n    return width * height\n" * 20


@pytest.fixture
def source(tmp_path):
    folder = tiny_checkpoint("llama", tmp_path / "hf", **SIZES)
    for file in shipped_model().glob("tokenizer*"):
        shutil.copy(file, folder / file.name)
    return folder


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def logits(folder):
    model = ortolan.load(folder, device="cpu")
    session, token_ids = model.session(), model.tokenizer.encode(TEXT[:120])
    return np.stack([session.prefill([token]) for token in token_ids])


@pytest.mark.parametrize(
    "options",
    [
        {"weight_format": "int4", "group_size": 32},
        {"weight_format": "int4", "group_size": 128, "asymmetric": True},
        {"weight_format": "int8", "group_size": "channel"},
    ],
)
def test_a_calibrated_model_is_nearer_to_the_dense_one(options, source, text, tmp_path):
    exact = logits(ortolan.export(source, tmp_path / "dense", max_context=128))
    common = {"max_context": 128, "head_format": "dense", **options}
    searched = ortolan.export(source, tmp_path / "searched", **common)
    calibrated = ortolan.export(source, tmp_path / "calibrated", quantizer="gptq", calibration=text, **common)
    errors = [np.square(logits(folder) - exact).mean() for folder in (calibrated, searched)]
    assert errors[0] < (0.7 if options["weight_format"] == "int4" else 1.0) * errors[1]
    assert (calibrated / "model.onnx.data").stat().st_size == (searched / "model.onnx.data").stat().st_size


def test_the_command_line_calibrates(source, text, tmp_path):
    options = ["--weight-format", "int4", "--quantizer", "gptq", "--calibration", str(text), "--max-context", "128"]
    assert main(["export", str(source), str(tmp_path / "out"), *options]) == 0
    expected = ortolan.export(
        source, tmp_path / "same", weight_format="int4", quantizer="gptq", calibration=text, max_context=128
    )
    np.testing.assert_array_equal(logits(tmp_path / "out"), logits(expected))


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        ({"quantizer": "gptq"}, None, "need each other"),
        ({"quantizer": "search"}, TEXT, "need each other"),
        ({"quantizer": "gptq", "weight_format": "mxfp4"}, TEXT, "for weight_format int4 and int8, not 'mxfp4'"),
        ({"quantizer": "gptq", "weights": "random"}, TEXT, "weights is 'random'"),
        ({"quantizer": "gptq"}, "", "is empty"),
        ({"quantizer": "gptq"}, "short", "at least 128 are needed"),
        ({"quantizer": "gptq", "calibration": "missing.txt"}, None, "cannot be read"),
    ],
)
def test_calls_that_do_not_fit_are_refused(options, content, message, source, text, tmp_path):
    if content is not None:
        text.write_text(content)
        options = {"calibration": text, **options}
    before = set(tmp_path.iterdir())
    with pytest.raises(ConfigError) as error:
        ortolan.export(source, tmp_path / "out", **{"weight_format": "int4", **options})
    assert message in str(error.value)
    assert set(tmp_path.iterdir()) == before


def test_a_checkpoint_without_a_tokenizer_is_refused(source, text, tmp_path):
    (source / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ortolan.export(source, tmp_path / "out", weight_format="int4", quantizer="gptq", calibration=text)
    assert not (tmp_path / "out").exists()


def exported(family, folder):
    """Export a family's tiny model as calibration does; returns its folder and its graph."""
    variants = {"original_max_position_embeddings": 512} if family == "phi3" else {}  # of RoPE
    checkpoint = tiny_checkpoint(family, folder / "hf", **variants)
    model = ortolan.export(checkpoint, folder / "dense", snapkv_window=0, fuse=False, weight_format="dense")
    return model, onnx.load(model / "model.onnx", load_external_data=False)


def products(graph):
    """Name what each Gemm of a layer reads, by its weight."""
    gemms = [node for node in graph.graph.node if node.op_type == "Gemm"]
    return {node.input[1]: node.input[0] for node in gemms if node.input[1].startswith("layers.")}


def first_step(value, chunk):
    """Return what an input is in a step that reads a chunk as a sequence of its own; all rows are wanted."""
    count = len(chunk)
    numbers = {"token_ids": chunk, "positions": np.arange(count), "logit_rows": np.arange(count)}
    numbers |= {"query_start": np.array([0, count], np.int32), "rope_variant": np.zeros(count, np.int64)}
    if value.name in numbers:
        return numbers[value.name]
    shape = [count if str(size).startswith("slots") else size if isinstance(size, int) else 1 for size in value.shape]
    return np.zeros(shape, {"tensor(int32)": np.int32, "tensor(float)": np.float32}[value.type])


def sums_of_whole_graph(folder, graph, chunks):
    """Sum the products of what Gemms read in one run of all layers for each chunk, in float64."""
    read = sorted(set(products(graph).values()))
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in read)
    (folder / "whole.onnx").write_bytes(graph.SerializeToString())
    options = ort.SessionOptions()
    ortolan.custom_ops.register(options)
    session = ort.InferenceSession(folder / "whole.onnx", options, providers=["CPUExecutionProvider"])
    sums = dict.fromkeys(read, 0)
    for chunk in chunks:
        feeds = {value.name: first_step(value, chunk) for value in session.get_inputs()}
        for name, rows in zip(read, session.run(read, feeds), strict=True):
            sums[name] = sums[name] + rows.astype(np.float64).T @ rows
    return sums


@pytest.mark.parametrize("family", ["llama", "gemma4", "qwen3_moe", "qwen3_next", "olmo_hybrid", "cohere2", "phi3"])
def test_reading_layer_by_layer_sums_what_the_whole_graph_reads(family, tmp_path):
    folder, graph = exported(family, tmp_path)
    assert (family == "phi3") == ("rope_variant" in {value.name for value in graph.graph.input})
    token_ids = np.random.default_rng(0).integers(3, 131, 600)
    inputs = products(graph)
    seen = []
    calibration = Calibration(folder, token_ids, {name: (name,) for name in inputs}, 1000, seen.append)
    sums = sums_of_whole_graph(folder, graph, (token_ids[:512], token_ids[512:]))
    for weight, name in inputs.items():
        damped = sums[name] + 0.01 * np.diag(sums[name]).mean() * np.eye(len(sums[name]))
        expected = np.linalg.cholesky(np.linalg.inv(damped)).T
        factor = calibration.feedback(weight)
        assert factor.dtype == np.float32
        np.testing.assert_allclose(factor, expected, rtol=0, atol=FEEDBACK_RELATIVE * np.abs(expected).max())
    assert sum(seen) == 1000
    assert min(seen) >= 0
    assert calibration.feedback("embedding.weight") is None


def largest_held(layers, folder):
    """Return the most bytes of arrays that a calibration of so many layers holds at a time."""
    checkpoint = tiny_checkpoint("llama", folder / "hf", **SIZES | {"num_hidden_layers": layers})
    model = ortolan.export(checkpoint, folder / "dense", snapkv_window=0, fuse=False, weight_format="dense")
    weights = products(onnx.load(model / "model.onnx", load_external_data=False))
    calibration = Calibration(model, np.arange(1024) % 384, {name: (name,) for name in weights}, 0, lambda count: None)
    tracemalloc.start()
    for weight in weights:
        assert calibration.feedback(weight) is not None
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def test_a_deeper_model_is_calibrated_in_the_same_memory(tmp_path):
    shallow, deep = (largest_held(layers, tmp_path / str(layers)) for layers in (2, 8))
    assert deep < 1.1 * shallow


def test_factors_of_several_blocks_are_those_of_an_inverse():
    rows = np.random.default_rng(0).standard_normal((400, 600), dtype=np.float32) * np.linspace(0.01, 3, 600)
    sums = (rows.T @ rows).astype(np.float32)
    damped = sums.astype(np.float64) + 0.01 * np.diag(sums).mean(dtype=np.float64) * np.eye(600)
    expected = np.linalg.cholesky(np.linalg.inv(damped)).T
    np.testing.assert_allclose(factor_of(sums), expected, rtol=0, atol=FEEDBACK_RELATIVE * np.abs(expected).max())


def test_progress_counts_the_dense_copy_and_what_reads_the_text(source, text, tmp_path):
    seen = []
    options = {"weight_format": "int4", "quantizer": "gptq", "calibration": text}
    folder = ortolan.export(source, tmp_path / "out", progress=lambda *numbers: seen.append(numbers), **options)
    done, totals = np.array(seen).T
    assert set(totals) == {done[-1]}
    assert np.all(np.diff(done) >= 0)
    seen.clear()
    ortolan.export(source, tmp_path / "dense", progress=lambda *numbers: seen.append(numbers))
    dense = seen[-1][1]
    assert 2 * dense < done[-1] <= 2 * dense + (folder / "model.onnx.data").stat().st_size
    pieces = 2 * -(-len(TEXT) // 512)  # of the text, in each of two layers
    assert np.diff(done).max() <= dense / 2
    assert len(done) > len(seen) + pieces


@pytest.mark.parametrize("share", [0.2, 0.6, 0.99])  # of the dense copy, of the first layer's pass, of the last weights
def test_a_full_disk_leaves_nothing(share, source, text, tmp_path):
    def fill(done, total):
        if done > share * total:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = set(tmp_path.iterdir())
    with pytest.raises(StorageError) as error:
        ortolan.export(
            source, tmp_path / "out", weight_format="int4", quantizer="gptq", calibration=text, progress=fill
        )
    assert str(error.value).count("nothing was kept") == 1
    assert set(tmp_path.iterdir()) == before


def test_activations_that_overflow_are_refused(source, text, tmp_path):
    def enlarge(tensors):
        tensors["model.layers.1.mlp.gate_proj.weight"] *= 1e30
        tensors["model.layers.1.mlp.up_proj.weight"] *= 1e30

    edit_tensors(source, enlarge)
    before = set(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"what layers\.1\.mlp\.down\.weight multiplies is not finite"):
        ortolan.export(source, tmp_path / "out", weight_format="int4", quantizer="gptq", calibration=text)
    assert set(tmp_path.iterdir()) == before

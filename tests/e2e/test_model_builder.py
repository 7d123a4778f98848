"""Models that onnxruntime-genai's builder itself made, converted: they compute what transformers does.

Skipped where the builder is not installed; it is no dependency of the tests, whose other graphs imitate it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from byte_tokenizer import write_byte_tokenizer
from expand_fused import expanded_folder
from families import FAMILIES, tiny_checkpoint
from foreign import source_logits
from parity import decode_differences, relative_difference, without_window
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan.manifest import read_manifest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_genai") is None, reason="onnxruntime-genai's model builder is not installed"
)

VOCABULARY = 320
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "vocab_size": VOCABULARY}
_LONGROPE = {
    **FAMILIES["phi3"]["rope_parameters"],
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _PLAIN_ROPE},
    "llama_biased": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"rope_parameters": _PLAIN_ROPE, "use_sliding_window": False},
    "gemma2": {},
    "phi3": {"rope_parameters": _PLAIN_ROPE, "head_dim": None},
}
LONG = {"rope_parameters": _LONGROPE, "head_dim": None}
DROPPED_WINDOWS = ("mistral", "phi3")  # the builder leaves them out of the graph
PROMPT_TOKENS, DECODED_TOKENS = 50, 30


def checkpoint_of(case: str, folder: Path) -> Path:
    """Save a random checkpoint with the keys that the builder asks for beside transformers' own."""
    checkpoint = tiny_checkpoint(case.removesuffix("_long"), folder, **{**_SIZES, **CASES.get(case, LONG)})
    write_byte_tokenizer(checkpoint)
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    if case.startswith("phi3"):
        config = json.loads((checkpoint / "config.json").read_text())
        limit = 64 if case == "phi3_long" else config["max_position_embeddings"]
        config["original_max_position_embeddings"] = limit
        if case == "phi3_long":
            config["rope_parameters"] |= {"type": "longrope", "original_max_position_embeddings": limit}
        (checkpoint / "config.json").write_text(json.dumps(config))
    return checkpoint


def build(checkpoint: Path, folder: Path, precision: str) -> Path:
    """Run the builder; int4 products then keep their activations in float32, so that results compare closely."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", precision]
    command += ["-i", str(checkpoint), "-o", str(folder), "-c", str(folder.parent / "cache")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder.parent)
    assert finished.returncode == 0, finished.stderr[-2000:]
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for level in (a for node in model.graph.node for a in node.attribute if a.name == "accuracy_level"):
        level.i = 1
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder


@pytest.fixture(scope="module", params=sorted(CASES))
def built(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = checkpoint_of(request.param, folder / "hf")
    return request.param, checkpoint, build(checkpoint, folder / "fp32", "fp32")


def prompt_of(count: int) -> list[int]:
    return np.random.default_rng(count).integers(3, VOCABULARY, count).tolist()


def assert_same(session: ortolan.Session, source: Path) -> None:
    """Check logits and greedy tokens against the source, which reads the sequence anew for each token."""
    rows, tokens = [session.prefill(prompt_of(PROMPT_TOKENS))], prompt_of(PROMPT_TOKENS)
    for _ in range(DECODED_TOKENS):
        tokens.append(int(np.argmax(rows[-1])))
        rows.append(session.step(tokens[-1]))
    lengths = range(PROMPT_TOKENS, len(tokens) + 1)
    expected = np.array([source_logits(source, tokens[:length])[-1] for length in lengths])
    assert relative_difference(np.array(rows), expected) <= LOGITS_RELATIVE
    assert np.argmax(rows, 1).tolist() == expected.argmax(1).tolist()


@pytest.mark.filterwarnings("ignore:the source's configuration names a sliding window")
def test_a_conversion_computes_what_transformers_does(built, tmp_path):
    case, checkpoint, source = built
    folder = ortolan.convert(source, tmp_path / "model", chunk_size=7)
    if case in DROPPED_WINDOWS:
        checkpoint = without_window(checkpoint, tmp_path / "full")
    for each in (folder, expanded_folder(folder, tmp_path / "fused")):
        session = ortolan.load(each, device="cpu").session()
        differences = decode_differences(session, checkpoint, prompt_of(PROMPT_TOKENS), DECODED_TOKENS)
        assert max(differences) <= LOGITS_RELATIVE, (each, differences)


@pytest.mark.filterwarnings("ignore:the source's configuration names a sliding window")
def test_longer_prompts_than_the_first_table_serves(tmp_path):
    source = build(checkpoint_of("phi3_long", tmp_path / "hf"), tmp_path / "fp32", "fp32")
    folder = ortolan.convert(source, tmp_path / "model", chunk_size=7)
    assert read_manifest(folder).rope_limits == (64, 1024)
    assert_same(ortolan.load(folder, device="cpu").session(), source)


@pytest.mark.filterwarnings("ignore:the source's configuration names a sliding window")
@pytest.mark.parametrize("case", ["llama", "mistral", "phi3", "qwen3"])
def test_int4_computes_what_the_source_does(case, tmp_path):
    source = build(checkpoint_of(case, tmp_path / "hf"), tmp_path / "int4", "int4")
    folder = ortolan.convert(source, tmp_path / "model", chunk_size=7)
    for each in (folder, expanded_folder(folder, tmp_path / "fused")):
        assert_same(ortolan.load(each, device="cpu").session(), source)


def test_a_conversion_evicts_what_an_export_does(built, tmp_path):
    case, checkpoint, source = built
    if case in DROPPED_WINDOWS:
        pytest.skip("the export has the window that the builder dropped")
    prompt = prompt_of(60)
    kept = []
    for folder in (
        ortolan.convert(source, tmp_path / "converted", max_context=256),
        ortolan.export(checkpoint, tmp_path / "exported", max_context=256),
    ):
        layer = [info.window for info in read_manifest(folder).layers].index(-1)
        session = ortolan.load(folder, device="cpu").session(snapkv=ortolan.SnapKv(budget=24, window=8))
        session.prefill(prompt)
        kept.append(session.kept_positions(layer))
    np.testing.assert_array_equal(*kept)

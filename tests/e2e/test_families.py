"""Every family agrees with transformers, whatever the prompt's length and its chunks."""

import json

import numpy as np
import pytest
from families import FAMILIES, shared_checkpoint, shared_model, tiny_checkpoint
from parity import decode_differences, oracle_logits, relative_difference, without_window
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan.manifest import read_manifest

MAX_CONTEXT = 512
DECODED_TOKENS = 20
FULL_ATTENTION_SPAN = 12  # stands for W where a family has no window

CHUNKS = {
    "one": lambda w: 1,
    "seven": lambda w: 7,
    "window": lambda w: w,
    "2W+3": lambda w: 2 * w + 3,
    "whole": None,
}
LENGTHS = {
    "W-1": lambda w: w - 1,
    "W": lambda w: w,
    "W+1": lambda w: w + 1,
    "3W+5": lambda w: 3 * w + 5,
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def exported(request):
    """Export one tiny checkpoint; yields (checkpoint folder, model folder, window)."""
    checkpoint = shared_checkpoint(request.param, seed=5)
    folder = shared_model(checkpoint, max_context=MAX_CONTEXT, chunk_size=16)
    windows = {layer.window for layer in read_manifest(folder).layers if layer.window > 0}
    return checkpoint, folder, max(windows, default=FULL_ATTENTION_SPAN)


def prompt_of(length: int, checkpoint) -> list[int]:
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    return np.random.default_rng(length).integers(3, vocabulary, length).tolist()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_agree_with_transformers(exported, length, chunk):
    checkpoint, folder, window = exported
    prompt = prompt_of(LENGTHS[length](window), checkpoint)
    chunk_size = CHUNKS[chunk](window) if CHUNKS[chunk] else len(prompt)
    session = ortolan.load(folder, device="cpu").session(max_context=MAX_CONTEXT, chunk_size=chunk_size)
    differences = decode_differences(session, checkpoint, prompt, DECODED_TOKENS)
    assert max(differences) <= LOGITS_RELATIVE, differences


def test_the_ring_wraps_several_times(exported):
    checkpoint, folder, _ = exported
    prompt = prompt_of(MAX_CONTEXT - DECODED_TOKENS, checkpoint)
    session = ortolan.load(folder, device="cpu").session(max_context=MAX_CONTEXT, chunk_size=7)
    manifest = read_manifest(folder)
    for layer, info in enumerate(manifest.layers):
        if info.window > 0:
            assert session.cache_capacity(layer) * 3 <= len(prompt)
    differences = decode_differences(session, checkpoint, prompt, DECODED_TOKENS)
    assert max(differences) <= LOGITS_RELATIVE, differences


def test_the_window_matters(exported, tmp_path):
    """The same weights without a window give other logits, and only beyond the window."""
    checkpoint, folder, window = exported
    if all(layer.window < 0 for layer in read_manifest(folder).layers):
        pytest.skip("this family has no sliding window")
    full = without_window(checkpoint, tmp_path / "full")
    prompt = prompt_of(3 * window + 5, checkpoint)
    difference = relative_difference(oracle_logits(checkpoint, prompt), oracle_logits(full, prompt))
    assert difference > 100 * LOGITS_RELATIVE


def test_gemma3_caps_no_attention_logits(tmp_path):
    """Its config has the key, and transformers' model reads it, but gives it to no attention."""
    checkpoint = tiny_checkpoint("gemma3", tmp_path / "hf", attn_logit_softcapping=1.0)
    session = ortolan.load(ortolan.export(checkpoint, tmp_path / "model", max_context=64), device="cpu").session()
    prompt = prompt_of(40, checkpoint)
    assert relative_difference(session.prefill(prompt), oracle_logits(checkpoint, prompt)[-1]) <= LOGITS_RELATIVE


def test_mistral_with_types_of_layers_is_ministral(tmp_path):
    """transformers takes it for one, too."""
    checkpoint = tiny_checkpoint("ministral", tmp_path / "hf")
    config = json.loads((checkpoint / "config.json").read_text())
    renamed = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (checkpoint / "config.json").write_text(json.dumps(config | renamed))
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert [layer.window for layer in read_manifest(folder).layers] == [-1, 12, 12, 12]
    prompt = prompt_of(40, checkpoint)
    logits = ortolan.load(folder, device="cpu").session().prefill(prompt)
    assert relative_difference(logits, oracle_logits(checkpoint, prompt)[-1]) <= LOGITS_RELATIVE


@pytest.mark.parametrize("family", ["llama_biased", "qwen2", "gemma2", "olmo2"])
def test_whole_heads_are_rotated_where_transformers_reads_no_share(family, tmp_path):
    checkpoint = tiny_checkpoint(family, tmp_path / "hf")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"partial_rotary_factor": 0.5}))
    session = ortolan.load(ortolan.export(checkpoint, tmp_path / "model", max_context=64), device="cpu").session()
    prompt = prompt_of(40, checkpoint)
    assert relative_difference(session.prefill(prompt), oracle_logits(checkpoint, prompt)[-1]) <= LOGITS_RELATIVE


LONG = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
ROPES = {
    "ministral3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5},
    "granite_swa": {"rope_type": "linear", "factor": 4.0},
    "olmo_hybrid": {"rope_type": "linear", "factor": 4.0},
    "olmo3": {"rope_type": "linear", "factor": 4.0},
    "phi3": {"rope_type": "longrope", **LONG},
}


@pytest.mark.parametrize("is_beside", [False, True], ids=["alone", "beside_rope_parameters"])
@pytest.mark.parametrize("family", ROPES)
def test_rope_scaling_comes_before_rope_parameters(family, is_beside, tmp_path):
    """So it does in transformers, where phi3 has its original length beside the rope, 4096 unless given."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} if family == "phi3" else {}
    checkpoint = tiny_checkpoint(family, tmp_path / "hf", max_position_embeddings=8192, **rope)
    config = json.loads((checkpoint / "config.json").read_text()) | {"rope_scaling": ROPES[family]}
    config.pop("original_max_position_embeddings", None)
    if not is_beside:
        del config["rope_parameters"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    session = ortolan.load(ortolan.export(checkpoint, tmp_path / "model", max_context=4160), device="cpu").session()
    prompt = prompt_of(90, checkpoint)
    assert relative_difference(session.prefill(prompt), oracle_logits(checkpoint, prompt)[-1]) <= LOGITS_RELATIVE

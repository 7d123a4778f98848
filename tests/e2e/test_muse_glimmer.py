"""The text part of Muse-Glimmer agrees with transformers' own class, in all graphs, caches and chunks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from expand_fused import expanded_folder
from parity import relative_difference
from shared_folders import shared
from tolerances import LOGITS_RELATIVE, SAME_LOGITS
from transformers import AutoConfig, AutoModelForImageTextToText

import ortolan
from ortolan.errors import CheckpointError
from ortolan.manifest import read_manifest

WINDOW, MAX_CONTEXT = 12, 256
TEXT = {
    "model_type": "muse_glimmer_text",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "sliding_window": WINDOW,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
CONFIG = {
    "architectures": ["MuseGlimmerForConditionalGeneration"],
    "model_type": "muse_glimmer",
    "out_hidden_size": 32,
    "projector_hidden_size": 32,
    "text_config": TEXT,
    "vision_config": VISION,
}
TOKENS = np.random.default_rng(1).integers(3, 131, 90).tolist()


def write_checkpoint(folder: Path) -> None:
    """Write a random checkpoint, and the logits that transformers computes of `TOKENS`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms too, whose weights would be neutral
            parameter.normal_(0.0, 0.3)
        logits = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    np.save(folder / "logits.npy", logits.numpy())


@pytest.fixture(scope="module")
def checkpoint():
    return shared("muse_glimmer", write_checkpoint)


def export(checkpoint: Path, folder: Path, **options) -> Path:
    with pytest.warns(UserWarning, match=r"without its vision_tower and .*: the model folder reads text alone"):
        return ortolan.export(checkpoint, folder, max_context=MAX_CONTEXT, chunk_size=16, **options)


def assert_agrees(session: ortolan.Session, checkpoint: Path, prompt_length: int) -> None:
    rows = [session.prefill(TOKENS[:prompt_length]), *(session.step(token) for token in TOKENS[prompt_length:])]
    expected = np.load(checkpoint / "logits.npy")[prompt_length - 1 :]
    assert relative_difference(np.stack(rows), expected) <= LOGITS_RELATIVE


@pytest.mark.parametrize("graph", ["plain", "fused"])
@pytest.mark.parametrize("chunk_size", [1, 7, WINDOW, 64])
def test_logits_agree_in_any_chunks(checkpoint, tmp_path, chunk_size, graph):
    folder = export(checkpoint, tmp_path / "model")
    assert [layer.window for layer in read_manifest(folder).layers] == [-1, WINDOW, WINDOW, WINDOW, -1]
    if graph == "fused":
        folder = expanded_folder(folder, tmp_path / "fused")
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, 70):
        session = ortolan.load(folder, device="cpu").session(chunk_size=chunk_size)
        assert_agrees(session, checkpoint, length)


def test_pages_an_eviction_and_a_saved_session_agree(checkpoint, tmp_path):
    plain = ortolan.load(export(checkpoint, tmp_path / "model"), device="cpu")
    paged = ortolan.load(export(checkpoint, tmp_path / "paged", paged=True, page_size=16), device="cpu")
    snapkv = ortolan.SnapKv(budget=24, window=8)
    sessions = [model.session(snapkv=snapkv) for model in (plain, paged)]
    rows = [session.prefill(TOKENS[:70]) for session in sessions]
    np.testing.assert_allclose(rows[0], rows[1], rtol=SAME_LOGITS, atol=SAME_LOGITS)
    assert sessions[0].physical_length(0) == 24
    sessions[0].save(tmp_path / "saved")
    sessions.append(plain.restore(tmp_path / "saved"))
    rows = [session.step(TOKENS[70]) for session in sessions]
    np.testing.assert_allclose(rows[1], rows[0], rtol=SAME_LOGITS, atol=SAME_LOGITS)
    np.testing.assert_array_equal(rows[2], rows[0])


def test_half_precision_agrees_as_far_as_it_can(checkpoint, tmp_path):
    wide = np.load(checkpoint / "logits.npy")[69]
    half = ortolan.load(export(checkpoint, tmp_path / "half", dtype="float16"), device="cpu").session()
    assert relative_difference(half.prefill(TOKENS[:70]), wide) < 100 * np.finfo(np.float16).eps
    export(checkpoint, tmp_path / "bfloat16", dtype="bfloat16")  # whose graphs are checked; no CPU kernel runs them


def test_layers_without_rope_are_those_whose_base_is_0(checkpoint, tmp_path):
    assert [layer.rope for layer in read_manifest(export(checkpoint, tmp_path / "a")).layers] == [
        None,
        *["all"] * 3,
        None,
    ]
    (tmp_path / "hf").mkdir()
    for file in checkpoint.iterdir():
        (tmp_path / "hf" / file.name).write_bytes(file.read_bytes())
    for bases, message in (([0, 1e4, 0, 0, 1e4], None), ([0, 1e4], "layer_rope_theta lists 2 layers")):
        text = CONFIG | {"text_config": TEXT | {"layer_rope_theta": bases}}
        (tmp_path / "hf" / "config.json").write_text(json.dumps(text))
        if message is None:
            layers = read_manifest(export(tmp_path / "hf", tmp_path / "b")).layers
            assert [layer.rope for layer in layers] == [None, "all", None, None, "all"]
        else:
            with pytest.raises(CheckpointError, match=message):
                ortolan.export(tmp_path / "hf", tmp_path / "c")

"""The text part of Gemma 3 models that also see images agrees with transformers' own class."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import relative_difference
from safetensors.torch import load_file, save_file
from tolerances import LOGITS_RELATIVE
from transformers import AutoConfig, Gemma3ForConditionalGeneration

import ortolan
from ortolan.manifest import read_manifest

TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "sliding_window": 20,
}
TINY = {
    "vocab_size": 131,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CONFIG = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "mm_tokens_per_image": 4,
    "text_config": TEXT | TINY,
    "vision_config": VISION,
}


def write_checkpoint(folder: Path, config: dict) -> Gemma3ForConditionalGeneration:
    """Write a random checkpoint, with the config as it is given; returns transformers' model of it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model = Gemma3ForConditionalGeneration(AutoConfig.from_pretrained(folder, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms too, whose weights would be neutral
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return model


def export(checkpoint: Path, folder: Path, **options) -> Path:
    with pytest.warns(UserWarning, match=r"without its vision_tower and multi_modal_projector: .* reads text alone"):
        return ortolan.export(checkpoint, folder, chunk_size=16, **options)


def assert_agrees(model: Gemma3ForConditionalGeneration, folder: Path, vocabulary: int) -> None:
    tokens = np.random.default_rng(1).integers(3, vocabulary, 90).tolist()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    session = ortolan.load(folder, device="cpu").session()
    rows = [session.prefill(tokens[:70]), *(session.step(token) for token in tokens[70:])]
    assert relative_difference(np.stack(rows), expected[69:]) <= LOGITS_RELATIVE


def test_logits_agree_and_nothing_of_the_vision_tower_is_kept(tmp_path):
    model = write_checkpoint(tmp_path / "hf", CONFIG)
    folder = export(tmp_path / "hf", tmp_path / "model", max_context=256)
    assert_agrees(model, folder, 131)
    manifest = read_manifest(folder)
    assert manifest.eos_token_ids == (1, 106)
    assert [layer.window for layer in manifest.layers] == [20, -1, 20, 20]


def test_names_of_tensors_with_the_model_before_them_are_read_alike(tmp_path):
    write_checkpoint(tmp_path / "hf", CONFIG)
    first = export(tmp_path / "hf", tmp_path / "first", max_context=64)
    path = tmp_path / "hf" / "model.safetensors"
    prefixes = {"language_model.model.": "model.language_model.", "vision": "model.vision", "multi": "model.multi"}
    renamed = {}
    for name, tensor in load_file(path).items():
        old = next(prefix for prefix in prefixes if name.startswith(prefix))
        renamed[prefixes[old] + name.removeprefix(old)] = tensor
    save_file(renamed, path)
    second = export(tmp_path / "hf", tmp_path / "second", max_context=64)
    assert (second / "model.onnx.data").read_bytes() == (first / "model.onnx.data").read_bytes()


def test_a_published_config_leaves_out_what_is_as_always(tmp_path):
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    model = write_checkpoint(tmp_path / "hf", CONFIG | {"text_config": TEXT | scaling})
    folder = export(tmp_path / "hf", tmp_path / "model")
    assert_agrees(model, folder, 262208)
    assert read_manifest(folder).max_context == 32768

"""The text part of Mistral 3 and Ministral 3 models that also see images agrees with transformers' own class."""

import json

import numpy as np
import pytest
import torch
from parity import relative_difference
from tolerances import LOGITS_RELATIVE
from transformers import AutoConfig, Mistral3ForConditionalGeneration

import ortolan
from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.manifest import read_manifest

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
TEXTS = {
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 20},
    "ministral3": {"model_type": "ministral3", **SIZES, "rope_parameters": YARN},
}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
TOKENS = np.random.default_rng(1).integers(3, 131, 90).tolist()


def write_checkpoint(folder, text, **changes):
    """Write a random checkpoint, with the config as it is given; returns transformers' model of it."""
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": VISION,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model = Mistral3ForConditionalGeneration(AutoConfig.from_pretrained(folder, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms too, whose weights would be neutral
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    written = {key: value for key, value in (config | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(written))
    return model


@pytest.mark.parametrize("kind", TEXTS)
def test_logits_agree_and_nothing_of_the_vision_tower_is_kept(tmp_path, kind):
    model = write_checkpoint(tmp_path / "hf", TEXTS[kind])
    with pytest.warns(UserWarning, match=r"without its vision_tower and multi_modal_projector: .* reads text alone"):
        folder = ortolan.export(tmp_path / "hf", tmp_path / "model", max_context=256, chunk_size=16)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    session = ortolan.load(folder, device="cpu").session()
    rows = [session.prefill(TOKENS[:70]), *(session.step(token) for token in TOKENS[70:])]
    assert relative_difference(np.stack(rows), expected[69:]) <= LOGITS_RELATIVE
    assert {layer.window for layer in read_manifest(folder).layers} == {TEXTS[kind].get("sliding_window", -1)}


def test_embeddings_that_may_be_the_head_are_not_taken_for_it(tmp_path):
    """A checkpoint with a head whose config.json does not say whether it is the embeddings."""
    model = write_checkpoint(tmp_path / "hf", TEXTS["mistral"], tie_word_embeddings=...)
    with pytest.warns(UserWarning, match="without its vision_tower"):
        folder = ortolan.export(tmp_path / "hf", tmp_path / "model", max_context=64)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS[:40]]), use_cache=False).logits[0, -1].numpy()
    logits = ortolan.load(folder, device="cpu").session().prefill(TOKENS[:40])
    assert relative_difference(logits, expected) <= LOGITS_RELATIVE


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ({"model_type": "qwen3"}, UnsupportedModelError, "text_config.model_type is 'qwen3'; supported: mistral, "),
        (TEXTS["ministral3"] | {"rope_parameters": {"rope_theta": 1e4}}, CheckpointError, "llama_4_scaling_beta"),
    ],
)
def test_texts_are_refused_by_key(tmp_path, text, error, message):
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        ortolan.export(tmp_path / "hf", tmp_path / "model", weights="random")

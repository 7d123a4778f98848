"""Gemma 4 as it is published: whole checkpoints, both spellings of configs, and caches of its own shape."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from families import shared_checkpoint, shared_model, tiny_checkpoint
from masked_oracle import Visibility
from parity import relative_difference
from safetensors.torch import load_file, save_file
from tolerances import LOGITS_RELATIVE
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import ortolan
from ortolan import SnapKv
from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.manifest import read_manifest

TEXT = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "max_position_embeddings": 1024,
}
SMALL = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131, "num_kv_shared_layers": 2}
LARGE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0}
TINY_TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WHOLE = {
    "Gemma4ForConditionalGeneration": {
        "model_type": "gemma4",
        "text_config": {"model_type": "gemma4_text", "use_double_wide_mlp": True} | TEXT | SMALL,
        "vision_config": {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8, **TINY_TOWER},
        "audio_config": {"model_type": "gemma4_audio", "output_proj_dims": 16, **TINY_TOWER},
    },
    "Gemma4UnifiedForConditionalGeneration": {
        "model_type": "gemma4_unified",
        "text_config": {"model_type": "gemma4_unified_text"} | TEXT | LARGE,
        "vision_config": {"model_type": "gemma4_unified_vision", "mm_embed_dim": 48, "output_proj_dims": 48},
        "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 32},
    },
}


def draw_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, count).tolist()


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Draw every parameter, norms too, and the scalars of layers."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model.eval()


def edit_config(folder: Path, **changes) -> None:
    """Change keys of config.json; `...` takes one away."""
    path = folder / "config.json"
    keys = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in keys.items() if value is not ...}))


@pytest.mark.parametrize("architecture", WHOLE)
def test_the_text_part_of_a_whole_checkpoint_agrees_and_the_rest_is_left_out(tmp_path, architecture):
    config = {"architectures": [architecture], "eos_token_id": [1, 106], **WHOLE[architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = AutoConfig.from_pretrained(tmp_path, attn_implementation="eager")
    model = randomize(AutoModelForImageTextToText.from_config(whole))
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"without its vision_\w+ and .*embed_audio: .* reads text alone"):
        folder = ortolan.export(tmp_path / "hf", tmp_path / "model", max_context=256, chunk_size=16)
    tokens = draw_tokens(90)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    session = ortolan.load(folder, device="cpu").session()
    rows = [session.prefill(tokens[:70]), *(session.step(token) for token in tokens[70:])]
    assert relative_difference(np.stack(rows), expected[69:]) <= LOGITS_RELATIVE
    assert read_manifest(folder).eos_token_ids == (1, 106)


@pytest.mark.parametrize(
    ("family", "published"),
    [
        ("gemma4", {"global_head_dim": 32}),
        ("gemma4_unified", {"global_head_dim": 32, "num_global_key_value_heads": 1}),
        ("gemma4_moe", {"global_head_dim": 32, "num_global_key_value_heads": 1}),
    ],
)
def test_published_configs_and_those_of_transformers_5_say_the_same(tmp_path, family, published):
    checkpoint = tiny_checkpoint(family, tmp_path / "hf", seed=5)
    folders = [ortolan.export(checkpoint, tmp_path / "written", max_context=64)]
    assert "per_layer_config" in json.loads((checkpoint / "config.json").read_text())
    edit_config(checkpoint, per_layer_config=..., rope_parameters=None, **published)
    folders.append(ortolan.export(checkpoint, tmp_path / "published", max_context=64))
    for name in ("model.onnx", "model.fused.onnx", "model.onnx.data"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_keys_and_values_of_layers_that_share_a_cache_are_not_read(tmp_path):
    checkpoint = tiny_checkpoint("gemma4", tmp_path / "hf", seed=5)
    first = ortolan.export(checkpoint, tmp_path / "first", max_context=64)
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    for layer, like in ((4, 2), (6, 3)):
        for module in ("k_proj", "v_proj", "k_norm"):
            name = f"self_attn.{module}.weight"
            tensors[f"model.layers.{layer}.{name}"] = tensors[f"model.layers.{like}.{name}"].clone()
    save_file(tensors, path)
    second = ortolan.export(checkpoint, tmp_path / "second", max_context=64)
    assert (first / "model.onnx.data").read_bytes() == (second / "model.onnx.data").read_bytes()
    tensors["model.layers.0.self_attn.other.weight"] = torch.zeros(3)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.other\.weight"):
        ortolan.export(checkpoint, tmp_path / "third", max_context=64)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "use_bidirectional_attention is 'all'"),
        ({"vocab_size_per_layer_input": 100}, UnsupportedModelError, "vocab_size_per_layer_input is 100; .* 131"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, UnsupportedModelError, "layer 1 its own sliding_window"),
        ({"num_kv_shared_layers": 6}, CheckpointError, "num_kv_shared_layers is 6, which leaves no full_attention"),
        ({"num_kv_shared_layers": 9}, CheckpointError, "no full_attention and no sliding_attention layer of 7"),
        ({"num_kv_shared_layers": -1}, CheckpointError, "num_kv_shared_layers is -1; expected a positive integer"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(tmp_path, changes, error, message):
    checkpoint = tiny_checkpoint("gemma4", tmp_path / "hf", seed=5)
    edit_config(checkpoint, **changes)
    with pytest.raises(error, match=message):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert not (tmp_path / "model").exists()


def test_layers_that_share_a_cache_take_no_memory():
    folder = shared_model(shared_checkpoint("gemma4", seed=5), max_context=512, chunk_size=16)
    session = ortolan.load(folder, device="cpu").session()
    owners = [None, None, None, None, 2, 2, 3]
    assert [layer.cache_of for layer in session.plan.layers] == owners
    assert [layer.kind for layer in session.plan.layers] == ["ring", "full"] * 2 + ["shared"] * 3
    assert all(layer.bytes == layer.full_length_bytes == 0 for layer in session.plan.layers[4:])
    session.prefill(draw_tokens(100))
    for layer, owner in enumerate(owners):
        own = layer if owner is None else owner
        assert session.cache_capacity(layer) == session.cache_capacity(own)
        assert session.physical_length(layer) == session.physical_length(own)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
@pytest.mark.parametrize("paged", [False, True])
def test_sinks_rings_and_evictions_agree_with_transformers(family, paged):
    """Layers that share an evicted cache see what its owner keeps."""
    checkpoint, tokens, rows = shared_checkpoint(family, seed=5), draw_tokens(200), {}
    folder = shared_model(checkpoint, max_context=512, chunk_size=16, sink=3, paged=paged)
    session = ortolan.load(folder, device="cpu").session(snapkv=SnapKv(budget=40, window=8, sink=3))
    visibility = Visibility(session, len(tokens))
    for begin, end in ((0, 120), (140, 160)):
        rows[end - 1] = session.prefill(tokens[begin:end])
        visibility.note_eviction(session)
        rows |= {position: session.step(tokens[position]) for position in range(end, end + 20)}
    expected = visibility.logits(checkpoint, tokens)
    assert session.stats.evictions == 2
    differences = [relative_difference(row, expected[position]) for position, row in rows.items()]
    assert max(differences) <= LOGITS_RELATIVE, differences


OWN_SHAPE = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 16384,
}
CONTEXT = 9216


def own_shape_folder(tmp_path: Path, **options) -> Path:
    """Export random weights with the head size and the window of E2B's rings; the last layer becomes a full one."""
    config = AutoConfig.for_model(
        **{"model_type": "gemma4_text", **TEXT, **SMALL, **OWN_SHAPE, "num_kv_shared_layers": 0}
    )
    randomize(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "hf")
    return ortolan.export(tmp_path / "hf", tmp_path / "model", max_context=CONTEXT, chunk_size=2048, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", "float32"), pytest.param("cuda", "bfloat16", marks=pytest.mark.cuda)]
)
def test_rings_of_its_own_shape_hold_a_long_context(tmp_path, device, dtype):
    """A context of 9,216 tokens in chunks, against token by token; the rings wrap several times in both."""
    model = ortolan.load(own_shape_folder(tmp_path, dtype=dtype), device=device)
    tokens = draw_tokens(CONTEXT)
    one_by_one, chunked = model.session(chunk_size=1), model.session()
    differences = []
    for begin, end in ((0, 511), (511, 4000), (4000, 4001), (4001, CONTEXT)):
        rows = [session.prefill(tokens[begin:end]) for session in (one_by_one, chunked)]
        differences.append(relative_difference(*rows))
    assert one_by_one.cache_capacity(0) < chunked.cache_capacity(0) < CONTEXT // 3
    assert max(differences) <= (LOGITS_RELATIVE if dtype == "float32" else 10 * 2.0**-8), differences

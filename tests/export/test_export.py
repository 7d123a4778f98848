"""Exports are whole or absent, and refuse what they cannot do right."""

import json

import numpy as np
import pytest
import torch
from edited_checkpoints import edit_config, edit_tensors
from families import FAMILIES, tiny_checkpoint
from parity import relative_difference
from safetensors.torch import load_file, save_file
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan import SnapKv
from ortolan.errors import CheckpointError, ConfigError, StorageError, UnsupportedModelError
from ortolan.manifest import read_manifest

PROMPT = list(range(3, 40))


@pytest.fixture
def checkpoint(tmp_path):
    return tiny_checkpoint("qwen3", tmp_path / "hf")


def logits(folder):
    return ortolan.load(folder, device="cpu").session().prefill(PROMPT)


def assert_nothing_written(tmp_path):
    assert [p.name for p in tmp_path.iterdir() if p.name != "hf"] == []


def test_shards_equal_one_file(checkpoint, tmp_path):
    whole = logits(ortolan.export(checkpoint, tmp_path / "whole", max_context=64))
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, checkpoint / file)
    index = {"weight_map": {n: f for f, part in halves.items() for n in part}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint / "model.safetensors").unlink()
    np.testing.assert_array_equal(logits(ortolan.export(checkpoint, tmp_path / "shards", max_context=64)), whole)
    (checkpoint / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing"):
        ortolan.export(checkpoint, tmp_path / "gone")


def test_a_single_file_comes_before_an_index(checkpoint, tmp_path):
    """As in transformers: a folder that was saved twice may have both."""
    alone = logits(ortolan.export(checkpoint, tmp_path / "alone", max_context=64))
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "gone.safetensors"}}')
    np.testing.assert_array_equal(logits(ortolan.export(checkpoint, tmp_path / "both", max_context=64)), alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_are_widened(checkpoint, tmp_path, dtype):
    edit_tensors(checkpoint, lambda t: t.update({k: v.to(dtype) for k, v in t.items()}))
    narrow = logits(ortolan.export(checkpoint, tmp_path / "narrow", max_context=64))
    edit_tensors(checkpoint, lambda t: t.update({k: v.float() for k, v in t.items()}))
    np.testing.assert_array_equal(logits(ortolan.export(checkpoint, tmp_path / "wide", max_context=64)), narrow)


@pytest.mark.parametrize("cache_dtype", [None, "float16"])
@pytest.mark.parametrize("weight_format", [None, "dense"])
def test_the_three_types_have_names_of_their_own(checkpoint, tmp_path, weight_format, cache_dtype):
    folder = ortolan.export(
        checkpoint,
        tmp_path / "model",
        dtype="float16",
        max_context=64,
        weight_format=weight_format,
        cache_dtype=cache_dtype,
    )
    manifest = read_manifest(folder)
    assert (manifest.dtype, manifest.weight_format, manifest.cache_dtype) == ("float16", "dense", "float16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_format": "int3"}, "weight_format is 'int3'; allowed: dense"),
        ({"weight_format": ""}, "weight_format is ''; allowed: dense"),
        ({"cache_dtype": "int4"}, "cache_dtype is 'int4'; allowed: None, 'float16'"),
        ({"cache_dtype": "float32"}, "cache_dtype is 'float32'; allowed: None, 'float16'"),
    ],
)
def test_formats_and_cache_types_that_are_not_there_are_refused(checkpoint, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        ortolan.export(checkpoint, tmp_path / "model", dtype="float16", **options)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes_are_written(checkpoint, tmp_path, dtype):
    folder = ortolan.export(checkpoint, tmp_path / dtype, dtype=dtype, max_context=64)
    assert read_manifest(folder).dtype == dtype


@pytest.mark.parametrize("family", ["qwen3", "cohere2", "gemma4_moe", "laguna", "ministral3"])
def test_float16_runs_on_the_cpu(family, tmp_path):
    checkpoint = tiny_checkpoint(family, tmp_path / "hf")
    wide = logits(ortolan.export(checkpoint, tmp_path / "wide", max_context=64))
    half = logits(ortolan.export(checkpoint, tmp_path / "half", dtype="float16", max_context=64))
    assert relative_difference(half, wide) < 100 * np.finfo(np.float16).eps


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_random_weights_need_only_the_config(family, tmp_path):
    checkpoint = tiny_checkpoint(family, tmp_path / "hf")
    (checkpoint / "model.safetensors").unlink()
    first = logits(ortolan.export(checkpoint, tmp_path / "a", max_context=64, weights="random"))
    np.testing.assert_array_equal(
        logits(ortolan.export(checkpoint, tmp_path / "b", max_context=64, weights="random")), first
    )


def test_old_spellings_give_the_same_model(tmp_path):
    """transformers 4 wrote rope_theta, rope_scaling, rope_local_base_freq and sliding_window_pattern."""
    checkpoint = tiny_checkpoint("gemma3", tmp_path / "hf")
    new = logits(ortolan.export(checkpoint, tmp_path / "new", max_context=64))
    edit_config(
        checkpoint,
        rope_parameters=...,
        rope_theta=100000.0,
        rope_local_base_freq=1000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    np.testing.assert_array_equal(logits(ortolan.export(checkpoint, tmp_path / "old", max_context=64)), new)
    edit_config(checkpoint, layer_types=..., sliding_window_pattern=2)
    windows = [x.window for x in read_manifest(ortolan.export(checkpoint, tmp_path / "pattern", max_context=64)).layers]
    assert windows == [20, -1, 20, -1]


def test_sinks_reach_every_layer(checkpoint, tmp_path):
    folder = ortolan.export(checkpoint, tmp_path / "sinks", max_context=512, chunk_size=16, sink=3)
    long = list(range(3, 120)) * 2
    session = ortolan.load(folder, device="cpu").session()
    with_sinks = session.prefill(long)
    plain = ortolan.load(ortolan.export(checkpoint, tmp_path / "plain", max_context=512), device="cpu").session()
    assert relative_difference(with_sinks, plain.prefill(long)) > 10 * LOGITS_RELATIVE
    one_chunk = ortolan.load(folder, device="cpu").session(chunk_size=300).prefill(long)
    assert relative_difference(with_sinks, one_chunk) <= LOGITS_RELATIVE


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["DbrxForCausalLM"]}, UnsupportedModelError, r"DbrxForCausalLM; supported: Cohere2F"),
        (
            {"architectures": ["GraniteMoeHybridForCausalLM"]},
            UnsupportedModelError,
            r"Hybrid\w+: .*Mamba-2 .*mamba_n_heads",
        ),
        ({"architectures": ["Mamba2ForCausalLM"]}, UnsupportedModelError, "Mamba2ForCausalLM: .*Mamba-2"),
        ({"architectures": ["Gemma3nForCausalLM"]}, UnsupportedModelError, "Gemma3nForCausalLM: .*altup_num_inputs"),
        ({"architectures": ["NemotronForCausalLM"]}, UnsupportedModelError, "`ortolan convert` makes a model folder"),
        ({"architectures": ...}, UnsupportedModelError, "none"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantized"),
        ({"hidden_act": "relu6"}, UnsupportedModelError, "relu6"),
        ({"head_dim": 12}, UnsupportedModelError, "head size 12"),
        ({"num_key_value_heads": 3}, UnsupportedModelError, "not a multiple"),
        ({"layer_types": ["chunked_attention"] * 4}, UnsupportedModelError, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "lists 1 layers"),
        ({"hidden_size": "x"}, CheckpointError, "hidden_size"),
        ({"architectures": "LlamaForCausalLM"}, CheckpointError, "architectures"),
        ({"hidden_act": ["silu"]}, UnsupportedModelError, "hidden_act"),
        ({"eos_token_id": "x"}, CheckpointError, "eos_token_id"),
        ({"bos_token_id": 1.5}, CheckpointError, "bos_token_id"),
        ({"rms_norm_eps": float("nan")}, CheckpointError, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, CheckpointError, "rms_norm_eps"),
        ({"layer_types": 4}, CheckpointError, "layer_types"),
        ({"tie_word_embeddings": "false"}, CheckpointError, "tie_word_embeddings"),
        ({"max_window_layers": "x"}, CheckpointError, "max_window_layers"),
        ({"rope_parameters": []}, CheckpointError, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": 0.0}}, CheckpointError, "rope_theta"),
        ({"rope_parameters": {"rope_type": ["default"]}}, UnsupportedModelError, "RoPE type"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2}}, CheckpointError, "factor"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, CheckpointError, "partial_rotary_factor"),
        ({"vocab_size": 200}, CheckpointError, "contradicts config.json"),
        ({"num_hidden_layers": 5, "layer_types": ...}, CheckpointError, "lacks the tensor model.layers.4"),
        ({"num_hidden_layers": 3, "layer_types": ...}, CheckpointError, "does not explain"),
    ],
)
def test_configs_are_refused_before_anything_is_written(checkpoint, tmp_path, changes, error, message):
    edit_config(checkpoint, **changes)
    with pytest.raises(error, match=message):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert_nothing_written(tmp_path)


def test_weights_that_float16_does_not_hold_are_named(checkpoint, tmp_path):
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e6
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.down\.weight has values that float16 does not hold"):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64, dtype="float16")


def test_texts_end_at_the_end_tokens_of_both_configs(checkpoint, tmp_path):
    """Chat models often name the end of a turn in generation_config.json alone."""
    edit_config(checkpoint, eos_token_id=2)
    for name, generation, expected in (("a", {"eos_token_id": [9, 2, 7]}, (2, 9, 7)), ("b", {}, (2,))):
        (checkpoint / "generation_config.json").write_text(json.dumps(generation))
        folder = ortolan.export(checkpoint, tmp_path / name, max_context=64)
        assert read_manifest(folder).eos_token_ids == expected


@pytest.mark.parametrize("content", ["[]", "{", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}'])
def test_a_damaged_generation_config_is_named(checkpoint, tmp_path, content):
    (checkpoint / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "header", "short", "dtype", "garbage_index"])
def test_damaged_checkpoints_are_refused(checkpoint, tmp_path, damage):
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[:-100])
    elif damage == "header":
        path.write_bytes(data[:8] + b"#" + data[9:])
    elif damage == "short":
        path.write_bytes(data[:5])
    elif damage == "dtype":
        edit_tensors(checkpoint, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}))
    else:
        path.rename(checkpoint / "model-00001-of-00001.safetensors")
        (checkpoint / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="safetensors"):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, [1]),
        (None, None),
        ("dtype", ["F32"]),
        ("shape", ["x"]),
        ("shape", [None, 4]),
        ("shape", [2**70, 1]),
        ("shape", [-1, 4]),
        ("data_offsets", [None, 4]),
        ("data_offsets", ["0", 4]),
        ("data_offsets", [-4, 0]),
        ("data_offsets", [1, 2, 3]),
    ],
)
def test_headers_that_are_none_are_refused(checkpoint, tmp_path, key, value):
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    if key is None:
        header = value
    else:
        header["lm_head.weight"][key] = value
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(CheckpointError, match="safetensors"):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert_nothing_written(tmp_path)


def test_the_manifest_tells_a_chosen_chunk_from_the_default(checkpoint, tmp_path):
    chunks = {None: (2048, False), 2048: (2048, True), 16: (16, True)}
    for number, (given, expected) in enumerate(chunks.items()):
        manifest = read_manifest(ortolan.export(checkpoint, tmp_path / str(number), max_context=64, chunk_size=given))
        assert (manifest.chunk_size, manifest.chunk_chosen) == expected


def test_a_folder_that_does_not_say_who_chose_its_chunk_keeps_it(checkpoint, tmp_path):
    path = ortolan.export(checkpoint, tmp_path / "model", max_context=64) / "ortolan.json"
    keys = json.loads(path.read_text())
    del keys["chunk_chosen"]
    path.write_text(json.dumps(keys))
    assert read_manifest(path.parent).chunk_chosen


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "int4"},
        {"max_context": 0},
        {"chunk_size": -1},
        {"sink": -1},
        {"snapkv_window": 1.5},
        {"weights": "none"},
        {"max_context": 2**31},
        {"snapkv_window": 2**31},
        {"paged": "no"},
        {"page_size": 48},
        {"page_size": np.array([16, 32])},
        {"dtype": np.dtype("float32")},
        {"weights": np.array(["random", "none"])},
        {"fuse": "no"},
        {"overwrite": "no"},
        {"sink": 64, "max_context": 64},
    ],
)
def test_arguments_are_refused(checkpoint, tmp_path, arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        ortolan.export(checkpoint, tmp_path / "model", **arguments)
    assert_nothing_written(tmp_path)


def test_the_shortest_context_is_what_the_default_eviction_takes(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"^max_context is 1; it must be a whole number in 2 \.\. "):
        ortolan.export(checkpoint, tmp_path / "model", max_context=1)
    model = ortolan.load(ortolan.export(checkpoint, tmp_path / "model", max_context=2), device="cpu")
    session = model.session(snapkv=SnapKv(budget=1, window=1, sink=0))
    session.prefill([5, 6])
    assert session.stats.evictions == 1


def test_a_failed_write_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    def full_disk(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ortolan.export.folder.build_evict_model", full_disk)
    with pytest.raises(StorageError, match="nothing was kept"):
        ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("name", [b"model", None, 5, "model\0"])
def test_what_is_no_path_is_refused(checkpoint, tmp_path, name):
    for paths, named in (((name, tmp_path / "model"), "hf_dir"), ((checkpoint, name), "out_dir")):
        with pytest.raises(ConfigError, match=named):
            ortolan.export(*paths, max_context=64)
    for paths, named in (((name, tmp_path / "model"), "source"), ((checkpoint, name), "target")):
        with pytest.raises(ConfigError, match=named):
            ortolan.convert(*paths)
    with pytest.raises(ConfigError, match="folder"):
        ortolan.load(name)
    assert_nothing_written(tmp_path)


def test_progress_reaches_the_total(checkpoint, tmp_path):
    seen = []
    ortolan.export(
        checkpoint,
        tmp_path / "model",
        max_context=64,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1]
    assert sorted(seen) == seen


def test_a_context_beyond_the_model_warns(checkpoint, tmp_path):
    with pytest.warns(UserWarning, match="max_position_embeddings 1024"):
        ortolan.export(checkpoint, tmp_path / "model", max_context=4096)

"""Converted models compute what their sources do, and are whole or absent."""

from __future__ import annotations

import json

import foreign
import numpy as np
import onnx
import pytest
from conversions import (
    CHUNK,
    DECODED_TOKENS,
    LIMIT,
    PROMPT_TOKENS,
    SPECS,
    WINDOW,
    expected_rows,
    prompt_of,
    rows_of,
)
from fake_cuda import make_session
from foreign import Foreign
from parity import relative_difference
from tolerances import LOGITS_RELATIVE, ROUNDED_ACTIVATIONS_RELATIVE

import ortolan
from ortolan.errors import CapacityError, CheckpointError, ConfigError, OrtolanError, UnsupportedModelError
from ortolan.manifest import FUSED_FILE, read_manifest


def assert_nothing_written(tmp_path):
    assert [path.name for path in tmp_path.iterdir() if path.name != "source"] == []


def test_logits_and_greedy_tokens_are_the_sources(converted):
    spec, source, folder = converted
    prompt = prompt_of(PROMPT_TOKENS)
    session = ortolan.load(folder, device="cpu").session()
    rows, tokens = rows_of(session, prompt, DECODED_TOKENS)
    expected = expected_rows(source, spec, tokens, len(prompt))
    assert relative_difference(rows, expected) <= LOGITS_RELATIVE
    assert rows.argmax(1).tolist() == expected.argmax(1).tolist()
    for layer, window in enumerate(spec.windows):
        if window > 0:
            assert session.cache_capacity(layer) < PROMPT_TOKENS / 2  # the ring wrapped


def test_short_prompts_and_later_turns(converted):
    spec, source, folder = converted
    model = ortolan.load(folder, device="cpu")
    for count in (1, WINDOW - 1, WINDOW, WINDOW + 1, LIMIT - 1, LIMIT, LIMIT + 1):
        session = model.session()
        first = session.prefill(prompt_of(count))
        assert relative_difference(first, foreign.source_logits(source, prompt_of(count))[-1]) <= LOGITS_RELATIVE
        whole = prompt_of(count) + prompt_of(9, seed=1)
        second = session.prefill(whole[count:])
        assert relative_difference(second, foreign.source_logits(source, whole)[-1]) <= LOGITS_RELATIVE
    assert spec.windows == tuple(layer.window for layer in read_manifest(folder).layers)


def test_int4_with_rounded_activations_runs(tmp_path):
    """Activations rounded to 8 bits turn last bits into steps of the grid, so logits agree within that grid."""
    spec = Foreign(int4=True, accuracy_level=4)
    source = foreign.write(spec, tmp_path / "source")
    session = ortolan.load(ortolan.convert(source, tmp_path / "model", max_context=64), device="cpu").session()
    rows, tokens = rows_of(session, prompt_of(30), 4)
    assert relative_difference(rows, expected_rows(source, spec, tokens, 30)) <= ROUNDED_ACTIVATIONS_RELATIVE


def test_float16_stays_float16(tmp_path):
    source = foreign.write(Foreign(dtype=np.float16), tmp_path / "source")
    folder = ortolan.convert(source, tmp_path / "model", max_context=64)
    assert read_manifest(folder).dtype == "float16"
    logits = ortolan.load(folder, device="cpu").session().prefill(prompt_of(30))
    assert logits.dtype == np.float32
    expected = foreign.source_logits(source, prompt_of(30))[-1]
    assert relative_difference(logits, expected) < 100 * np.finfo(np.float16).eps


def test_norms_inside_attention_are_those_outside(tmp_path):
    outside = foreign.write(Foreign(head_norm=True, packed=False), tmp_path / "outside")
    inside = foreign.write(Foreign(head_norm=True, packed=False, norm_inside=True), tmp_path / "inside")
    logits = ortolan.load(ortolan.convert(inside, tmp_path / "model"), device="cpu").session().prefill(prompt_of(30))
    assert relative_difference(logits, foreign.source_logits(outside, prompt_of(30))[-1]) <= LOGITS_RELATIVE


@pytest.mark.parametrize("name", ["gemma2", "last_gather", "last_slice", "phi3_long"])
def test_an_engine_serves_a_paged_conversion(name, tmp_path):
    source = foreign.write(SPECS[name], tmp_path / "source")
    single = ortolan.load(ortolan.convert(source, tmp_path / "single", max_context=256), device="cpu")
    paged = ortolan.convert(source, tmp_path / "paged", max_context=256, paged=True, page_size=16)
    prompts = [prompt_of(count, seed=count) for count in (3, 40, 61)]
    with ortolan.Engine(ortolan.load(paged, device="cpu"), max_sequences=3, chunk_tokens=16) as engine:
        answers = [stream.result() for stream in [engine.submit(p, max_new_tokens=8) for p in prompts]]
    assert [list(answer) for answer in answers] == [
        list(single.session().generate(p, max_new_tokens=8)) for p in prompts
    ]


def test_snapkv_evicts_full_attention_layers_alone(tmp_path):
    source = foreign.write(SPECS["gemma2"], tmp_path / "source")
    model = ortolan.load(ortolan.convert(source, tmp_path / "model", max_context=256), device="cpu")
    prompt = prompt_of(100)
    session = model.session(snapkv=ortolan.SnapKv(budget=32, window=8))
    logits = session.prefill(prompt)
    np.testing.assert_array_equal(logits, model.session().prefill(prompt))
    assert session.physical_length(1) == 32
    kept = session.kept_positions(1)
    assert kept.shape == (2, 32)
    assert (kept[:, -8:] == np.arange(92, 100)).all()
    assert np.isfinite(session.step(5)).all()


@pytest.mark.parametrize("name", ["llama", "gemma2", "rope_standard"])
def test_a_second_reading_evicts_and_ends_with_the_tables(name, tmp_path):
    """In pieces of 16 tokens of a prompt and 4 in front of them; tables of angles end at the longest context."""
    source = foreign.write(SPECS[name], tmp_path / "source")
    model = ortolan.load(ortolan.convert(source, tmp_path / "model", max_context=128, chunk_size=32), device="cpu")
    eviction = ortolan.Eviction(policy="kvzip", budget=32, window=8, sink=2, piece=16, lead=4)
    session, prompt = model.session(eviction=eviction), prompt_of(100)
    np.testing.assert_array_equal(session.prefill(prompt), model.session().prefill(prompt))
    assert session.stats.reread_tokens == 100 + 4 * 6
    kept = session.kept_positions(1)
    assert (kept >= 0).sum() == len(kept) * 32
    for row in kept:
        assert {0, 1, *range(92, 100)} <= set(row.tolist())
    assert np.isfinite(session.step(5)).all()
    longest = model.session(eviction=eviction)
    with pytest.raises(CapacityError, match="read at most 112,"):
        longest.prefill(prompt_of(113))
    longest.prefill(prompt_of(112))  # in shorter pieces
    assert longest.physical_length(1) < 112


@pytest.mark.parametrize("name", ["gemma2", "phi3_long", "rope_nodes_long", "int4_mistral"])
def test_device_sessions_agree_with_the_host(name, tmp_path, monkeypatch):
    """On a device of NumPy arrays; sequences pass the limit of a first RoPE table while they decode."""
    source = foreign.write(SPECS[name], tmp_path / "source", eos_token_id=[])
    model = ortolan.load(ortolan.convert(source, tmp_path / "model", max_context=128, chunk_size=CHUNK), device="cpu")
    expected = list(model.session().generate(prompt_of(LIMIT - 8), 20))
    assert list(make_session(model, monkeypatch).generate(prompt_of(LIMIT - 8), 20)) == expected
    assert len(expected) == 20


def test_sinks_keep_first_positions_of_windows(tmp_path):
    source = foreign.write(SPECS["mistral"], tmp_path / "source")
    prompt = prompt_of(60)
    plain, sunk = (
        ortolan.load(ortolan.convert(source, tmp_path / str(sink), max_context=128, sink=sink), device="cpu")
        .session()
        .prefill(prompt)
        for sink in (0, 4)
    )
    assert relative_difference(sunk, plain) > 10 * LOGITS_RELATIVE


def test_a_dropped_window_is_named_and_can_be_given(tmp_path):
    window = {"sliding_window": {"window_size": WINDOW, "layers": []}}
    source = foreign.write(Foreign(), tmp_path / "source", decoder=window)
    with pytest.warns(UserWarning, match=f"sliding window of {WINDOW}"):
        ortolan.convert(source, tmp_path / "full", max_context=128)
    rings = ortolan.convert(source, tmp_path / "rings", max_context=128, chunk_size=CHUNK, sliding_window=WINDOW)
    assert [layer.window for layer in read_manifest(rings).layers] == [WINDOW, WINDOW]
    with_windows = foreign.write(SPECS["mistral"], tmp_path / "windows")  # the same weights
    logits = ortolan.load(rings, device="cpu").session().prefill(prompt_of(100))
    assert relative_difference(logits, foreign.source_logits(with_windows, prompt_of(100))[-1]) <= LOGITS_RELATIVE


def test_the_manifest_and_files_say_what_the_source_did(source, tmp_path):
    folder = ortolan.convert(source, tmp_path / "model", chunk_size=99, snapkv_window=0)
    manifest = read_manifest(folder)
    assert (manifest.architecture, manifest.vocab_size, manifest.layers[0].num_heads) == ("tiny", foreign.VOCABULARY, 4)
    assert (manifest.max_context, manifest.chunk_size, manifest.fused_model) == (1024, 99, FUSED_FILE)
    assert manifest.chunk_chosen
    assert (manifest.bos_token_id, manifest.eos_token_ids) == (1, (2, 7))
    assert not (folder / "evict.onnx").exists()
    assert ortolan.load(folder, device="cpu").tokenizer.decode([40, 41])


def test_a_graph_file_alone_is_enough(tmp_path):
    (tmp_path / "source").mkdir()
    onnx.save(foreign.build(Foreign()), tmp_path / "source" / "decoder.onnx")  # weights inside
    folder = ortolan.convert(tmp_path / "source" / "decoder.onnx", tmp_path / "model", max_context=64)
    other = foreign.write(Foreign(), tmp_path / "other")
    logits = ortolan.load(folder, device="cpu").session().prefill(prompt_of(20))
    assert relative_difference(logits, foreign.source_logits(other, prompt_of(20))[-1]) <= LOGITS_RELATIVE
    np.testing.assert_array_equal(
        ortolan.load(ortolan.convert(tmp_path / "source", tmp_path / "again"), device="cpu").session().prefill([5]),
        ortolan.load(folder, device="cpu").session().prefill([5]),
    )


def test_the_configuration_may_name_a_graph_below(source, tmp_path):
    expected = ortolan.load(ortolan.convert(source, tmp_path / "flat"), device="cpu").session().prefill(prompt_of(9))
    (source / "decoder").mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (source / name).rename(source / "decoder" / name)
    (source / "genai_config.json").write_text('{"model": {"decoder": {"filename": "decoder/model.onnx"}}}')
    logits = ortolan.load(ortolan.convert(source, tmp_path / "model"), device="cpu").session().prefill(prompt_of(9))
    np.testing.assert_array_equal(logits, expected)


def test_a_graph_in_a_folder_of_its_own_finds_tokenizer_and_end_tokens_above(source, tmp_path):
    (source / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (source / name).rename(source / "onnx" / name)
    (source / "genai_config.json").unlink()
    (source / "generation_config.json").write_text('{"eos_token_id": 9, "bos_token_id": null}')
    folder = ortolan.convert(source / "onnx" / "model.onnx", tmp_path / "model")
    assert read_manifest(folder).eos_token_ids == (9,)
    assert ortolan.load(folder, device="cpu").tokenizer.decode([40, 41])
    (source / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        ortolan.convert(source / "onnx", tmp_path / "other")


@pytest.mark.parametrize("ir_version", [3, 8])
def test_initializers_may_be_inputs_too(source, tmp_path, ir_version):
    """As PyTorch writes them with keep_initializers_as_inputs, and as graphs before IR version 4 must."""
    plain = ortolan.convert(source, tmp_path / "plain", max_context=64)
    model = onnx.load(source / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    model.ir_version = ir_version
    onnx.save(model, source / "model.onnx")
    folder = ortolan.convert(source, tmp_path / "model", max_context=64)
    assert (folder / "model.onnx.data").read_bytes() == (plain / "model.onnx.data").read_bytes()
    graphs = [onnx.load(each / "model.onnx", load_external_data=False).graph for each in (plain, folder)]
    assert graphs[0] == graphs[1]
    assert len(ortolan.load(folder, device="cpu").session().prefill(prompt_of(9))) == foreign.VOCABULARY


def test_the_source_is_not_changed(source, tmp_path):
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    ortolan.convert(source, tmp_path / "model")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_progress_reaches_the_total(source, tmp_path):
    seen: list[tuple[int, int]] = []
    ortolan.convert(source, tmp_path / "model", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_context": 0},
        {"max_context": 1025},
        {"chunk_size": 0},
        {"sink": -1},
        {"sink": 1024},
        {"snapkv_window": 1.5},
        {"sliding_window": -1},
        {"page_size": 20},
    ],
)
def test_arguments_are_refused(source, tmp_path, arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        ortolan.convert(source, tmp_path / "model", **arguments)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("rope", ["attention", "nodes", "lookups"])
def test_the_context_ends_where_the_tables_do(rope, tmp_path):
    source = foreign.write(Foreign(rope=rope, positions=100), tmp_path / "source", context_length=1000)
    with pytest.raises(ConfigError, match="max_context 101 is more than the 100 positions of the graph's RoPE tables"):
        ortolan.convert(source, tmp_path / "model", max_context=101)
    assert_nothing_written(tmp_path)
    assert read_manifest(ortolan.convert(source, tmp_path / "model")).max_context == 100


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("{", CheckpointError, r"^\S+ cannot be read: Expecting"),
        ("[]", CheckpointError, r"^\S+ cannot be read: found a list, expected an object"),
        ('{"model": 3}', CheckpointError, "expected an object"),
        ('{"model": {"decoder": []}}', CheckpointError, "'decoder' is a list"),
        ('{"model": {"eos_token_id": "x"}}', CheckpointError, "eos_token_id"),
        ('{"model": {"decoder": {"pipeline": []}}}', UnsupportedModelError, "several graphs"),
        ('{"model": {"decoder": {"filename": "gone.onnx"}}}', ConfigError, r"gone\.onnx does not exist"),
        ('{"model": {"decoder": {"inputs": {"input_ids": "ids"}}}}', UnsupportedModelError, "no input 'ids'"),
        ('{"model": {"decoder": {"outputs": {"logits": "scores"}}}}', UnsupportedModelError, "no output 'scores'"),
    ],
)
def test_configurations_are_refused(source, tmp_path, config, error, message):
    (source / "genai_config.json").write_text(config)
    with pytest.raises(error, match=message):
        ortolan.convert(source, tmp_path / "model")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "missing", "garbage", "outside", "length"])
def test_damaged_sources_are_refused(source, tmp_path, damage):
    data = source / "model.onnx.data"
    model = onnx.load(source / "model.onnx", load_external_data=False)
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:-10])
    elif damage == "missing":
        data.unlink()
    elif damage == "garbage":
        (source / "model.onnx").write_bytes(b"no model at all")
    else:
        key, value = ("location", "../secret") if damage == "outside" else ("length", "12")
        for entry in model.graph.initializer[0].external_data:
            if entry.key == key:
                entry.value = value
        (source / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(OrtolanError):
        ortolan.convert(source, tmp_path / "model")
    assert_nothing_written(tmp_path)


def test_a_failed_write_leaves_nothing(source, tmp_path, monkeypatch):
    def full_disk(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ortolan.export.conversion.write_foreign_weights", full_disk)
    with pytest.raises(OrtolanError, match="nothing was kept"):
        ortolan.convert(source, tmp_path / "model")
    assert_nothing_written(tmp_path)


def test_existing_folders_are_safe(source, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"not empty|something else"):
            ortolan.convert(source, target, overwrite=overwrite)
    (target / "notes.txt").unlink()
    ortolan.convert(source, target, max_context=64)
    with pytest.raises(ConfigError, match="already"):
        ortolan.convert(target, tmp_path / "twice")
    ortolan.convert(source, target, max_context=96, overwrite=True)
    assert json.loads((target / "ortolan.json").read_text())["max_context"] == 96


def test_a_converted_session_is_saved_and_restored(source, tmp_path):
    model = ortolan.load(ortolan.convert(source, tmp_path / "model", max_context=64), device="cpu")
    session = model.session()
    session.prefill(prompt_of(20))
    session.save(tmp_path / "session.bin")
    np.testing.assert_array_equal(model.restore(tmp_path / "session.bin").step(5), session.step(5))

"""Sinks beside the window, and learned sink logits, against transformers with masks and a softmax to match."""

import dataclasses
import json
from shutil import copytree

import numpy as np
import pytest
import torch
from expand_fused import expanded_folder
from families import tiny_checkpoint
from masked_oracle import Visibility
from parity import decode_differences, oracle, relative_difference
from safetensors.torch import load_file, save_file
from tolerances import LOGITS_RELATIVE
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

import ortolan
from ortolan import SnapKv
from ortolan.export import registry
from ortolan.manifest import read_manifest

WINDOW = 20  # of mistral's layers, and of three of gemma3's four
PAGINGS = {"contiguous": {}, "paged": {"paged": True, "page_size": 32}}
SINKS = (1, 4, 19, 70)


def draw_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, count).tolist()


@pytest.fixture(scope="module", params=["mistral", "gemma3"])
def checkpoint(request, tmp_path_factory):
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param) / "hf", seed=3)


def export(checkpoint, folder, sink: int, paging: str, **options) -> ortolan.Model:
    target = ortolan.export(
        checkpoint, folder / paging, max_context=256, chunk_size=16, sink=sink, **PAGINGS[paging], **options
    )
    return ortolan.load(target, device="cpu", num_threads=1)


def read_everything(session: ortolan.Session, tokens: list[int], cuts: list[int]) -> dict[int, np.ndarray]:
    """Prefill up to each cut, then step to the end; returns logits by position."""
    rows, begin = {}, 0
    for end in cuts:
        rows[end - 1] = session.prefill(tokens[begin:end])
        begin = end
    return rows | {i: session.step(tokens[i]) for i in range(begin, len(tokens))}


@pytest.mark.parametrize("paging", PAGINGS)
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("chunk_size", [7, 16])
def test_the_first_positions_stay_beside_the_window(checkpoint, tmp_path, sink, paging, chunk_size):
    """Lengths around the first wrap of the ring, and far beyond it."""
    session = export(checkpoint, tmp_path, sink, paging).session(chunk_size=chunk_size)
    tokens = draw_tokens(230)
    assert all(layer.capacity < len(tokens) for layer in session.plan.layers if layer.kind == "ring")
    rows = read_everything(session, tokens, [sink + WINDOW - 1, sink + WINDOW, sink + WINDOW + 1, 150, 215])
    expected = Visibility(session, len(tokens)).logits(checkpoint, tokens)
    differences = {i: relative_difference(row, expected[i]) for i, row in rows.items()}
    assert max(differences.values()) <= LOGITS_RELATIVE, differences


def test_sinks_change_what_is_read_and_only_past_the_window(checkpoint, tmp_path):
    tokens = draw_tokens(60)
    sessions = [export(checkpoint, tmp_path / str(sink), sink, "contiguous").session() for sink in (0, 4)]
    plain, sunk = (read_everything(session, tokens, [WINDOW]) for session in sessions)
    np.testing.assert_array_equal(sunk[WINDOW - 1], plain[WINDOW - 1])
    assert all(relative_difference(sunk[i], plain[i]) > 10 * LOGITS_RELATIVE for i in range(2 * WINDOW, 60))


@pytest.mark.parametrize("paging", PAGINGS)
def test_window_and_sinks_that_cover_everything_equal_full_attention(checkpoint, tmp_path, paging):
    """The oracle's window is as wide as the context; its layers keep their ropes."""
    sink, decoded = 90, 18
    full = copytree(checkpoint, tmp_path / "full")
    config = json.loads((full / "config.json").read_text())
    (full / "config.json").write_text(json.dumps(config | {"sliding_window": 1024}))
    session = export(checkpoint, tmp_path, sink, paging).session()
    prompt = draw_tokens(sink + WINDOW - decoded)
    differences = decode_differences(session, full, prompt, decoded)
    assert max(differences) <= LOGITS_RELATIVE, differences


@pytest.mark.parametrize("paging", PAGINGS)
def test_sinks_survive_rewinds_and_evictions(tmp_path, paging):
    checkpoint = tiny_checkpoint("gemma3", tmp_path / "hf", seed=3, num_key_value_heads=2)
    model = export(checkpoint, tmp_path, 4, paging)
    session = model.session(snapkv=SnapKv(budget=30, window=8, sink=2))
    tokens = draw_tokens(160)
    session.prefill(tokens[:100])
    visibility = Visibility(session, len(tokens))
    visibility.note_eviction(session)
    for token in draw_tokens(5, 1):
        session.step(token)
    session.rewind(100)
    rows = {i: session.step(tokens[i]) for i in range(100, 160)}
    expected = visibility.logits(checkpoint, tokens)
    differences = {i: relative_difference(row, expected[i]) for i, row in rows.items()}
    assert max(differences.values()) <= LOGITS_RELATIVE, differences


class LearnedSinks:
    """A checkpoint with a sink logit per query head, which no supported family has, and its oracle."""

    def __init__(self, family: str, folder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tiny_checkpoint(family, folder, seed=3)
        path = self.folder / "model.safetensors"
        torch.manual_seed(0)
        self.logits = {f"model.layers.{i}.self_attn.sinks": 3 * torch.randn(4) for i in range(4)}
        save_file(load_file(path) | self.logits, path)
        monkeypatch.setattr(registry, "FAMILIES", {k: self.with_sinks(v) for k, v in registry.FAMILIES.items()})
        for module in (modeling_llama, modeling_mistral):
            monkeypatch.setattr(module, "eager_attention_forward", modeling_gpt_oss.eager_attention_forward)
        for i, layer in enumerate(oracle(self.folder).model.layers):
            layer.self_attn.sinks = torch.nn.Parameter(self.logits[f"model.layers.{i}.self_attn.sinks"])

    @staticmethod
    def with_sinks(family):
        def read(config, max_context):
            plain = family.read(config, max_context)
            mixers = [dataclasses.replace(layer.mixer, learned_sinks=True) for layer in plain.layers]
            pairs = zip(plain.layers, mixers, strict=True)
            return dataclasses.replace(
                plain, layers=tuple(dataclasses.replace(layer, mixer=mixer) for layer, mixer in pairs)
            )

        return dataclasses.replace(family, read=read)


@pytest.mark.parametrize("paging", PAGINGS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_learned_sinks_join_every_softmax(tmp_path, monkeypatch, family, paging):
    learned = LearnedSinks(family, tmp_path / "hf", monkeypatch)
    model = export(learned.folder, tmp_path, 0, paging)
    tokens = draw_tokens(120)
    session = model.session()
    rows = read_everything(session, tokens, [50, 100])
    expected = Visibility(session, len(tokens)).logits(learned.folder, tokens)
    assert max(relative_difference(row, expected[i]) for i, row in rows.items()) <= LOGITS_RELATIVE
    fused = ortolan.load(expanded_folder(model.folder, tmp_path / "fused"), device="cpu").session()
    assert relative_difference(fused.prefill(tokens), expected[-1]) <= LOGITS_RELATIVE


def test_learned_sinks_are_float32_whatever_the_models_type(tmp_path, monkeypatch):
    learned = LearnedSinks("mistral", tmp_path / "hf", monkeypatch)
    models = [export(learned.folder, tmp_path / t, 4, "contiguous", dtype=t) for t in ("float32", "float16")]
    wide, half = (model.session().prefill(draw_tokens(100)) for model in models)
    assert relative_difference(half, wide) < 100 * np.finfo(np.float16).eps
    assert read_manifest(models[1].folder).sink == 4


@pytest.mark.parametrize("paging", PAGINGS)
def test_sinks_change_nothing_where_every_layer_sees_everything(tmp_path, paging):
    checkpoint = tiny_checkpoint("llama", tmp_path / "hf", seed=3)
    plain, sunk = (export(checkpoint, tmp_path / str(sink), sink, paging).session() for sink in (0, 9))
    tokens = draw_tokens(100)
    rows = [read_everything(session, tokens, [3, 9, 60]) for session in (plain, sunk)]
    np.testing.assert_equal(rows[1], rows[0])

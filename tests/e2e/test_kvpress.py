"""Kept positions are those of kvpress's SnapKV, AdaKV and ExpectedAttention, on the same weights and prompt."""

import json
from pathlib import Path

import kvpress_oracle
import numpy as np
import pytest
import torch
from expected_reference import expected_scores
from families import FAMILIES, HYBRIDS, shared_model, tiny_checkpoint
from parity import oracle
from tolerances import SCORE_TIES
from transformers import AutoModelForCausalLM

import ortolan
from ortolan import Eviction
from ortolan.retrieval import Task, load_corpus, make_sample

SHIPPED = Path(ortolan.__file__).parent / "models" / "retriever"
PROMPT = 300
# Families whose queries kvpress itself can restate: no norm over the whole projection, whole heads rotated.
KVPRESS_FAMILIES = ("llama", "llama_biased", "llama_linear", "mistral", "qwen2", "qwen3", "gemma3")
CASES = [(32, 5, 80), (32, 7, 120), (64, 5, 100), (64, 7, 200)]  # window, kernel, budget


def full_attention_checkpoint(family: str, folder: Path) -> Path:
    """Make a tiny checkpoint with sharp attention and no ties, whose layers all attend to everything.

    Those of Gemma 4 and MiMo-V2-Flash stay as they are: their full layers have heads of their own.
    """
    overrides = {"query_pre_attn_scalar": 16} if family == "gemma3" else {}
    overrides |= {"num_key_value_heads": 2}
    tiny_checkpoint(family, folder, seed=5, **overrides)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if "per_layer_config" in config or family == "mimo_v2_flash":
        return folder
    if "layer_types" in config:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    elif config.get("use_sliding_window"):
        config["use_sliding_window"] = False
    elif "sliding_window" in config:
        config["sliding_window"] = None
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=[*(name for name in FAMILIES if name not in HYBRIDS), "retriever"])
def prompted(request, tmp_path_factory):
    """A checkpoint, its export, and a prompt."""
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "retriever":
        folder = shared_model(SHIPPED, max_context=2048, chunk_size=256)
        model = ortolan.load(folder, device="cpu", num_threads=1)
        return SHIPPED, model, model.tokenizer.encode(make_sample(load_corpus("eval"), Task(length=900, seed=1)).prompt)
    checkpoint = full_attention_checkpoint(request.param, root / "hf")
    folder = ortolan.export(checkpoint, root / "model", max_context=512, chunk_size=64)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    return checkpoint, model, np.random.default_rng(0).integers(3, 131, PROMPT).tolist()


def kept_by_ours(model, prompt, **options) -> dict[int, list[np.ndarray]]:
    session = model.session(snapkv=Eviction(**{"sink": 0} | options))
    session.prefill(prompt)
    layers = [i for i, layer in enumerate(model.manifest.layers) if layer.evictable]
    assert layers
    return {i: [row[row >= 0] for row in session.kept_positions(i)] for i in layers}


@pytest.mark.parametrize(("window", "kernel", "budget"), CASES)
def test_kept_positions_equal_the_formula_on_transformers_attention(prompted, window, kernel, budget):
    checkpoint, model, prompt = prompted
    projected = kvpress_oracle.project(oracle(checkpoint), prompt)
    for policy, keep in (("snapkv", kvpress_oracle.keep_snapkv), ("adakv", kvpress_oracle.keep_adakv)):
        ours = kept_by_ours(model, prompt, policy=policy, window=window, kernel=kernel, budget=budget)
        for layer, got in ours.items():
            scores = kvpress_oracle.snapkv_scores(projected[layer], window, kernel)
            wanted = keep(scores, budget)
            assert kvpress_oracle.differ_by_ties(got, wanted, scores, SCORE_TIES), (policy, layer)
            assert any(row[0] < len(prompt) - budget for row in wanted), "the latest alone were kept"


@pytest.mark.parametrize("queries", [32, 10_000])
def test_expected_attention_keeps_what_its_formula_keeps(prompted, queries):
    """With room for them, all queries but those of sinks are learnt from, as kvpress does."""
    checkpoint, model, prompt = prompted
    projected = kvpress_oracle.project(oracle(checkpoint), prompt)
    options = {"policy": "expected", "window": 1, "queries": queries, "sink": 4}
    ours = kept_by_ours(model, prompt, budget=80, **options)
    first = max(len(prompt) - queries, 4)
    for layer, got in ours.items():
        rope, seen = model.manifest.layers[layer].rope, projected[layer]
        scores = expected_scores(
            seen.query[:, first:].transpose(0, 1).numpy(),
            first,
            seen.key.numpy(),
            seen.value.numpy(),
            inv_freq=np.array(model.manifest.ropes[rope][0] if rope else ()),
            sink=4,
            scale=seen.scale,
        )
        scores[:, :4] = scores[:, -1:] = scores.max() + 1
        assert kvpress_oracle.differ_by_ties(got, kvpress_oracle.keep_snapkv(scores, 80), scores, SCORE_TIES)


class PressCalls:
    """Calls a kvpress press in every attention layer of a prefill, with what kvpress's own hook hands over."""

    def __init__(self, folder: Path, token_ids: list[int]) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.calls = []
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb
            layer.self_attn.register_forward_hook(self._note, with_kwargs=True)
        with torch.no_grad():
            model(torch.tensor([token_ids]), use_cache=True)

    def _note(self, module, args, kwargs, output) -> None:
        cache = kwargs["past_key_values"].layers[module.layer_idx]
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.calls.append((module, hidden, cache.keys.clone(), cache.values.clone(), None, kwargs))

    def scores(self, press, layer: int) -> np.ndarray:
        with torch.no_grad():
            return press.score(*self.calls[layer])[0].numpy()

    def kept_by_adakv(self, press, layer: int) -> list[np.ndarray]:
        module, _, keys, *_ = self.calls[layer]
        with torch.no_grad():
            press.compress(*self.calls[layer])
        _, heads, positions = (indices.numpy() for indices in module.masked_key_indices)
        everything = np.arange(keys.shape[2])
        return [np.setdiff1d(everything, positions[heads == head]) for head in range(keys.shape[1])]


@pytest.fixture
def pressed(request, tmp_path):
    """A model, a prompt, and kvpress's calls on it, where kvpress is installed.

    It asks for older transformers than these tests do, so it is no dependency of them.
    """
    pytest.importorskip("kvpress", reason="kvpress is not installed; the formulas are restated in this folder")
    checkpoint = SHIPPED if request.param == "retriever" else full_attention_checkpoint(request.param, tmp_path / "hf")
    model = ortolan.load(ortolan.export(checkpoint, tmp_path / "model", max_context=512, chunk_size=64), device="cpu")
    prompt = np.random.default_rng(1).integers(3, 131, PROMPT).tolist()
    return model, prompt, PressCalls(checkpoint, prompt)


@pytest.mark.parametrize("pressed", [*KVPRESS_FAMILIES, "retriever"], indirect=True)
@pytest.mark.parametrize(("window", "kernel", "budget"), CASES)
def test_kept_positions_equal_kvpress_itself(pressed, window, kernel, budget):
    from kvpress.presses.adakv_press import AdaKVPress
    from kvpress.presses.snapkv_press import SnapKVPress

    model, prompt, calls = pressed
    ratio = 1 - (budget + 0.5) / PROMPT  # kvpress rounds the kept count down
    press = SnapKVPress(compression_ratio=ratio, window_size=window, kernel_size=kernel)
    options = {"window": window, "kernel": kernel, "budget": budget}
    for layer, got in kept_by_ours(model, prompt, **options).items():
        scores = calls.scores(press, layer)
        assert kvpress_oracle.differ_by_ties(got, kvpress_oracle.keep_snapkv(scores, budget), scores, SCORE_TIES)
    for layer, got in kept_by_ours(model, prompt, policy="adakv", **options).items():
        wanted = calls.kept_by_adakv(AdaKVPress(press), layer)
        assert kvpress_oracle.differ_by_ties(got, wanted, calls.scores(press, layer), SCORE_TIES)


# Of the others, kvpress's press asks for a rotary embedding that all layers share.
@pytest.mark.parametrize("pressed", [name for name in KVPRESS_FAMILIES if name != "gemma3"], indirect=True)
def test_expected_attention_equals_kvpress_itself(pressed):
    from kvpress.presses.expected_attention_press import ExpectedAttentionPress

    model, prompt, calls = pressed
    press = ExpectedAttentionPress(compression_ratio=0.5)
    options = {"policy": "expected", "window": 1, "queries": PROMPT, "sink": press.n_sink, "budget": 80}
    for layer, got in kept_by_ours(model, prompt, **options).items():
        scores = calls.scores(press, layer).copy()
        scores[:, -1] = scores.max() + 1
        assert kvpress_oracle.differ_by_ties(got, kvpress_oracle.keep_snapkv(scores, 80), scores, SCORE_TIES)

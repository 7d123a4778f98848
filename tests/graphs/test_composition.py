"""Layers are compositions: they may differ in heads, windows and MLPs, share caches, and take MLPs of new kinds."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnxruntime
import pytest
from expand_fused import expand_fused
from parity import relative_difference
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan import contract
from ortolan.errors import ConfigError
from ortolan.export.families.base import Family, Source
from ortolan.export.registry import FAMILIES
from ortolan.graphs.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, QueryScale, Rope, RopeVariant
from ortolan.graphs.kinds import LayerKind, linear_shapes
from ortolan.graphs.mlps import MLPS
from ortolan.graphs.weights import joint_weights, weight_shapes
from ortolan.manifest import FUSED_FILE, MODEL_FILE, read_manifest

VOCABULARY, HIDDEN, SLOTS, EPSILON = 61, 32, 64, 1e-5
ROPES = tuple(
    Rope(name=name, variants=(RopeVariant(limit=SLOTS, inv_freq=tuple(base ** -np.linspace(0, 1, pairs))),))
    for name, base, pairs in (("wide", 100.0, 8), ("narrow", 30.0, 4))
)


@dataclass(frozen=True)
class SquaredMlp:
    """down(relu(up(x))^2): an MLP that the package does not have."""

    size: int
    kind: str = "squared"


def add_squared(parts, index, x, residual):
    path = f"layers.{index}/mlp"
    active = parts.graph.node(f"{path}/Relu", "Relu", [parts.linear(f"{path}/up", x)])
    return parts.linear(f"{path}/down", parts.graph.node(f"{path}/Mul", "Mul", [active, active]), residual)


SQUARED = LayerKind(
    weights=lambda config, hidden: linear_shapes(
        {"mlp.up": (config.size, hidden, True), "mlp.down": (hidden, config.size, False)}
    ),
    add=add_squared,
)
FULL = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=16, rope="wide", qk_norm="head")
RING = AttentionConfig(num_heads=6, num_kv_heads=3, head_size=8, window=7, rope="narrow", scale=0.5, query_bias=True)
GATED = MlpConfig(intermediate_size=48, activation="gelu_tanh", bias=True)
LAYERS = (
    LayerConfig(mixer=FULL, mlp=GATED),
    LayerConfig(mixer=RING, mlp=SquaredMlp(40)),
    LayerConfig(mixer=replace(FULL, num_heads=2, shares_cache_with=0), mlp=SquaredMlp(24)),
    LayerConfig(mixer=replace(RING, rope=None, softcap=5.0), mlp=GATED),
    LayerConfig(mixer=replace(RING, shares_cache_with=1), mlp=GATED),
)
OWN_CACHES = tuple(layer for layer in LAYERS if layer.mixer.shares_cache_with is None)


def config_of(layers, placement="pre") -> ModelConfig:
    return ModelConfig(
        architecture="ToyForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        norm_epsilon=EPSILON,
        layers=layers,
        ropes=ROPES,
        norm_placement=placement,
    )


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """Register the MLP and a family that has it; yields what exports the family with some layers."""
    monkeypatch.setitem(MLPS, "squared", SQUARED)

    def export(layers, placement="pre", **options):
        family = Family(
            architecture="ToyForCausalLM",
            read=lambda config, max_context: config_of(layers, placement),
            sources=lambda config: {name: Source(name=name) for name in weight_shapes(config)},
        )
        monkeypatch.setitem(FAMILIES, family.architecture, family)
        (tmp_path / "hf").mkdir(exist_ok=True)
        (tmp_path / "hf" / "config.json").write_text(
            json.dumps({"architectures": [family.architecture], "initializer_range": 0.3})
        )
        target = tmp_path / f"model-{placement}"
        return ortolan.export(
            tmp_path / "hf", target, weights="random", max_context=SLOTS, chunk_size=5, overwrite=True, **options
        )

    return export


def read_weights(folder, config: ModelConfig) -> dict[str, np.ndarray]:
    """Read weights by their own names, those that the graph reads as one, too."""
    model = onnx.load(folder / MODEL_FILE)
    stored = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    shapes = weight_shapes(config)
    for whole, members in joint_weights(config).items():
        if whole in stored:
            ends = np.cumsum([shapes[member][0] for member in members])
            stored |= dict(zip(members, np.split(stored[whole], ends[:-1]), strict=True))
    return stored


def normed(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight


def rotated(x, rope):
    """Rotate heads [T, H, D] by their rows' positions."""
    angles = np.arange(len(x))[:, None, None] * np.array(rope.variants[0].inv_freq, np.float32)
    half = angles.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)


class Oracle:
    """Computes the logits of all tokens of one sequence from the config alone, in float64."""

    def __init__(self, config: ModelConfig, weights: dict[str, np.ndarray]) -> None:
        self._config, self._weights = config, weights
        self._caches: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def logits(self, tokens: list[int]) -> np.ndarray:
        weights, hidden = self._weights, self._weights["embedding.weight"][tokens]
        for index, layer in enumerate(self._config.layers):
            for name, branch in (("attention", self._attention), ("mlp", self._mlp)):
                path = f"layers.{index}.{name}"
                before = self._config.norm_placement != "post"
                y = branch(index, layer, normed(hidden, weights[f"{path}_norm.weight"]) if before else hidden)
                after = self._config.norm_placement != "pre"
                hidden = hidden + (normed(y, weights[f"{path}_post_norm.weight"]) if after else y)
        return normed(hidden, weights["final_norm.weight"]) @ weights["head.weight"].T

    def _linear(self, name, x):
        return x @ self._weights[f"{name}.weight"].T + self._weights.get(f"{name}.bias", 0.0)

    def _heads(self, index, mixer, name, count, x):
        heads = self._linear(f"layers.{index}.attention.{name}", x).reshape(len(x), count, mixer.head_size)
        if name != "value":
            if mixer.qk_norm == "head":
                heads = normed(heads, self._weights[f"layers.{index}.attention.{name}_norm.weight"])
            rope = next((rope for rope in self._config.ropes if rope.name == mixer.rope), None)
            heads = heads if rope is None else rotated(heads, rope)
        return heads

    def _attention(self, index, layer, x):
        mixer = layer.mixer
        query = self._heads(index, mixer, "query", mixer.num_heads, x)
        if mixer.shares_cache_with is None:
            self._caches[index] = tuple(self._heads(index, mixer, n, mixer.num_kv_heads, x) for n in ("key", "value"))
        own = index if mixer.shares_cache_with is None else mixer.shares_cache_with
        group = mixer.num_heads // mixer.num_kv_heads
        key, value = (np.repeat(part, group, axis=1) for part in self._caches[own])
        scores = np.einsum("thd,shd->hts", query, key) * (mixer.scale or mixer.head_size**-0.5)
        if mixer.softcap:
            scores = mixer.softcap * np.tanh(scores / mixer.softcap)
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        hidden = (distance < 0) | ((mixer.window > 0) & (distance >= mixer.window))
        scores = np.exp(np.where(hidden, -np.inf, scores))
        weights = scores / scores.sum(-1, keepdims=True)
        flat = np.einsum("hts,shd->thd", weights, value).reshape(len(x), -1)
        return self._linear(f"layers.{index}.attention.output", flat)

    def _mlp(self, index, layer, x):
        path = f"layers.{index}.mlp"
        up = self._linear(f"{path}.up", x)
        if layer.mlp.kind == "squared":
            return self._linear(f"{path}.down", np.maximum(up, 0) ** 2)
        gate = self._linear(f"{path}.gate", x)
        active = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        return self._linear(f"{path}.down", active * up)


def oracle_of(folder, config: ModelConfig) -> Oracle:
    return Oracle(config, read_weights(folder, config))


def open_graph(folder, file, sequences):
    """Open one graph of a folder; returns its session, and empty caches of some sequences."""
    runnable = folder / "run.onnx"
    runnable.write_bytes(expand_fused(onnx.load(folder / file, load_external_data=False)).SerializeToString())
    options = onnxruntime.SessionOptions()
    ortolan.custom_ops.register(options)
    session = onnxruntime.InferenceSession(runnable, options, providers=["CPUExecutionProvider"])
    shapes = {value.name: value.shape for value in session.get_inputs()}
    caches = {
        n: np.full([sequences, s[1], SLOTS, s[3]], np.nan, np.float32) for n, s in shapes.items() if "_cache" in n
    }
    captures = {n: np.zeros([sequences, 0, *s[2:]], np.float32) for n, s in shapes.items() if n.endswith(".capture")}
    return session, caches | captures


def run_step(session, state, **given):
    """Run a step; returns its logits, and the caches after it."""
    types = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
    inputs = {value.name: value for value in session.get_inputs()}
    feeds = {name: np.array(values, types[inputs[name].type]) for name, values in given.items()}
    lengths = {n: v.shape[1] for n, v in inputs.items() if n.endswith(".kv_len")}
    feeds |= {n: np.repeat(feeds["past_len"][:, None], heads, axis=1) for n, heads in lengths.items()}
    names = [output.name for output in session.get_outputs()]
    results = dict(zip(names, session.run(None, state | feeds), strict=True))
    return results[contract.LOGITS], {name: results[contract.output(name)] for name in state}


def run_graph(folder, file, tokens, chunk) -> np.ndarray:
    """Feed tokens in chunks to one graph of a folder; returns the logits of all of them."""
    session, state = open_graph(folder, file, sequences=1)
    rows = []
    for past in range(0, len(tokens), chunk):
        part = tokens[past : past + chunk]
        step = {"token_ids": part, "positions": range(past, past + len(part)), "logit_rows": range(len(part))}
        logits, state = run_step(session, state, **step, query_start=[0, len(part)], past_len=[past])
        rows.append(logits)
    return np.concatenate(rows)


TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, 33).tolist()


@pytest.mark.parametrize("file", [MODEL_FILE, FUSED_FILE])
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("snapkv_window", [0, 8])
def test_layers_of_all_kinds_compute_what_their_config_says(toy, file, placement, snapkv_window):
    folder = toy(LAYERS, placement, snapkv_window=snapkv_window)
    expected = oracle_of(folder, config_of(LAYERS, placement)).logits(TOKENS)
    for chunk in (1, 5, len(TOKENS)):
        assert relative_difference(run_graph(folder, file, TOKENS, chunk), expected) <= LOGITS_RELATIVE, chunk


@pytest.mark.parametrize("file", [MODEL_FILE, FUSED_FILE])
@pytest.mark.parametrize("placement", ["pre", "sandwich"])
@pytest.mark.parametrize("rows", [[6, 9], [4, 5, 6, 8, 9], [9], list(range(10))])
def test_layers_behind_the_last_cache_compute_the_last_rows_of_each_sequence(toy, file, placement, rows):
    """Two sequences of one step, of 7 and 3 tokens; the first has read 5 before, and a third has nothing to read."""
    folder = toy(LAYERS, placement)
    expected = oracle_of(folder, config_of(LAYERS, placement))
    first, second = TOKENS[:12], TOKENS[20:23]
    wanted = np.concatenate([expected.logits(first)[5:], expected.logits(second)])
    session, feeds = open_graph(folder, file, sequences=3)
    step = {"token_ids": first[:5], "positions": range(5), "logit_rows": [4], "query_start": [0, 5, 5, 5]}
    feeds |= run_step(session, feeds, **step, past_len=[0, 0, 0])[1]
    step = {"token_ids": [*first[5:], *second], "positions": [*range(5, 12), *range(3)], "query_start": [0, 7, 10, 10]}
    logits, _ = run_step(session, feeds, **step, logit_rows=rows, past_len=[5, 0, 0])
    assert relative_difference(logits, wanted[rows]) <= LOGITS_RELATIVE
    readers = [
        n for n in onnx.load(folder / file, load_external_data=False).graph.node if n.name.startswith("layers.4")
    ]
    narrowed = "readers/past_len/NarrowStep/output" if file == FUSED_FILE else "readers/Min/output"
    assert next(n for n in readers if n.op_type == "SwaAttention").input[3] == narrowed


def test_an_mlp_of_a_new_kind_is_exported_and_runs(toy):
    folder = toy(OWN_CACHES)
    expected = oracle_of(folder, config_of(OWN_CACHES)).logits(TOKENS)
    session = ortolan.load(folder, device="cpu").session()
    assert relative_difference(session.prefill(TOKENS), expected[-1]) <= LOGITS_RELATIVE


def test_a_shared_cache_has_one_owner(toy):
    folder = toy(LAYERS)
    layers = read_manifest(folder).layers
    assert [layer.cache_of for layer in layers] == [None, None, 0, None, 1]
    assert [layer.evictable for layer in layers] == [True, False, False, False, False]
    assert [(layer.num_heads, layer.head_size, layer.scale, layer.softcap) for layer in layers[1:4]] == [
        (6, 8, 0.5, 0.0),
        (2, 16, 0.0, 0.0),
        (6, 8, 0.5, 5.0),
    ]
    for file in (MODEL_FILE, FUSED_FILE):
        graph = onnx.load(folder / file, load_external_data=False).graph
        values = {value.name for value in (*graph.input, *graph.output)}
        assert not any(name.startswith(("layer.2.", "layer.4.")) for name in values)
        readers = {node.name: list(node.input[1:3]) for node in graph.node if node.op_type == "SwaAttention"}
        for reader, owner in ((2, 0), (4, 1)):
            updated = [contract.output(contract.key_cache(owner)), contract.output(contract.value_cache(owner))]
            assert readers[f"layers.{reader}/attention/SwaAttention"] == updated
        assert not any(
            t.name.startswith(("layers.2.attention.key", "layers.2.attention.qkv")) for t in graph.initializer
        )


def test_logits_are_those_of_the_rows_that_are_asked_for(toy):
    folder = toy(OWN_CACHES)
    options = onnxruntime.SessionOptions()
    ortolan.custom_ops.register(options)
    every = run_graph(folder, FUSED_FILE, TOKENS, len(TOKENS))
    session = onnxruntime.InferenceSession(folder / "run.onnx", options, providers=["CPUExecutionProvider"])
    feeds = {}
    for value in session.get_inputs():
        sizes = {"T": len(TOKENS), "B": 1, "B + 1": 2, "R": 3, "snapkv_window": 0}
        shape = [
            size if isinstance(size, int) else sizes.get(size, SLOTS if "slots" in size else 1) for size in value.shape
        ]
        feeds[value.name] = np.zeros(
            shape, {"tensor(int64)": np.int64, "tensor(int32)": np.int32}.get(value.type, np.float32)
        )
    feeds |= {"token_ids": np.array(TOKENS), "positions": np.arange(len(TOKENS))}
    feeds |= {"query_start": np.array([0, len(TOKENS)], np.int32), "logit_rows": np.array([32, 4, 4])}
    np.testing.assert_allclose(
        session.run(["logits"], feeds)[0], every[[32, 4, 4]], rtol=0, atol=LOGITS_RELATIVE * every.std()
    )


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (replace(FULL, shares_cache_with=1), "must be a layer before it"),
        (replace(FULL, shares_cache_with=-1), "must be a layer before it"),
        (replace(FULL, shares_cache_with=0, window=5), "window must be the same"),
        (replace(FULL, shares_cache_with=0, head_size=8), "head_size must be the same"),
        (replace(FULL, shares_cache_with=0, num_kv_heads=1), "num_kv_heads must be the same"),
        (replace(FULL, shares_cache_with=0, query_scale=QueryScale(beta=0.1, length=8)), "cannot have a query_scale"),
    ],
)
def test_caches_that_cannot_be_shared_are_refused(mixer, message):
    with pytest.raises(ConfigError, match=message):
        config_of((LAYERS[0], LayerConfig(mixer=mixer, mlp=GATED)))


def test_a_shared_cache_is_not_shared_on():
    second = replace(FULL, shares_cache_with=0)
    with pytest.raises(ConfigError, match="which has none of its own"):
        config_of(
            (
                LAYERS[0],
                LAYERS[0],
                *(LayerConfig(mixer=m, mlp=GATED) for m in (second, replace(FULL, shares_cache_with=2))),
            )
        )

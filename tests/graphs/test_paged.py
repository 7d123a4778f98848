"""Paged graphs: what verify_model refuses, and that batches and evictions equal contiguous ones bit for bit."""

import copy
import dataclasses
import json

import numpy as np
import onnx
import onnxruntime
import pytest
from evict_cases import KV_HEADS, SIZE, SLOTS, draw_feeds, run
from evict_cases import manifest as evict_manifest
from expand_fused import expanded_folder
from families import FAMILIES, tiny_checkpoint
from parity import relative_difference
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan import contract
from ortolan.errors import ConfigError, ContractMismatchError
from ortolan.graphs import build_evict_model, count_fusions, verify_model
from ortolan.manifest import FUSED_FILE, MANIFEST_FILE, MODEL_FILE, Manifest, cache_kinds, read_manifest
from ortolan.policies import Eviction

WINDOW = 20  # of gemma3's layers 0, 2 and 3
PAGE = 16


@pytest.fixture(scope="module", params=[0, 5], ids=["no sink", "sink"])
def folders(request, tmp_path_factory):
    """One model with contiguous caches, and with paged ones."""
    root = tmp_path_factory.mktemp("paged")
    checkpoint = tiny_checkpoint("gemma3", root / "hf", seed=3, num_key_value_heads=2)
    options = {"max_context": 256, "chunk_size": 16, "sink": request.param}
    contiguous = ortolan.export(checkpoint, root / "contiguous", **options)
    return contiguous, ortolan.export(checkpoint, root / "paged", paged=True, page_size=PAGE, **options)


def load_graph(folder, name=MODEL_FILE):
    return onnx.load(folder / name, load_external_data=False)


def test_the_manifest_says_which_layers_share_a_table(folders):
    contiguous, paged = (read_manifest(folder) for folder in folders)
    assert (contiguous.paged, contiguous.page_size, contiguous.cache_kinds) == (False, 0, ())
    assert (paged.paged, paged.page_size) == (True, PAGE)
    kinds = {kind.name: (kind.window, kind.layers, kind.block_table) for kind in paged.cache_kinds}
    assert kinds == {
        "window_20": (WINDOW, (0, 2, 3), "block_table.window_20"),
        "full": (-1, (1,), "block_table.full"),
    }
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in load_graph(folders[1]).graph.input}
    assert shapes["layer.0.key_cache"][2] == PAGE
    assert {name for name in shapes if name.startswith("block_table")} == {
        "block_table.full",
        "block_table.window_20",
    }
    assert not any("block_table" in i.name for i in load_graph(folders[0]).graph.input)


@pytest.mark.parametrize("changes", [{"cache_kinds": []}, {"page_size": 24}, {"paged": False}])
def test_a_manifest_that_contradicts_itself_is_refused(folders, changes):
    raw = json.loads((folders[1] / MANIFEST_FILE).read_text()) | changes
    with pytest.raises((ContractMismatchError, ConfigError)):
        Manifest.from_json(json.dumps(raw))


def no_table(node, graph):
    node.input[5] = ""


def others_table(node, graph):
    node.input[5] = contract.block_table("full")


def unknown_table(node, graph):
    node.input[5] = "layer.1.kv_len"


def free_page_size(node, graph):
    for value in graph.input:
        if value.name.startswith("layer.0.") and value.name.endswith("_cache"):
            value.type.tensor_type.shape.dim[2].dim_param = "P"


@pytest.mark.parametrize("break_it", [no_table, others_table, unknown_table, free_page_size])
@pytest.mark.parametrize("name", [MODEL_FILE, FUSED_FILE])
def test_broken_paging_is_refused(folders, name, break_it):
    model = copy.deepcopy(load_graph(folders[1], name))
    verify_model(model)
    attends = "SwaAttention" if name == MODEL_FILE else "QkvAttention"
    node = next(n for n in model.graph.node if n.name == f"layers.0/attention/{attends}")
    break_it(node, model.graph)
    with pytest.raises(ContractMismatchError, match="rule 8"):
        verify_model(model)


@pytest.mark.parametrize("append", ["RingKvAppend", "QkvAttention"])
@pytest.mark.parametrize(("layer", "own", "other"), [(0, "window_20", "full"), (1, "full", "window_20")])
def test_an_append_through_another_layers_table_is_refused(folders, append, layer, own, other):
    name, port = (MODEL_FILE, 6) if append == "RingKvAppend" else (FUSED_FILE, 5)
    model = load_graph(folders[1], name)
    node = next(n for n in model.graph.node if n.name == f"layers.{layer}/attention/{append}")
    assert node.input[port] == contract.block_table(own)
    node.input[port] = contract.block_table(other)
    problem = "appended to through" if append == "RingKvAppend" else "has window .* and the block table"
    with pytest.raises(ContractMismatchError, match=rf"rule 8.*{problem} '{contract.block_table(other)}'"):
        verify_model(model)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fused_paged_graphs_compute_what_plain_ones_do(family, tmp_path, draw_prompt):
    checkpoint = tiny_checkpoint(family, tmp_path / "hf", seed=5)
    options = {"max_context": 256, "chunk_size": 16, "sink": 3}
    paged = ortolan.export(checkpoint, tmp_path / "paged", paged=True, page_size=PAGE, **options)
    plain = ortolan.export(checkpoint, tmp_path / "plain", **options)
    assert count_fusions(load_graph(paged, FUSED_FILE)) == count_fusions(load_graph(plain, FUSED_FILE))
    prompt = draw_prompt(77)
    folders = (plain, paged, expanded_folder(paged, tmp_path / "fused"))
    rows = [ortolan.load(folder, device="cpu").session().prefill(prompt) for folder in folders]
    np.testing.assert_array_equal(rows[1], rows[0])
    assert relative_difference(rows[2], rows[0]) <= LOGITS_RELATIVE


@pytest.fixture
def draw_prompt():
    def draw(count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(3, 131, count).tolist()

    return draw


class PackedCaches:
    """Caches of B sequences in shuffled pages of shared pools, and the steps that the graph runs on them."""

    def __init__(self, folder, sequences: int, ring_pages: int, full_pages: int) -> None:
        self.manifest, rng = read_manifest(folder), np.random.default_rng(0)
        options = onnxruntime.SessionOptions()
        ortolan.custom_ops.register(options)
        path = str(folder / MODEL_FILE)
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.past = np.zeros(sequences, np.int32)
        self.caches = {}
        self.tables = {}
        for kind in self.manifest.cache_kinds:
            width = full_pages if kind.window < 0 else ring_pages
            pool = sequences * width + 3
            pages = rng.permutation(pool)[: sequences * width].reshape(sequences, width)
            self.tables[kind.block_table] = pages.astype(np.int32)
            for i in kind.layers:
                for name in (contract.key_cache(i), contract.value_cache(i)):
                    self.caches[name] = np.full((pool, 2, PAGE, 16), np.nan, np.float32)

    def step(self, chunks: list[list[int]]) -> np.ndarray:
        """Feed a chunk of each sequence; returns logits [B, V]."""
        counts = np.array([len(chunk) for chunk in chunks], np.int32)
        feeds = {
            contract.TOKEN_IDS: np.concatenate(chunks).astype(np.int64),
            contract.POSITIONS: np.concatenate([p + np.arange(n) for p, n in zip(self.past, counts, strict=True)]),
            contract.QUERY_START: np.cumsum([0, *counts]).astype(np.int32),
            contract.PAST_LEN: self.past,
            contract.LOGIT_ROWS: np.cumsum(counts, dtype=np.int64) - 1,
            contract.kv_len(1): np.repeat(self.past[:, None], 2, axis=1),
            contract.capture(1): np.zeros((len(chunks), 0, 4, 16), np.float32),
            **self.caches,
            **self.tables,
        }
        names = [output.name for output in self.session.get_outputs()]
        results = dict(zip(names, self.session.run(None, feeds), strict=True))
        self.caches = {name: results[contract.output(name)] for name in self.caches}
        self.past = self.past + counts
        return results[contract.LOGITS]


def test_a_packed_batch_equals_each_sequence_alone(folders, draw_prompt):
    """Prompts of many lengths, cut anyhow and packed with decode steps of others, in one pool of pages."""
    contiguous = ortolan.load(folders[0], device="cpu")
    prompts = [draw_prompt(count, seed) for seed, count in enumerate((3, 50, 90, 17))]
    steps = [(3, 16, 7, 1), (1, 1, 16, 16), (1, 16, 16, 1), (1, 16, 16, 1), (1, 1, 16, 1), (1, 1, 16, 1), (1, 1, 3, 1)]
    batch = PackedCaches(folders[1], len(prompts), ring_pages=4, full_pages=8)
    fed = [0] * len(prompts)
    alone = [contiguous.session() for _ in prompts]
    for counts in steps:
        chunks = []
        for b, count in enumerate(counts):
            tokens = (prompts[b] + draw_prompt(40, 100 + b))[fed[b] : fed[b] + count]
            chunks.append(tokens)
            fed[b] += count
        logits = batch.step(chunks)
        for b, (session, chunk) in enumerate(zip(alone, chunks, strict=True)):
            expected = session.prefill(chunk)
            assert relative_difference(logits[b], expected) <= LOGITS_RELATIVE, (b, fed)


@pytest.mark.parametrize(
    "options", [{}, {"policy": "streaming"}, {"policy": "adakv"}, {"policy": "expected"}, {"granularity": "model"}]
)
def test_evictions_of_a_packed_batch_equal_contiguous_ones(options):
    """Two sequences of different lengths in shuffled pages; the table is as wide as the longer one needs."""
    rng = np.random.default_rng(1)
    plain = evict_manifest()
    paged = dataclasses.replace(plain, paged=True, page_size=PAGE, cache_kinds=cache_kinds(plain.layers))
    feeds = draw_feeds(rng, [90, 37])
    expected = run(build_evict_model(plain, Eviction(**options)), feeds)
    table = rng.permutation(14)[: 2 * SLOTS // PAGE].reshape(2, -1).astype(np.int32)
    paged_feeds = {**feeds, contract.block_table("full"): table}
    for name in [name for name in feeds if name.endswith("_cache")]:
        pool = np.full((14, KV_HEADS, PAGE, SIZE), np.nan, np.float32)
        pool[table] = feeds[name].reshape(2, KV_HEADS, -1, PAGE, SIZE).swapaxes(1, 2)
        paged_feeds[name] = pool
    actual = run(build_evict_model(paged, Eviction(**options)), paged_feeds)
    for name, value in expected.items():
        found = actual[name]
        if name.endswith("_cache_out"):
            found = found[table].swapaxes(1, 2).reshape(value.shape)
        np.testing.assert_array_equal(found, value, err_msg=name)

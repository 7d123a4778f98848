"""Fused graphs take bounds of steps that need not be fed: ONNX Runtime keeps them, and takes what is bound to them."""

import numpy as np
import onnx
import onnxruntime
import pytest
from families import shared_checkpoint, shared_model

import ortolan
from ortolan import contract
from ortolan.graphs.summary import default_inputs, summarize_model
from ortolan.manifest import CPU_FILE, FUSED_FILE, MODEL_FILE

SLOTS = 64
BOUNDS = (contract.MAX_QUERY_LEN, contract.MAX_KV_LEN)
TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}


def export(family, **options):
    return shared_model(shared_checkpoint(family, seed=5), max_context=512, chunk_size=16, **options)


@pytest.fixture(scope="module")
def folder():
    """Layer 1 attends to everything, the others have a window."""
    return export("gemma3")


def open_graph(path, **options):
    settings = onnxruntime.SessionOptions()
    for name, value in options.items():
        setattr(settings, name, value)
    ortolan.custom_ops.register(settings)
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def dimension(value):
    """The size of an axis in a step of one token of one sequence."""
    sizes = {"B + 1": 2, "snapkv_window": 0}
    return value if isinstance(value, int) else SLOTS if value.startswith("slots") else sizes.get(value, 1)


def run_step(session, length, bounds=None):
    """Feed one token to a sequence, which has `length` tokens after it, by IO binding; returns all outputs."""
    given = {contract.QUERY_START: [0, 1], contract.POSITIONS: [length - 1], contract.PAST_LEN: [length - 1]}
    binding = session.io_binding()
    for value in session.get_inputs():
        array = np.zeros([dimension(size) for size in value.shape], TYPES[value.type])
        if value.name.endswith(".kv_len"):
            array[:] = length - 1
        binding.bind_cpu_input(value.name, np.array(given.get(value.name, array), array.dtype))
    for name, bound in (bounds or {}).items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(np.array([bound], np.int32)))
    for value in session.get_outputs():
        binding.bind_output(value.name)
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()


def readers(graph, name):
    """The operators that read an input, by the names of the nodes."""
    return {node.name: node.op_type for node in graph.node if name in node.input}


@pytest.mark.parametrize("name", [FUSED_FILE, CPU_FILE])
def test_all_attention_reads_the_bound_of_tokens_and_rings_none_of_lengths(folder, name):
    graph = onnx.load(folder / name, load_external_data=False).graph
    assert list(readers(graph, contract.MAX_KV_LEN)) == ["layers.1/attention/QkvAttention"]
    assert list(readers(graph, contract.MAX_QUERY_LEN)) == [f"layers.{i}/attention/QkvAttention" for i in range(4)]
    assert default_inputs(graph) == summarize_model(folder / name).default_inputs == BOUNDS
    for bound in BOUNDS:
        value = next(value for value in graph.input if value.name == bound)
        assert "Need not be fed" in value.doc_string
        default = next(tensor for tensor in graph.initializer if tensor.name == bound)
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(default), np.zeros(1, np.int32))


def test_plain_graphs_have_no_bound(folder):
    assert summarize_model(folder / MODEL_FILE).default_inputs == ()


@pytest.mark.parametrize("family", ["ministral3", "olmo2"])
def test_where_attention_stands_apart_it_reads_the_bound_of_tokens_alone(family):
    # Something is done to queries, or to projections, before they attend.
    graph = onnx.load(export(family) / FUSED_FILE, load_external_data=False).graph
    assert default_inputs(graph) == (contract.MAX_QUERY_LEN,)
    assert set(readers(graph, contract.MAX_QUERY_LEN).values()) == {"SwaAttention"}


def test_paged_graphs_have_it_too():
    folder = export("llama", paged=True, page_size=16)
    assert summarize_model(folder / FUSED_FILE).default_inputs == BOUNDS


def test_the_inputs_to_feed_are_those_of_the_plain_graph(folder):
    plain, fused = (open_graph(folder / name) for name in (MODEL_FILE, CPU_FILE))
    assert {value.name for value in fused.get_inputs()} == {value.name for value in plain.get_inputs()}
    assert plain.get_overridable_initializers() == []
    bounds = fused.get_overridable_initializers()
    assert {bound.name for bound in bounds} == set(BOUNDS)
    assert all((bound.shape, bound.type) == ([1], "tensor(int32)") for bound in bounds)


def test_onnx_runtime_neither_folds_nor_copies_them(folder, tmp_path):
    open_graph(folder / CPU_FILE, optimized_model_filepath=str(tmp_path / "optimized.onnx"), log_severity_level=3)
    graph = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph
    assert set(default_inputs(graph)) == set(BOUNDS)
    for bound in BOUNDS:
        assert set(readers(graph, bound).values()) == {"QkvAttention"}
    assert not [node.name for node in graph.node if node.op_type.startswith("Memcpy")]


def test_a_bound_value_is_taken_and_forgotten_with_its_binding(folder):
    """The CPU's operator refuses a promise that does not hold, so it shows what it read."""
    session = open_graph(folder / CPU_FILE, log_severity_level=4)
    expected = run_step(session, 9)
    for length, tokens in ((9, 1), (0, 0), (10, 2)):
        bounds = {contract.MAX_KV_LEN: length, contract.MAX_QUERY_LEN: tokens}
        for array, wanted in zip(run_step(session, 9, bounds), expected, strict=True):
            np.testing.assert_array_equal(array, wanted)
    with pytest.raises(Exception, match=r"layers.1/.*sequence 0 has 9 tokens, more than input 'max_kv_len' = 8"):
        run_step(session, 9, {contract.MAX_KV_LEN: 8})
    with pytest.raises(Exception, match=r"layers.0/.*'max_query_len' is -1; it must be at least 0"):
        run_step(session, 9, {contract.MAX_QUERY_LEN: -1})
    run_step(session, 9)

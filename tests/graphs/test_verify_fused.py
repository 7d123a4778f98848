"""verify_model accepts fused graphs, and says what is wrong with a broken one."""

import copy

import onnx
import pytest
from families import shared_checkpoint, shared_model

from ortolan.errors import ContractMismatchError
from ortolan.graphs import verify_fused_pair, verify_model
from ortolan.manifest import FUSED_FILE, MODEL_FILE


@pytest.fixture(scope="module")
def graphs():
    """The plain and the fused graph of a model with head norms, norms after branches and gated GELU."""
    folder = shared_model(shared_checkpoint("gemma3", seed=5), max_context=512, chunk_size=16)
    return tuple(onnx.load(folder / name, load_external_data=False) for name in (MODEL_FILE, FUSED_FILE))


def find(model, ending):
    return next(node for node in model.graph.node if node.name.endswith(ending))


def attribute(node, name):
    return next(a for a in node.attribute if a.name == name)


def weight(model, ending):
    return next(t for t in model.graph.initializer if t.name.endswith(ending))


def read_old_cache(model):
    find(model, "SwaAttention").input[1] = "layer.0.key_cache"


def swap_caches(model):
    node = find(model, "SwaAttention")
    node.input[1], node.input[2] = node.input[2], node.input[1]


def attend_over_what_an_append_returned(model):
    first, second = (find(model, f"layers.{i}/attention/QkvAttention") for i in range(2))
    second.input[1] = first.output[1]


def count_what_a_node_returned(model):
    node = find(model, "QkvAttention")
    model.graph.node.insert(0, onnx.helper.make_node("Identity", [node.input[4]], ["counted"], name="count"))
    node.input[4] = "counted"


def bound_a_ring(model):
    find(model, "layers.0/attention/QkvAttention").input[16] = "max_kv_len"


def bound_by_another_input(model):
    find(model, "layers.1/attention/QkvAttention").input[16] = "past_len"


def bound_tokens_by_another_bound(model):
    find(model, "layers.0/attention/QkvAttention").input[17] = "max_kv_len"


def bound_without_a_default(model):
    model.graph.initializer.remove(weight(model, "max_kv_len"))


def bound_by_a_constant(model):
    model.graph.input.remove(next(value for value in model.graph.input if value.name == "max_kv_len"))


def drop_capture(model):
    node = next(node for node in model.graph.node if node.op_type == "QkvAttention" and node.input[10])
    node.input[10] = ""


def overlap_weights(model):
    weight(model, "0.mlp.gate_up.weight").external_data[1].value = "0"


def rename_activation(model):
    attribute(find(model, "gate_up/FusedLinear"), "activation").s = b"relu"


def odd_gate(model):
    weight(model, "0.mlp.gate_up.weight").dims[0] -= 1


def drop_gate(model):
    attribute(find(model, "gate_up/FusedLinear"), "activation").s = b"none"


def ask_for_both(model):
    find(model, "mlp/down/FusedLinear").output.append("other")


def narrow_norm(model):
    weight(model, "0.attention_norm.weight").dims[0] = 8


def wrong_heads(model):
    attribute(find(model, "QkvAttention"), "num_heads").i = 3


def no_heads(model):
    attribute(find(model, "QkvAttention"), "num_heads").i = 0


def drop_sine(model):
    find(model, "QkvAttention").input[9] = ""


def norm_of_a_hidden_state(model):
    find(model, "QkvAttention").input[6] = "layers.0.attention_norm.weight"


def drop_attended(model):
    """Let what reads layer 1's attention read layer 0's."""
    first, second = (find(model, f"layers.{i}/attention/QkvAttention") for i in range(2))
    for node in model.graph.node:
        node.input[:] = [first.output[0] if name == second.output[0] else name for name in node.input]
    second.output[0] = ""


def two_rows_of_frequencies(model):
    frequencies = next(t for t in model.graph.initializer if t.name == find(model, "RopeAngles").input[1])
    frequencies.dims[:] = [2, frequencies.dims[1] // 2]


def norm_of_a_value(model):
    find(model, "attention_residual/RmsNormAdd").input[1] = find(model, "embedding/GatherRows").output[0]


def norm_of_an_input(model):
    vector = onnx.helper.make_tensor_value_info("vector", onnx.TensorProto.FLOAT, [48])
    model.graph.input.append(vector)
    find(model, "attention_residual/RmsNormAdd").input[1] = "vector"


def rows_of_other_sequences(model):
    find(model, "head/GatherRows").input[1] = "positions"


def narrow_norm_add(model):
    weight(model, "0.attention_post_norm.weight").dims[0] = 8


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (attend_over_what_an_append_returned, "rule 7.*layers.1/attention/QkvAttention.*must be inputs of one shape"),
        (count_what_a_node_returned, "rule 7.*QkvAttention: past_len 'counted' must be an input of the graph"),
        (bound_a_ring, "rule 7.*layers.0/attention/QkvAttention.*the node has a window"),
        (bound_by_another_input, "rule 7.*max_kv_len is 'past_len', not the graph's input 'max_kv_len'"),
        (bound_tokens_by_another_bound, "rule 7.*max_query_len is 'max_kv_len', not the graph's input 'max_query_len'"),
        (bound_without_a_default, "rule 7.*max_kv_len is 'max_kv_len', not the graph's input.*with a default"),
        (bound_by_a_constant, "rule 7.*max_kv_len is 'max_kv_len', not the graph's input.*with a default"),
        (drop_capture, "rule 7.*QkvAttention: capture, capture_past_len and capture_out belong together"),
        (overlap_weights, "rule 6"),
        (rename_activation, "rule 7.*gate_up/FusedLinear.*'relu'"),
        (odd_gate, "rule 7.*159 rows"),
        (drop_gate, "rule 7.*mlp/down/FusedLinear.*160 features, expected 80"),
        (ask_for_both, "rule 7.*exactly one of the outputs"),
        (narrow_norm, r"rule 7.*norm_weight 'layers.0.attention_norm.weight' must be a weight \[48\]"),
        (wrong_heads, "rule 7.*96 features, expected 80"),
        (no_heads, "rule 7.*num_heads 0"),
        (drop_sine, "rule 7.*cosine and sine"),
        (norm_of_a_hidden_state, r"rule 7.*query_norm_weight.*\[16\]"),
        (drop_attended, "rule 1.*layers.1/attention/QkvAttention.*output 0"),
        (two_rows_of_frequencies, r"rule 7.*RopeAngles: inv_freq .* has the shape \[2, .*expected \[1, R\]"),
        (norm_of_a_value, "rule 1.*'norm_weight' has rank 2"),
        (norm_of_an_input, "rule 7.*norm_weight .* must be a weight of rank 1; it is no weight"),
        (rows_of_other_sequences, "rule 7.*GatherRows: row_indices is 'positions'"),
        (narrow_norm_add, "rule 7.*RmsNormAdd.*48 features, expected 8"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_graphs_are_refused(graphs, break_it, message):
    broken = copy.deepcopy(graphs[1])
    break_it(broken)
    with pytest.raises(ContractMismatchError, match=message):
        verify_model(broken)


@pytest.fixture(scope="module")
def scaled():
    """A fused graph that scales queries between the append and attention."""
    folder = shared_model(shared_checkpoint("ministral3", seed=5), max_context=512, chunk_size=16)
    return onnx.load(folder / FUSED_FILE, load_external_data=False)


def drop_query(model):
    """Let what reads layer 1's queries read layer 0's."""
    first, second = (find(model, f"layers.{i}/attention/QkvRopeAppend") for i in range(2))
    for node in model.graph.node:
        node.input[:] = [first.output[0] if name == second.output[0] else name for name in node.input]
    second.output[0] = ""


def bound_tokens_by_a_length(model):
    find(model, "layers.0/attention/SwaAttention").input[10] = "past_len"


def no_heads_of_an_append(model):
    attribute(find(model, "QkvRopeAppend"), "num_heads").i = 0


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (read_old_cache, r"rule 5.*layers.0/attention/SwaAttention.*layer.0.key_cache"),
        (swap_caches, "rule 5.*as key cache"),
        (drop_query, "rule 1.*layers.1/attention/QkvRopeAppend.*output 0"),
        (bound_tokens_by_a_length, "rule 7.*SwaAttention: max_query_len is 'past_len', not the graph's input"),
        (no_heads_of_an_append, "rule 7.*QkvRopeAppend.*num_heads 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_operators_apart_are_refused(scaled, break_it, message):
    broken = copy.deepcopy(scaled)
    verify_model(broken)
    break_it(broken)
    with pytest.raises(ContractMismatchError, match=message):
        verify_model(broken)


def test_a_fused_graph_stands_for_its_plain_one(graphs):
    plain, fused = graphs
    verify_model(fused)
    verify_fused_pair(plain, fused)
    other = copy.deepcopy(fused)
    del other.graph.input[0]
    with pytest.raises(ContractMismatchError, match=r"inputs \['query_start'\]"):
        verify_fused_pair(plain, other)
    other = copy.deepcopy(fused)
    other.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    with pytest.raises(ContractMismatchError, match=r"outputs \['logits'\]"):
        verify_fused_pair(plain, other)


@pytest.fixture(scope="module")
def readers():
    """A fused graph whose last layers read other layers' caches."""
    folder = shared_model(shared_checkpoint("gemma4", seed=5), max_context=512, chunk_size=16)
    return onnx.load(folder / FUSED_FILE, load_external_data=False)


def norm_of_heads_is_an_input(model):
    node = find(model, "NormRope")
    (size,) = next(t.dims for t in model.graph.initializer if t.name == node.input[3])
    model.graph.input.append(onnx.helper.make_tensor_value_info("vector", onnx.TensorProto.FLOAT, [size]))
    node.input[3] = "vector"


def rows_of_positions(model):
    find(model, "NarrowStep").input[2] = "positions"


def other_starts(model):
    find(model, "NarrowStep").input[0] = "past_len"


def drop_positions(model):
    node = next(n for n in model.graph.node if n.op_type == "NarrowStep" and len(n.output) == 3)
    del node.input[3]


def factor_without_gate(model):
    attribute(find(model, "layer_input/gate/FusedLinear"), "activation").s = b"none"


def factor_beside_a_residual(model):
    node = find(model, "layer_input/gate/FusedLinear")
    node.input[4] = node.input[0]


def factor_of_few_columns(model):
    narrow = find(model, "layer_input/gate/FusedLinear").output[0]
    find(model, "layers.1/layer_input/gate/FusedLinear").input[5] = narrow


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (factor_without_gate, "rule 7.*gate/FusedLinear.*factor needs a gated activation, and no residual"),
        (factor_beside_a_residual, "rule 7.*gate/FusedLinear.*factor needs a gated activation, and no residual"),
        (factor_of_few_columns, "rule 7.*layers.1.*gate/FusedLinear.*: factor '.*' has .* features, expected"),
        (rows_of_positions, "rule 7.*NarrowStep: row_indices is 'positions'"),
        (other_starts, "rule 7.*NarrowStep: query_start is 'past_len'"),
        (drop_positions, "rule 7.*NarrowStep: positions and positions_out belong together"),
        (norm_of_heads_is_an_input, "rule 7.*NormRope: norm_weight 'vector' must be a weight"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_readers_are_refused(readers, break_it, message):
    verify_model(readers)
    broken = copy.deepcopy(readers)
    break_it(broken)
    with pytest.raises(ContractMismatchError, match=message):
        verify_model(broken)

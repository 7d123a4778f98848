"""What does not match a rewrite's pattern, uses or weight layout stays plain, and the graph stays right."""

from collections import Counter

import numpy as np
import onnx
import pytest
from families import tiny_checkpoint

import ortolan
from ortolan.errors import ContractMismatchError
from ortolan.graphs import count_fusions, fuse_model, verify_model
from ortolan.manifest import MODEL_FILE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("llama")
    return ortolan.export(tiny_checkpoint("llama", root / "hf"), root / "model", max_context=64, fuse=False)


@pytest.fixture
def plain(folder):
    return onnx.load(folder / MODEL_FILE, load_external_data=False)


def find(model, name):
    return next(node for node in model.graph.node if node.name == name)


def move_weight(model, name):
    """Let a weight lie at the end of the file."""
    entries = {e.key: e for e in next(t for t in model.graph.initializer if t.name == name).external_data}
    entries["offset"].value = str(2**24)


def read_twice(model, name):
    """Let a node's value be a graph output too."""
    value = find(model, name).output[0]
    model.graph.node.append(onnx.helper.make_node("Identity", [value], ["copy"], name="copy/Identity"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("copy", onnx.TensorProto.FLOAT, ["T", "I"]))


def set_attribute(model, name, **attributes):
    node = find(model, name)
    kept = [a for a in node.attribute if a.name not in attributes]
    del node.attribute[:]
    node.attribute.extend([*kept, *(onnx.helper.make_attribute(k, v) for k, v in attributes.items())])


def swap_angles(model):
    inputs = find(model, "layers.0/attention/key/RotaryEmbedding").input
    inputs[1], inputs[2] = inputs[2], inputs[1]


LAYER = {"FusedLinear": 4, "QkvRopeAppend": 1, "SwaAttention": 1, "Reshape": 1}
HEADS = {"Reshape": 6, "RotaryEmbedding": 2, "RingKvAppend": 1, "SnapKvCapture": 1, "QkvRopeAppend": 0}
CASES = {
    "key lies elsewhere": (
        lambda model: move_weight(model, "layers.0.attention.key.weight"),
        HEADS | {"FusedLinear": 6, "RMSNormalization": 1},
    ),
    "up lies elsewhere": (
        lambda model: move_weight(model, "layers.0.mlp.up.weight"),
        {"FusedLinear": 5, "RMSNormalization": 1, "Sigmoid": 1, "Mul": 2},
    ),
    "query and key are rotated by other angles": (swap_angles, HEADS | {"Split": 1}),
    "interleaved rotation": (
        lambda model: set_attribute(model, "layers.0/attention/query/RotaryEmbedding", interleaved=1),
        HEADS | {"Split": 1},
    ),
    "the norm has another reader": (
        lambda model: read_twice(model, "layers.0/attention_norm/RMSNormalization"),
        {"RMSNormalization": 1},
    ),
    "the query projection has another reader": (
        lambda model: read_twice(model, "layers.0/attention/query/Gemm"),
        HEADS | {"FusedLinear": 6, "RMSNormalization": 1},
    ),
    "the gate has another reader": (
        lambda model: read_twice(model, "layers.0/mlp/gate/Gemm"),
        {"FusedLinear": 5, "RMSNormalization": 1, "Sigmoid": 1, "Mul": 2},
    ),
    "the product has another reader": (
        lambda model: read_twice(model, "layers.0/mlp/down/Gemm"),
        {"Add": 1},
    ),
    "a scaled product": (
        lambda model: set_attribute(model, "layers.0/mlp/down/Gemm", alpha=2.0),
        {"FusedLinear": 3, "Gemm": 1, "Add": 1},
    ),
    "a norm of another axis": (
        lambda model: set_attribute(model, "layers.0/mlp_norm/RMSNormalization", axis=1),
        {"RMSNormalization": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rest_of_the_graph_is_fused(plain, name):
    change, expected = CASES[name]
    change(plain)
    fused = fuse_model(plain)
    verify_model(fused)
    for layer, counts in ((0, {**LAYER, **expected}), (1, LAYER)):
        found = Counter(n.op_type for n in fused.graph.node if n.name.startswith(f"layers.{layer}/"))
        assert found == Counter(counts), f"layer {layer}"


@pytest.mark.parametrize("name", ["rope.all/Mul", "rope.all/Cos", "rope.all/Sin"])
def test_angles_that_are_read_elsewhere_stay_plain(plain, name):
    assert count_fusions(fuse_model(plain))["RopeAngles"] == 1
    read_twice(plain, name)
    fused = fuse_model(plain)
    verify_model(fused)
    assert count_fusions(fused)["RopeAngles"] == 0


def set_constant(model, name, value):
    tensor = next(t for t in model.graph.initializer if t.name == name)
    array = onnx.numpy_helper.to_array(tensor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.full_like(array, value), name))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: set_constant(model, "head/one", 2),
        lambda model: set_constant(model, "slice/end", 3),
        lambda model: set_constant(model, "slice/one", 0),
        lambda model: set_attribute(model, "head/Gather", axis=1),
    ],
    ids=["rows before the last", "some sequences", "starts", "columns"],
)
def test_other_rows_than_the_last_are_gathered(plain, change):
    assert count_fusions(fuse_model(plain))["LastRows"] == 1
    change(plain)
    assert count_fusions(fuse_model(plain))["LastRows"] == 0


def test_an_unplaced_weight_is_named(plain):
    del next(t for t in plain.graph.initializer if t.name == "head.weight").external_data[:]
    with pytest.raises(ContractMismatchError, match=r"'head\.weight' does not say where its bytes lie"):
        fuse_model(plain)

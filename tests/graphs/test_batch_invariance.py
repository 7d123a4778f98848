"""What `make_batch_invariant` changes in a graph, and which graphs it refuses."""

import numpy as np
import onnx
import pytest
from families import shared_checkpoint, shared_model
from onnx import TensorProto, helper

from ortolan.errors import ConfigError
from ortolan.graphs import make_batch_invariant
from ortolan.manifest import FUSED_FILE, MODEL_FILE


def export(family, **options):
    return shared_model(shared_checkpoint(family, seed=5), max_context=64, **options)


def one_node(op_type, inputs, domain="", **attributes):
    """Build a model of one node over x [T, 4], a weight [3, 4] and whatever constants the inputs name."""
    constants = {"weight": np.ones((3, 4)), "bias": np.ones(3), "scalar": np.ones(1)}
    node = helper.make_node(op_type, inputs, ["y"], name="product", domain=domain, **attributes)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", None]) for name in ("x", "y"))
    kept = [onnx.numpy_helper.from_array(constants[n].astype(np.float32), n) for n in inputs if n in constants]
    return helper.make_model(helper.make_graph([node], "test", [x], [y], kept))


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
@pytest.mark.parametrize("family", ["llama", "llama_biased", "gemma3", "gemma4", "cohere2"])
def test_every_product_of_a_graph_is_told(family, cuda):
    model = onnx.load(export(family) / (FUSED_FILE if cuda else MODEL_FILE), load_external_data=False)
    products = sum(node.op_type in ("Gemm", "FusedLinear") for node in model.graph.node)
    make_batch_invariant(model, cuda=cuda)
    linears = [node for node in model.graph.node if node.op_type == "FusedLinear"]
    assert len(linears) == products
    for node in linears:
        assert [each.i for each in node.attribute if each.name == "batch_invariant"] == [1]
    assert not any(node.op_type in ("Gemm", "MatMul") for node in model.graph.node)
    assert {entry.domain for entry in model.opset_import} >= {node.domain for node in model.graph.node}


@pytest.mark.parametrize("inputs", [["x", "weight"], ["x", "weight", ""], ["x", "weight", "bias"]], ids=len)
def test_a_gemm_becomes_a_fused_linear(inputs):
    model = one_node("Gemm", inputs, transB=1)
    make_batch_invariant(model, cuda=False)
    (node,) = model.graph.node
    given = dict(zip(("x", "weight", "norm_weight", "bias"), node.input, strict=False))
    assert (node.op_type, node.domain, list(node.output)) == ("FusedLinear", "ortolan", ["y"])
    assert given.get("bias", "") == ("bias" if "bias" in inputs else "")
    assert not given.get("norm_weight")


@pytest.mark.parametrize(
    ("inputs", "attributes"),
    [
        (["x", "weight"], {}),
        (["x", "weight"], {"transB": 1, "alpha": 0.5}),
        (["x", "weight"], {"transB": 1, "transA": 1}),
        (["x", "weight", "scalar"], {"transB": 1}),
        (["x", "x"], {"transB": 1}),
    ],
    ids=str,
)
def test_a_gemm_of_another_kind_is_refused(inputs, attributes):
    with pytest.raises(ConfigError, match=r"operator Gemm \(node 'product'\)"):
        make_batch_invariant(one_node("Gemm", inputs, **attributes), cuda=False)


@pytest.mark.parametrize(
    ("op_type", "domain", "whose"),
    [
        ("MatMul", "", "the model's operator"),
        ("Softmax", "", "the model's operator"),
        ("MatMulNBits", "com.microsoft", "weights of few bits"),
        ("GatedDeltaRule", "ortolan", "gated delta layers"),
    ],
)
@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
def test_what_may_look_at_other_rows_is_refused(op_type, domain, whose, cuda):
    device = "CUDA" if cuda else "the CPU"
    with pytest.raises(ConfigError, match=rf"cannot be kept on {device}: .*{whose}.*{op_type}.*load the model without"):
        make_batch_invariant(one_node(op_type, ["x", "weight"], domain), cuda=cuda)


@pytest.mark.parametrize("op_type", ["LowBitLinear", "MoeExperts", "MoeGate", "LowBitExperts"])
def test_what_the_cpu_multiplies_row_by_row_is_refused_on_cuda_alone(op_type):
    make_batch_invariant(one_node(op_type, ["x", "weight"], "ortolan"), cuda=False)
    with pytest.raises(ConfigError, match=op_type):
        make_batch_invariant(one_node(op_type, ["x", "weight"], "ortolan"), cuda=True)

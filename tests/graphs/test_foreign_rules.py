"""Each rule holds: what it lets pass gives a token the same, alone or among others, in the promised shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from foreign import MICROSOFT
from onnx import TensorProto, helper, numpy_helper
from tolerances import SAME_TOKENS

from ortolan.graphs.foreign.rules import RULES, infer_rows
from ortolan.graphs.foreign.values import TOKENS, Kind, Rows, View

FEATURES, TOKENS_IN_ALL = 32, 7
BOOLEAN, COMPARISONS = ("And", "Or", "Not"), ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
PLAIN_UNARY = [
    "Abs", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log",
    "Mish", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Tanh",
    "Gelu", "Swish", "Softmax", "LogSoftmax",
]  # fmt: skip


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 2.0, shape).astype(np.float32)


def case(op: str, *constants: Any, domain: str = "", tokens: int = 1, rows: int = 1, **attributes: Any) -> Any:
    """Describe a node: `tokens` inputs that hold tokens, then constants; `rows` counts the outputs to compare."""
    return (op, constants, domain, tokens, rows, attributes)


CASES = {op: case(op) for op in PLAIN_UNARY}
CASES |= {op: case(op, tokens=2) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", *COMPARISONS)}
CASES |= {f"{op} of a constant": case(op, floats(FEATURES)) for op in ("Add", "Mul", "Pow", "Div")}
CASES |= {
    f"{op} kept": case(op, np.array([-1]), keepdims=1)
    for op in ("ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare", "ReduceProd")
}
CASES |= {
    "Mod": case("Mod", floats(FEATURES), fmod=1),
    "Clip": case("Clip", np.float32(0.7), np.float32(1.5)),
    "Cast": case("Cast", to=TensorProto.FLOAT16),
    "FastGelu": case("FastGelu", floats(FEATURES), domain=MICROSOFT),
    "BiasGelu": case("BiasGelu", floats(FEATURES), domain=MICROSOFT),
    "QuickGelu": case("QuickGelu", domain=MICROSOFT, alpha=1.0),
    "Gemm": case("Gemm", floats(5, FEATURES), floats(5), transB=1),
    "MatMul": case("MatMul", floats(FEATURES, 5)),
    "MatMulNBits": case(
        "MatMulNBits",
        np.full((6, 1, 16), 37, np.uint8),
        floats(6, 1),
        domain=MICROSOFT,
        K=32,
        N=6,
        bits=4,
        block_size=32,
    ),
    "SimplifiedLayerNormalization": case("SimplifiedLayerNormalization", floats(FEATURES), axis=-1),
    "RMSNormalization": case("RMSNormalization", floats(FEATURES), axis=2),
    "LayerNormalization": case("LayerNormalization", floats(FEATURES), floats(FEATURES, seed=1)),
    "SkipSimplifiedLayerNormalization": case(
        "SkipSimplifiedLayerNormalization", floats(FEATURES), domain=MICROSOFT, tokens=2
    ),
    "SkipLayerNormalization": case("SkipLayerNormalization", floats(FEATURES), domain=MICROSOFT, tokens=2),
    "Reshape": case("Reshape", np.array([0, -1, 8])),
    "Reshape to heads": case("Reshape", np.array([0, 0, 4, -1])),
    "Reshape to rows": case("Reshape", np.array([-1, FEATURES])),
    "Squeeze": case("Squeeze", np.array([0])),
    "Unsqueeze": case("Unsqueeze", np.array([0, 3])),
    "Transpose": case("Transpose", perm=[0, 1, 2]),
    "Split": case("Split", np.array([20, 12]), axis=-1, rows=2),
    "Split evenly": case("Split", axis=2, num_outputs=3, rows=3),
    "Slice": case("Slice", np.array([-3]), np.array([0]), np.array([-1]), np.array([-2])),
    "Concat": case("Concat", axis=-1, tokens=2),
    "ReduceSum gone": case("ReduceSum", np.array([2]), keepdims=0),
}


def build(name: str, first: Rows) -> tuple[onnx.ModelProto, View]:
    op, constants, domain, tokens, outputs, attributes = CASES[name]
    inputs = [f"tokens_{i}" for i in range(tokens)]
    names = [f"constant_{i}" for i in range(len(constants))]
    results = [onnx.ValueInfoProto(name=f"out_{i}") for i in range(outputs)]
    node = helper.make_node(op, inputs + names, [r.name for r in results], "node", domain=domain, **attributes)
    shape = ["T" if dim is None else dim for dim in first.dims]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in inputs]
    weights = [numpy_helper.from_array(np.asarray(c), n) for c, n in zip(constants, names, strict=True)]
    graph = helper.make_graph([node], "graph", values, results, weights)
    opsets = [helper.make_opsetid("", 23 if op != "Swish" else 24), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    view = View(gs.import_onnx(model).nodes[0], (*[first] * tokens, *[Kind.CONSTANT] * len(constants)), {})
    return model, view


@pytest.mark.parametrize("name", CASES)
def test_tokens_get_the_same_alone_and_among_others(name):
    outer = () if name == "Gemm" else (1,)
    model, view = build(name, Rows((*outer, None, FEATURES), FEATURES))
    promised = infer_rows(view)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    inputs = [value.name for value in session.get_inputs()]
    given = {name: floats(*outer, TOKENS_IN_ALL, FEATURES, seed=seed) for seed, name in enumerate(inputs)}
    whole = session.run(None, given)
    alone = [session.run(None, {k: v[..., t : t + 1, :] for k, v in given.items()}) for t in range(TOKENS_IN_ALL)]
    for index, rows in enumerate(promised):
        assert isinstance(rows, Rows)
        shape = [rows.pieces * TOKENS_IN_ALL if dim is None else dim for dim in rows.dims]
        assert list(whole[index].shape) == shape
        parts = whole[index].reshape(TOKENS_IN_ALL, rows.row_size)
        expected = np.array([part[index].reshape(-1) for part in alone])
        np.testing.assert_allclose(parts.astype(np.float64), expected.astype(np.float64), rtol=SAME_TOKENS)


def test_embeddings_hold_a_row_per_token():
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Gather", ["table", "ids"], ["out"], "node")],
            "graph",
            [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "T"])],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(floats(11, FEATURES), "table")],
        )
    )
    view = View(gs.import_onnx(model).nodes[0], (Kind.CONSTANT, TOKENS), {})
    assert infer_rows(view) == [Rows((1, None, FEATURES), FEATURES)]


def test_rules_without_a_case_are_tested_elsewhere():
    """Whole models run embeddings, RoPE and experts; logic and comparisons are elementwise like the others."""
    tested = {entry[0] for entry in CASES.values()} | set(BOOLEAN)
    assert set(RULES) - tested == {"Gather", "GatherBlockQuantized", "MoE", "QMoE", "RotaryEmbedding", "Where"}

"""The table of operators, what is generated from it, and the library agree."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
from harness import attention_inputs, build_model, empty_caches, random_batch

import ortolan
from ortolan.custom_ops import codegen, library_info, library_path, register_schemas
from ortolan.custom_ops.schema import OPERATORS
from ortolan.custom_ops.schema_parts import ELEMENT, FLOAT, Attribute, Operator, Port
from ortolan.errors import OpLibraryError

ROOT = Path(__file__).resolve().parents[2]


def test_generated_files_are_current():
    for path, text in codegen.generated_files(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is stale: run python -m ortolan.custom_ops.codegen"


TOY = Operator(
    name="ToyScale",
    doc="Scales rows.",
    inputs=(
        Port(name="rows", shape="[T, H]", type=ELEMENT, doc="Rows."),
        Port(name="row_scale", shape="[T]", type=FLOAT, doc="A factor per row.", optional=True),
    ),
    outputs=(Port(name="rows_out", shape="[T, H]", type=ELEMENT, doc="The rows, in place.", alias=0),),
    attributes=(
        Attribute(name="power", symbol="Pw", default=2, least=1, allowed="1 or more", doc="Of the factor."),
        Attribute(name="bias", default=0.5, least=0, allowed="0 or more", doc="Added."),
        Attribute(
            name="mode",
            default="plain_rows",
            choices=("plain_rows", "squared"),
            enumeration="ToyMode",
            allowed='"plain_rows" or "squared"',
            doc="How.",
        ),
    ),
    workspace=True,
    params_header="toy_params.h",
    sizes=(("T", "num_rows"), ("H", "row_size")),
)


def test_a_new_operator_is_a_line_of_the_table():
    """Of ports, attributes, kernels' declarations, reading a call and registration nothing is left to write."""
    files = {str(path): text for path, text in codegen.generated_files(Path(), (*OPERATORS, TOY)).items()}
    source = "custom_ops/csrc/"
    expected = {
        "ort/operators.generated.h": [
            '#include "kernels/toy_params.h"',
            '{.name = "row_scale", .shape = "[T]", .type = PortType::kFloat32, .optional = true}',
            '{.name = "rows_out", .shape = "[T, H]", .type = PortType::kElement, .alias = 0}',
            "struct In { enum : size_t { kRows, kRowScale }; };",
            "struct Out { enum : size_t { kRowsOut }; };",
            "int64_t power = 2;",
            "float bias = 0.5f;",
            "ToyMode mode = ToyMode::kPlainRows;",
            'reader.integer({.name = "power", .symbol = "Pw", .allowed = "1 or more", .least = 1}, 2)',
            '{{"plain_rows", ToyMode::kPlainRows}, {"squared", ToyMode::kSquared}}',
            "ToyScaleParams read_params(const Call<ops::ToyScale>& call);",
        ],
        "ort/read_params.generated.cc": [
            "ToyScaleParams read_params(const Call<ops::ToyScale>& call) {",
            "const Tensor rows_tensor = call.input(Op::In::kRows, {-1, -1});",
            "params.num_rows = rows_tensor.dim(0);",
            "const Tensor row_scale_tensor = call.input(Op::In::kRowScale, {params.num_rows});",
            "params.mode = call.attributes().mode;",
            "params.rows_out = call.aliased_output(Op::Out::kRowsOut, rows_tensor).data;",
        ],
        "ort/cpu_operators.generated.cc": ["cpu_operator<ops::ToyScale, cpu::toy_scale>()"],
        "ort/cuda_operators.generated.cc": [
            "cuda_operator<ops::ToyScale, cuda::toy_scale, cuda::toy_scale_workspace>()"
        ],
        "kernels/cpu/operators.generated.h": ["void toy_scale(const ToyScaleParams& params, ParallelFor& parallel);"],
        "kernels/cuda/operators.generated.h": [
            "cudaError_t toy_scale(const ToyScaleParams& params, const Launch& launch);",
            "size_t toy_scale_workspace(const ToyScaleParams& params, const Device& device);",
        ],
    }
    for name, lines in expected.items():
        for line in lines:
            assert line in files[source + name], f"{name} lacks {line}"
    assert "def toy_scale(" in files["custom_ops/emitters/toy.py"]
    assert '"toy_scale",' in files["custom_ops/emitters/__init__.py"]
    assert "| out 0 | `rows_out` | [T, H] | T1 |" in files["docs/operators.md"]


@pytest.mark.parametrize(
    ("shape", "optional", "message"),
    [("[T, G]", False, "shape symbol G has no field"), ("[H]", True, "optional input rows is the first of .* H")],
)
def test_a_shape_that_says_too_little_is_refused(shape, optional, message):
    rows = dataclasses.replace(TOY.inputs[0], shape=shape, optional=optional)
    outputs = (dataclasses.replace(TOY.outputs[0], shape=shape, alias=-1),)
    with pytest.raises(ValueError, match=message):
        codegen.generated_files(Path(), (dataclasses.replace(TOY, inputs=(rows,), outputs=outputs),))


def test_library_names_itself():
    assert library_info().version == ortolan.__version__
    assert "cpu" in library_info().providers
    assert library_path().is_file()


def test_schemas_are_gone_before_the_interpreter_ends():
    """Of older versions, onnx calls their Python functions' destructors when there is no interpreter any more."""
    program = """
import atexit, onnx
from ortolan.custom_ops import register_schemas
atexit.register(lambda: print("at the end", onnx.defs.has("SwaAttention", "ortolan")))  # runs after later ones
register_schemas()
print("registered", onnx.defs.has("SwaAttention", "ortolan"))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path("/"))
    assert result.stdout.splitlines() == ["registered True", "at the end False"]


def test_schemas_reach_checker_and_shape_inference():
    import numpy as np

    register_schemas()
    register_schemas()
    batch = random_batch(np.random.default_rng(0), [2], [0])
    caches = empty_caches(1, 2, 32, 16)
    feeds = attention_inputs(batch, caches)
    model = build_model("SwaAttention", feeds, {"window": 4})
    onnx.checker.check_model(model)
    model.graph.node[0].attribute[0].name = "windoe"
    with pytest.raises(onnx.checker.ValidationError, match="windoe"):
        onnx.checker.check_model(model)
    model.graph.node[0].attribute[0].name = "window"
    model.graph.output[0].type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    assert len(inferred.graph.output[0].type.tensor_type.shape.dim) == 3
    assert {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == "ortolan"} == {
        operator.name for operator in OPERATORS
    }


@pytest.mark.parametrize("shape", [("batch",), ("batch", 4), None])
def test_a_narrowed_length_has_the_shape_of_the_length(shape):
    register_schemas()
    int32, int64 = onnx.TensorProto.INT32, onnx.TensorProto.INT64
    types = {"query_start": (int32, ("edges",)), "past_len": (int32, shape), "row_indices": (int64, ("rows",))}
    inputs = [onnx.helper.make_tensor_value_info(name, *described) for name, described in types.items()]
    outputs = ["query_start_out", "past_len_out"]
    node = onnx.helper.make_node("NarrowStep", list(types), outputs, domain="ortolan")
    graph = onnx.helper.make_graph([node], "g", inputs, [onnx.helper.make_empty_tensor_value_info(n) for n in outputs])
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("ortolan", 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    given, found = inferred.input[1].type.tensor_type, inferred.output[1].type.tensor_type
    assert found == given


def test_register_refuses_other_objects(monkeypatch, tmp_path):
    with pytest.raises(OpLibraryError, match="SessionOptions"):
        ortolan.custom_ops.register(object())
    monkeypatch.setattr("ortolan.custom_ops.__path__", [str(tmp_path)])
    with pytest.raises(OpLibraryError, match="reinstall"):
        ortolan.custom_ops.register(onnxruntime.SessionOptions())

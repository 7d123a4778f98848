"""The table of operators, what is generated from it, and the library agree."""

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
from ortolan.errors import OpLibraryError

ROOT = Path(__file__).resolve().parents[2]


def test_generated_files_are_current():
    for path, text in codegen.generated_files(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is stale: run python -m ortolan.custom_ops.codegen"


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


def test_register_refuses_other_objects(monkeypatch, tmp_path):
    with pytest.raises(OpLibraryError, match="SessionOptions"):
        ortolan.custom_ops.register(object())
    monkeypatch.setattr("ortolan.custom_ops.__path__", [str(tmp_path)])
    with pytest.raises(OpLibraryError, match="reinstall"):
        ortolan.custom_ops.register(onnxruntime.SessionOptions())

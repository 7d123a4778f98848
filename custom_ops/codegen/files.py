"""Lists the generated files of a source tree."""

from __future__ import annotations

from pathlib import Path

from ortolan.custom_ops.codegen.cpp_operators import render_operators
from ortolan.custom_ops.codegen.cpp_readers import render_readers
from ortolan.custom_ops.codegen.cpp_registration import render_entry_points, render_registration
from ortolan.custom_ops.codegen.docs import render_docs
from ortolan.custom_ops.codegen.python_emitters import render_emitters
from ortolan.custom_ops.schema import OPERATORS
from ortolan.custom_ops.schema_parts import Operator


def generated_files(root: Path, operators: tuple[Operator, ...] = OPERATORS) -> dict[Path, str]:
    """Map each generated file of a source tree to what it must hold for these operators."""
    source = root / "custom_ops/csrc"
    return {
        source / "ort/operators.generated.h": render_operators(operators),
        source / "ort/read_params.generated.cc": render_readers(operators),
        source / "ort/cpu_operators.generated.cc": render_registration(operators, "cpu"),
        source / "ort/cuda_operators.generated.cc": render_registration(operators, "cuda"),
        source / "kernels/cpu/operators.generated.h": render_entry_points(operators, "cpu"),
        source / "kernels/cuda/operators.generated.h": render_entry_points(operators, "cuda"),
        **{root / "custom_ops/emitters" / name: text for name, text in render_emitters(operators).items()},
        root / "docs/operators.md": render_docs(operators),
    }

"""Renders the C++ declarations of the operators' kernels, and the lists by which they are registered."""

from __future__ import annotations

from typing import Literal

from ortolan.custom_ops.codegen.names import NOTICE, snake_case
from ortolan.custom_ops.schema_parts import Operator

Provider = Literal["cpu", "cuda"]

_DECLARATION = {
    "cpu": "void {name}(const {params}& params, ParallelFor& parallel);",
    "cuda": "cudaError_t {name}(const {params}& params, const Launch& launch);",
}
_KERNEL_INCLUDE = {"cpu": '#include "parallel.h"', "cuda": '#include "common/kernels.h"'}


def render_entry_points(operators: tuple[Operator, ...], provider: Provider) -> str:
    """Render csrc/kernels/<provider>/operators.generated.h."""
    lines = []
    for operator in operators:
        name, params = snake_case(operator.name), f"{operator.name}Params"
        lines += [_DECLARATION[provider].format(name=name, params=params)]
        if provider == "cuda" and operator.workspace:
            lines += [f"size_t {name}_workspace(const {params}& params, const Device& device);"]
    return "\n".join(
        [
            "// clang-format off",
            f"// The kernels of the operators, whose arguments are valid; {NOTICE}.",
            "#pragma once",
            "",
            *(f'#include "kernels/{header}"' for header in sorted({o.params_header for o in operators})),
            _KERNEL_INCLUDE[provider],
            "",
            f"namespace ortolan::{provider} {{",
            "",
            *lines,
            "",
            f"}}  // namespace ortolan::{provider}",
            "",
        ]
    )


def render_registration(operators: tuple[Operator, ...], provider: Provider) -> str:
    """Render csrc/ort/<provider>_operators.generated.cc."""
    lines = []
    for operator in operators:
        kernel = f"{provider}::{snake_case(operator.name)}"
        arguments = [f"ops::{operator.name}", kernel]
        arguments += [f"{kernel}_workspace"] if provider == "cuda" and operator.workspace else []
        lines += [f"      {provider}_operator<{', '.join(arguments)}>(),"]
    return "\n".join(
        [
            "// clang-format off",
            f"// The operators that have {provider.upper()} kernels; {NOTICE}.",
            f'#include "kernels/{provider}/operators.generated.h"',
            "",
            f'#include "{provider}_operators.h"',
            "",
            "namespace ortolan {",
            "",
            f"std::vector<OperatorKernel> {provider}_operators() {{",
            "  return {",
            *lines,
            "  };",
            "}",
            "",
            "}  // namespace ortolan",
            "",
        ]
    )

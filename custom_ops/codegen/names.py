"""How names of the operator table are spelled in generated code."""

from __future__ import annotations

import re

NOTICE = "generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`"


def snake_case(name: str) -> str:
    """Turn an operator's name into a function's name."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def cpp_constant(name: str) -> str:
    """Turn a name in snake case into that of a C++ constant: kSiluMul for silu_mul."""
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def python_literal(value: int | float | str) -> str:
    """Write a value as source code, texts in double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)

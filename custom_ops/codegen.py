"""Writes the files that derive from the operator table: the C++ definitions, the emitters and the docs."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from ortolan.custom_ops.schema import OPERATORS
from ortolan.custom_ops.schema_parts import ELEMENT, INT32, INT64, Attribute, Operator, Port

_NOTICE = "generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`"
_CPP_TYPES = {
    ELEMENT: "PortType::kElement",
    INT32: "PortType::kInt32",
    INT64: "PortType::kInt64",
    "tensor(float)": "PortType::kFloat32",
}


def render_cpp() -> str:
    """Render custom_ops/csrc/ort/schemas.generated.h."""
    lines = [
        "// clang-format off",
        f"// The operators' ports and attributes; {_NOTICE}.",
        "#pragma once",
        "",
        "#include <array>",
        "",
        '#include "schema.h"',
        "",
        "namespace ortolan {",
        "",
    ]
    for operator in OPERATORS:
        lines += [
            f"inline constexpr Port k{operator.name}Inputs[] = {{",
            *map(_cpp_port, operator.inputs),
            "};",
        ]
        lines += [
            f"inline constexpr Port k{operator.name}Outputs[] = {{",
            *map(_cpp_port, operator.outputs),
            "};",
        ]
        names = ", ".join(f'"{attribute.name}"' for attribute in operator.attributes)
        count = len(operator.attributes)
        lines += [
            f"inline constexpr std::array<std::string_view, {count}> k{operator.name}Attributes = {{{names}}};",
            f'inline constexpr Schema k{operator.name}Schema = {{"{operator.name}", k{operator.name}Inputs,',
            f"                                  k{operator.name}Outputs, k{operator.name}Attributes, "
            f"{_cpp_bool(operator.cuda_only)}}};",
            "",
        ]
    return "\n".join([*lines, "}  // namespace ortolan", ""])


def _cpp_port(port: Port) -> str:
    optional = _cpp_bool(port.optional)
    rest = f", {_cpp_bool(port.on_host)}, {port.spends}" if port.spends >= 0 else ", true" if port.on_host else ""
    return f'    {{"{port.name}", "{port.shape}", {_CPP_TYPES[port.type]}, {optional}, {port.alias}{rest}}},'


def _cpp_bool(value: bool) -> str:
    return "true" if value else "false"


def snake_case(name: str) -> str:
    """Turn an operator's name into a function's name."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def render_emitters() -> str:
    """Render custom_ops/emitters.py: one typed function per operator."""
    parts = [
        f'"""Builds nodes of Ortolan\'s operators; {_NOTICE}."""\n',
        "from __future__ import annotations\n",
        "import onnx\n",
        "from ortolan.custom_ops.node import operator_node\n",
    ]
    return "\n".join(parts) + "".join(_emitter(operator) for operator in OPERATORS)


def _emitter(operator: Operator) -> str:
    required = [port for port in operator.inputs if not port.optional]
    optional = [port for port in operator.inputs if port.optional]
    arguments = [f"    {port.name}: str," for port in required]
    arguments += [f'    {port.name}: str = "",' for port in optional]
    arguments += ["    *,", "    outputs: tuple[str, ...],", "    name: str,"]
    arguments += [
        f"    {a.name}: {type(a.default).__name__} = {_python_literal(a.default)}," for a in operator.attributes
    ]
    documented = [f"        {p.name}: {p.shape} {p.type}. {p.doc}" for p in operator.inputs]
    documented += [f"        outputs: names of {', '.join(f'{p.name} {p.shape}' for p in operator.outputs)}."]
    documented += ["        name: name of the node."]
    documented += [f"        {a.name}: {a.doc} Allowed: {a.allowed}." for a in operator.attributes]
    attributes = ", ".join(f'"{a.name}": {a.name}' for a in operator.attributes)
    inputs = ", ".join(port.name for port in operator.inputs)
    return "\n".join(
        [
            "\n",
            f"def {snake_case(operator.name)}(",
            *arguments,
            ") -> onnx.NodeProto:",
            f'    """Build a {operator.name} node.',
            "",
            *_wrapped(operator.doc, 4, hanging=0),
            "",
            "    Args:",
            *[line for text in documented for line in _wrapped(text.strip(), 8)],
            '    """',
            f"    inputs = ({inputs},)",
            f'    return operator_node("{operator.name}", inputs, outputs, name, {{{attributes}}})',
            "",
        ]
    )


def _python_literal(value: int | float | str) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _wrapped(text: str, indent: int, hanging: int = 4, width: int = 108) -> list[str]:
    lines, current = [], " " * indent
    for word in text.split():
        if len(current) + len(word) > width:
            lines.append(current.rstrip())
            current = " " * (indent + hanging)
        current += word + " "
    return [*lines, current.rstrip()]


def render_docs() -> str:
    """Render docs/operators.md."""
    lines = ["# Operators of domain `ortolan`, version 1", "", f"<!-- {_NOTICE} -->", ""]
    lines += [
        "T1 is float32 or float16 on the CPU provider; float32, float16 or bfloat16 on CUDA. B sequences, T packed",
        "tokens, Hq query heads, Hkv key/value heads, D head size, N cache pages of P slots, M pages per sequence,",
        "C slots per sequence, S sinks, W window, I input and O output features, R rotated pairs. Operators",
        'marked "CUDA only" stand in `model.fused.onnx` alone.',
        "",
        "An output that continues an input is written in place where it is an output of the graph and bound to the",
        "input's buffer, or where nothing else has or reads the input; else it begins as a copy. Positions go on past",
        "C by the rule of rings also in a cache that is none: attention then refuses, on the CPU, what was",
        "overwritten. ONNX Runtime takes attributes of any name; `onnx.checker` refuses others than those below once",
        "`ortolan.custom_ops.register_schemas()` was called.",
        "",
        "On CUDA, QkvRopeAppend and SnapKvScore, and SwaAttention of 16-bit elements, move 16 bytes at a time: what",
        "is bound to their ports of type T1, and to `cosine` and `sine`, starts at a multiple of 16 bytes; else the",
        "node fails with cudaErrorMisalignedAddress. The other operators take any buffer that is aligned to its",
        "elements. Memory that ONNX Runtime allocates fits all of them.",
        "",
    ]
    for operator in OPERATORS:
        lines += [
            f"## {operator.name}",
            "",
            operator.doc + (" CUDA only." if operator.cuda_only else ""),
            "",
            "| port | name | shape | type | meaning |",
            "|---|---|---|---|---|",
        ]
        lines += [_doc_row("in", i, port) for i, port in enumerate(operator.inputs)]
        lines += [_doc_row("out", i, port) for i, port in enumerate(operator.outputs)]
        if operator.attributes:
            lines += ["", "| attribute | default | allowed | meaning |", "|---|---|---|---|"]
            lines += [_doc_attribute(attribute) for attribute in operator.attributes]
        lines.append("")
    return "\n".join(lines)


def _doc_row(kind: str, index: int, port: Port) -> str:
    notes = port.doc
    if port.optional:
        notes += " Optional."
    if port.alias >= 0:
        notes += f" Continues input {port.alias}."
    if port.spends >= 0:
        notes += f" Takes the buffer of input {port.spends} where nothing reads that later."
    return f"| {kind} {index} | `{port.name}` | {port.shape} | {port.type} | {notes} |"


def _doc_attribute(attribute: Attribute) -> str:
    default = _python_literal(attribute.default)
    return f"| `{attribute.name}` | {default} | {attribute.allowed} | {attribute.doc} |"


def generated_files(root: Path) -> dict[Path, str]:
    """Map each generated file of a source tree to what it must hold."""
    return {
        root / "custom_ops/csrc/ort/schemas.generated.h": render_cpp(),
        root / "custom_ops/emitters.py": render_emitters(),
        root / "docs/operators.md": render_docs(),
    }


def main() -> int:
    """Write the files, or with --check report those that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a file differs")
    parser.add_argument("root", type=Path, help="root of the source tree")
    options = parser.parse_args()
    stale = [p for p, text in generated_files(options.root).items() if not p.is_file() or p.read_text() != text]
    if options.check:
        for path in stale:
            print(
                f"{path} is out of date: run python -m ortolan.custom_ops.codegen {options.root}",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path in stale:
        path.write_text(generated_files(options.root)[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())

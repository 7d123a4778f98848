"""Renders the C++ description of each operator: ports and their numbers, attributes and how they are read."""

from __future__ import annotations

from ortolan.custom_ops.codegen.names import NOTICE, cpp_constant, python_literal
from ortolan.custom_ops.schema_parts import CACHE, ELEMENT, FLOAT, INT32, INT64, UINT8, Attribute, Operator, Port

_PORT_TYPES = {
    ELEMENT: "PortType::kElement",
    CACHE: "PortType::kCache",
    FLOAT: "PortType::kFloat32",
    INT32: "PortType::kInt32",
    INT64: "PortType::kInt64",
    UINT8: "PortType::kUint8",
}


def render_operators(operators: tuple[Operator, ...]) -> str:
    """Render custom_ops/csrc/ort/operators.generated.h."""
    headers = sorted({operator.params_header for operator in operators})
    lines = [
        "// clang-format off",
        f"// What the library knows of each operator; {NOTICE}.",
        "#pragma once",
        "",
        *(f'#include "kernels/{header}"' for header in headers),
        '#include "attributes.h"',
        '#include "schema.h"',
        "",
        "namespace ortolan {",
        "",
        "template <typename Op>",
        "class Call;",
        "",
    ]
    for operator in operators:
        lines += [*_operator(operator), ""]
    return "\n".join([*lines, "}  // namespace ortolan", ""])


def _operator(operator: Operator) -> list[str]:
    name = operator.name
    return [
        f"inline constexpr Port k{name}Inputs[] = {{",
        *(f"    {_port(port)}," for port in operator.inputs),
        "};",
        f"inline constexpr Port k{name}Outputs[] = {{",
        *(f"    {_port(port)}," for port in operator.outputs),
        "};",
        "namespace ops {",
        f"struct {name} {{",
        f"  using Params = {name}Params;",
        f"  struct In {{ enum : size_t {{ {_constants(operator.inputs)} }}; }};",
        f"  struct Out {{ enum : size_t {{ {_constants(operator.outputs)} }}; }};",
        *_attributes(operator.attributes),
        f'  static constexpr Schema kSchema{{"{name}", k{name}Inputs, k{name}Outputs}};',
        "};",
        "}  // namespace ops",
        f"{name}Params read_params(const Call<ops::{name}>& call);",
    ]


def _port(port: Port) -> str:
    parts = [f'"{port.name}"', f'"{port.shape}"', _PORT_TYPES[port.type]]
    parts += [f".{flag} = true" for flag in ("optional", "on_host") if getattr(port, flag)]
    parts += [f".{source} = {getattr(port, source)}" for source in ("alias", "spends") if getattr(port, source) >= 0]
    names = [".name = ", ".shape = ", ".type = "]
    return "{" + ", ".join([n + p for n, p in zip(names, parts[:3], strict=True)] + _in_order(parts[3:])) + "}"


def _in_order(designators: list[str]) -> list[str]:
    order = (".optional", ".alias", ".on_host", ".spends")
    return sorted(designators, key=lambda text: order.index(text.split(" ")[0]))


def _constants(ports: tuple[Port, ...]) -> str:
    return ", ".join(cpp_constant(port.name) for port in ports)


def _attributes(attributes: tuple[Attribute, ...]) -> list[str]:
    reads = [f"      attributes.{a.name} = reader.{_read(a)};" for a in attributes]
    if not reads:
        return ["  struct Attributes {", "    static Attributes read(const AttributeReader&) { return {}; }", "  };"]
    return [
        "  struct Attributes {",
        *(f"    {_cpp_type(a)} {a.name} = {_default(a)};" for a in attributes),
        "",
        "    static Attributes read(const AttributeReader& reader) {",
        "      Attributes attributes;",
        *reads,
        "      return attributes;",
        "    }",
        "  };",
    ]


def _read(attribute: Attribute) -> str:
    allowed = python_literal(attribute.allowed.replace('"', "'"))
    name, default = f'"{attribute.name}"', _default(attribute)
    if attribute.choices:
        pairs = ", ".join(f'{{"{c}", {attribute.enumeration}::{cpp_constant(c)}}}' for c in attribute.choices)
        return f'choice<{attribute.enumeration}>({{{name}, "", {allowed}}}, {default}, {{{pairs}}})'
    rule = [name, f'"{attribute.symbol}"', allowed]
    rule += [f".least = {attribute.least}"] if attribute.least is not None else []
    rule += [f".most = {attribute.most}"] if attribute.most is not None else []
    rule += [".nonzero = true"] if attribute.nonzero else []
    fields = [".name = ", ".symbol = ", ".allowed = "]
    rule = [f + r for f, r in zip(fields, rule[:3], strict=True)] + rule[3:]
    return f"{'integer' if isinstance(attribute.default, int) else 'real'}({{{', '.join(rule)}}}, {default})"


def _cpp_type(attribute: Attribute) -> str:
    if attribute.choices:
        return attribute.enumeration
    return "int64_t" if isinstance(attribute.default, int) else "float"


def _default(attribute: Attribute) -> str:
    if attribute.choices:
        return f"{attribute.enumeration}::{cpp_constant(str(attribute.default))}"
    return f"{attribute.default!r}f" if isinstance(attribute.default, float) else str(attribute.default)

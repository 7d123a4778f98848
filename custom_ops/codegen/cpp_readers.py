"""Renders how a call's tensors become kernel parameters, for operators whose shapes say all that is to check."""

from __future__ import annotations

from ortolan.custom_ops.codegen.names import NOTICE, cpp_constant
from ortolan.custom_ops.schema_parts import ELEMENT, FLOAT, INT32, INT64, UINT8, Operator, Port

_POINTERS = {
    ELEMENT: "data",
    FLOAT: "as<float>()",
    INT32: "as<int32_t>()",
    INT64: "as<int64_t>()",
    UINT8: "as<uint8_t>()",
}


def render_readers(operators: tuple[Operator, ...]) -> str:
    """Render custom_ops/csrc/ort/read_params.generated.cc."""
    lines = [
        "// clang-format off",
        f"// Reads the calls of operators whose shapes say all that is to check; {NOTICE}.",
        '#include "call.h"',
        '#include "operators.generated.h"',
        "",
        "namespace ortolan {",
        "",
    ]
    for operator in operators:
        if operator.sizes:
            lines += [*_reader(operator), ""]
    return "\n".join([*lines, "}  // namespace ortolan", ""])


def _reader(operator: Operator) -> list[str]:
    """Bind each symbol of a shape to the dimension of the first input that has it."""
    name = operator.name
    lines = [f"{name}Params read_params(const Call<ops::{name}>& call) {{", f"  using Op = ops::{name};"]
    lines += [f"  {name}Params params{{}};"]
    if any(port.type == ELEMENT for port in (*operator.inputs, *operator.outputs)):
        lines += ["  params.element = call.node().element;"]
    fields = dict(operator.sizes)
    bound: set[str] = set()
    for port in operator.inputs:
        lines += _read_input(port, fields, bound)
    lines += [f"  params.{attribute.name} = call.attributes().{attribute.name};" for attribute in operator.attributes]
    for port in operator.outputs:
        lines += [_read_output(operator, port)]
    return [*lines, "  return params;", "}"]


def _read_input(port: Port, fields: dict[str, str], bound: set[str]) -> list[str]:
    symbols = port.symbols
    new = {symbol: axis for axis, symbol in enumerate(symbols) if symbol in fields and symbol not in bound}
    if new and port.optional:
        raise ValueError(
            f"optional input {port.name} is the first of shape symbol {min(new)}: give it to an earlier one"
        )
    dims = ["-1" if symbol in new else _size(symbol, fields) for symbol in symbols]
    variable = f"{port.name}_tensor"
    bound |= set(new)
    return [
        f"  const Tensor {variable} = call.input(Op::In::{cpp_constant(port.name)}, {{{', '.join(dims)}}});",
        *(f"  params.{fields[symbol]} = {variable}.dim({axis});" for symbol, axis in new.items()),
        f"  params.{port.name} = {variable}.{_POINTERS[port.type]};",
    ]


def _read_output(operator: Operator, port: Port) -> str:
    where = f"Op::Out::{cpp_constant(port.name)}"
    if port.alias >= 0:
        source = f"{operator.inputs[port.alias].name}_tensor"
        return f"  params.{port.name} = call.aliased_output({where}, {source}).{_POINTERS[port.type]};"
    dims = ", ".join(_size(symbol, dict(operator.sizes)) for symbol in port.symbols)
    return f"  params.{port.name} = call.output({where}, {{{dims}}}).{_POINTERS[port.type]};"


def _size(symbol: str, fields: dict[str, str]) -> str:
    if symbol.isdigit():
        return symbol
    if symbol not in fields:
        raise ValueError(f"shape symbol {symbol} has no field in `sizes`: name its field, or write read_params by hand")
    return f"params.{fields[symbol]}"

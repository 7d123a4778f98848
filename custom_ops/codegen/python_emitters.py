"""Renders the package custom_ops/emitters: one typed function per operator that builds its node."""

from __future__ import annotations

from ortolan.custom_ops.codegen.names import NOTICE, python_literal, snake_case
from ortolan.custom_ops.schema_parts import Operator


def render_emitters(operators: tuple[Operator, ...]) -> dict[str, str]:
    """Render the files of custom_ops/emitters by name: a module for each header of params structs, and the package."""
    modules: dict[str, list[Operator]] = {}
    for operator in operators:
        modules.setdefault(operator.params_header, []).append(operator)
    files = {f"{_module(header)}.py": _render_module(header, module) for header, module in modules.items()}
    return files | {"__init__.py": _render_package(modules)}


def _module(header: str) -> str:
    """Name the module of a header's operators: qkv for qkv_params.h; params.h has those of caches alone."""
    return header.removesuffix("params.h").removesuffix("_") or "cache"


def _render_module(header: str, operators: list[Operator]) -> str:
    parts = [
        f'"""Builds nodes of the operators in kernels/{header}; {NOTICE}."""\n',
        "from __future__ import annotations\n",
        "import onnx\n",
        "from ortolan.custom_ops.node import operator_node\n",
    ]
    return "\n".join(parts) + "".join(_emitter(operator) for operator in operators)


def _render_package(modules: dict[str, list[Operator]]) -> str:
    lines = [f'"""Builds nodes of Ortolan\'s operators; {NOTICE}."""', ""]
    for header in sorted(modules, key=_module):
        lines.append(f"from ortolan.custom_ops.emitters.{_module(header)} import (")
        lines += [f"    {name}," for name in sorted(snake_case(operator.name) for operator in modules[header])]
        lines.append(")")
    functions = sorted(snake_case(operator.name) for module in modules.values() for operator in module)
    return "\n".join([*lines, "", "__all__ = [", *[f'    "{name}",' for name in functions], "]", ""])


def _emitter(operator: Operator) -> str:
    required = [port for port in operator.inputs if not port.optional]
    optional = [port for port in operator.inputs if port.optional]
    arguments = [f"    {port.name}: str," for port in required]
    arguments += [f'    {port.name}: str = "",' for port in optional]
    arguments += ["    *,", "    outputs: tuple[str, ...],", "    name: str,"]
    arguments += [
        f"    {a.name}: {type(a.default).__name__} = {python_literal(a.default)}," for a in operator.attributes
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


def _wrapped(text: str, indent: int, hanging: int = 4, width: int = 108) -> list[str]:
    lines, current = [], " " * indent
    for word in text.split():
        if len(current) + len(word) > width:
            lines.append(current.rstrip())
            current = " " * (indent + hanging)
        current += word + " "
    return [*lines, current.rstrip()]

"""Renders docs/operators.md."""

from __future__ import annotations

from ortolan.custom_ops.codegen.names import NOTICE, python_literal
from ortolan.custom_ops.schema_parts import Attribute, Operator, Port


def render_docs(operators: tuple[Operator, ...]) -> str:
    """Render docs/operators.md."""
    lines = ["# Operators of domain `ortolan`, version 1", "", f"<!-- {NOTICE} -->", ""]
    lines += [
        "T1 is float32 or float16 on the CPU provider; float32, float16 or bfloat16 on CUDA. B sequences, T packed",
        "tokens, Hq query heads, Hkv key/value heads, D head size, N cache pages of P slots, M pages per sequence,",
        "C slots per sequence, S sinks, W window, I input and O output features, H features of a row, R rotated pairs",
        "or wanted rows. Of mixtures: E experts, K that a token takes, I features inside an expert.",
        "Of recurrent layers: Hk key heads of size Dk, Hv value heads of size Dv, N rows of states, R tokens whose",
        "updates are kept, F features of a convolution, K taps, Rc rows of its ring.",
        "",
        "T2, of caches, is T1, int8 or float8e4m3fn. A cache of the last two holds codes, and a scale for each row [D]",
        "lies beside it: a reader takes scale * code. Such a cache needs the ports of scales; no other cache does.",
        "",
        "An output that continues an input is written in place in two cases: it is an output of the graph and bound to",
        "the input's buffer, or nothing else holds or reads the input. Otherwise it starts as a copy of the input.",
        "A node refuses any other output buffer that shares memory with one of its inputs or with another output.",
        "",
        "Every cache follows the slot rule of rings, so a position past C overwrites an older one. The CPU kernels of",
        "SwaAttention and QkvAttention refuse a query that needs an overwritten position.",
        "",
        "ONNX Runtime accepts attributes of any name. After `ortolan.custom_ops.register_schemas()`, `onnx.checker`",
        "refuses attributes that are not listed here.",
        "",
        "On CUDA, NormRope, QkvAttention, QkvRopeAppend, SnapKvScore, and SwaAttention of 16-bit elements move 16",
        "bytes at a time. The buffers of their ports of type T1, and of `cosine` and `sine`, must start at a multiple",
        "of 16 bytes; otherwise the node fails with cudaErrorMisalignedAddress. The other operators accept any buffer",
        "that is aligned to its elements. Memory that ONNX Runtime allocates is aligned for all of them.",
        "",
    ]
    for operator in operators:
        lines += [
            f"## {operator.name}",
            "",
            operator.doc,
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
    if port.on_host:
        notes += " In CPU memory on every provider."
    if port.alias >= 0:
        notes += f" Continues input {port.alias}."
    if port.spends >= 0:
        notes += f" Takes the buffer of input {port.spends} where nothing reads that later."
    return f"| {kind} {index} | `{port.name}` | {port.shape} | {port.type} | {notes} |"


def _doc_attribute(attribute: Attribute) -> str:
    default = python_literal(attribute.default)
    return f"| `{attribute.name}` | {default} | {attribute.allowed} | {attribute.doc} |"

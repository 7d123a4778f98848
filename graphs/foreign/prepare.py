"""Puts a foreign graph into the form that the rewriting expects, before onnx-graphsurgeon reads it.

1. Every weight is external, with a length; where its bytes really lie is kept aside. So is every other tensor of a
   type that onnx-graphsurgeon would change, as NumPy has not got it.
2. Constant nodes are initializers, and initializers are not inputs, as they are in graphs of older exporters.
3. An `If` that chooses between tables of RoPE by the sequence's length is one table, with a note of the limit.
4. Every node has a name of its own, and no value has a name that the converted graph needs.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortolan.element_types import from_onnx
from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.graphs.external_data import ExternalTensor, point_to
from ortolan.graphs.foreign.rope_choice import RopeChoice, join_rope_tables
from ortolan.graphs.foreign.tensors import constant_tensor, take_bytes, tensor_bytes

INITIALIZERS_ALONE = 4  # first version of the IR whose initializers need not be inputs
INLINE_BYTES = 1024  # initializers up to this size stay in the graph
_RESERVED = re.compile(
    r"^(token_ids|positions|query_start|past_len|rope_variant|logit_rows|logits|block_table\..*"
    r"|layer\.\d+\..*|(layers\.\d+/attention|head|rope|inputs|embedding/token_ids|axes|slice|shapes|sizes|sinks)/.*)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignBytes:
    """Where a weight's bytes lie: in a file of the source, or here.

    Attributes:
        file: relative to the source's folder; None where `data` has them.
        offset: into the file.
        length: bytes.
        data: the bytes of what the source's graph file held itself.
    """

    length: int
    file: str | None = None
    offset: int = 0
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph that can be rewritten.

    Attributes:
        model: a changed copy.
        weights: by initializer.
        names: new names of inputs, outputs and values, by their names in the source, where they differ.
        rope_choice: where the graph chose between tables; None where it has one.
    """

    model: onnx.ModelProto
    weights: dict[str, ForeignBytes]
    names: dict[str, str]
    rope_choice: RopeChoice | None


def prepare(source: onnx.ModelProto) -> Prepared:
    """Return the graph in the form above; the source is not changed.

    Raises:
        UnsupportedModelError: the graph has local functions, or an opset from before axes were inputs.
        CheckpointError: a weight does not say where it lies, or not enough of it.
    """
    model = onnx.ModelProto()
    model.CopyFrom(source)
    graph = model.graph
    del graph.value_info[:]
    if model.functions:
        raise UnsupportedModelError(f"cannot convert a graph with local functions ({model.functions[0].name})")
    _check_opset(model)
    _name_nodes(graph)
    _lift_constants(graph)
    _drop_fixed_inputs(model)
    choice = join_rope_tables(graph)
    names = _rename_values(graph)
    return Prepared(model, _move_weights_out(graph), names, choice)


def _check_opset(model: onnx.ModelProto) -> None:
    version = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if version < 13:
        raise UnsupportedModelError(f"cannot convert a graph of opset {version}; 13 or later is needed")


def _name_nodes(graph: onnx.GraphProto) -> None:
    taken = Counter(node.name for node in graph.node)
    numbers = itertools.count()
    for node in graph.node:
        while not node.name or taken[node.name] > 1:
            taken[node.name] -= 1
            node.name = f"{node.name or node.op_type}_{next(numbers)}"
            taken[node.name] += 1


def _lift_constants(graph: onnx.GraphProto) -> None:
    """Turn Constant nodes into initializers."""
    kept = []
    for node in graph.node:
        if node.op_type == "Constant" and not node.domain:
            graph.initializer.append(constant_tensor(node))
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _drop_fixed_inputs(model: onnx.ModelProto) -> None:
    """Let no initializer be an input too, whose default it would be, in a version of the IR that needs none to be."""
    model.ir_version, graph = max(model.ir_version, INITIALIZERS_ALONE), model.graph
    fixed = {tensor.name for tensor in graph.initializer}
    given = [value for value in graph.input if value.name not in fixed]
    del graph.input[:]
    graph.input.extend(given)


def _rename_values(graph: onnx.GraphProto) -> dict[str, str]:
    """Move values and nodes out of the way of the names that the converted graph has; return the new ones."""
    used = {name for node in graph.node for name in (*node.input, *node.output)}
    used |= {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    renamed = {name: f"source/{name}" for name in used if _RESERVED.match(name)}
    for node in graph.node:
        _rename(node.input, renamed)
        _rename(node.output, renamed)
        if _RESERVED.match(node.name):
            node.name = f"source/{node.name}"
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = renamed.get(value.name, value.name)
    return renamed


def _rename(names: Iterable[str], renamed: dict[str, str]) -> None:
    changed = [renamed.get(name, name) for name in names]
    del names[:]  # type: ignore[attr-defined]  # a repeated field of protobuf
    names.extend(changed)  # type: ignore[attr-defined]


def _move_weights_out(graph: onnx.GraphProto) -> dict[str, ForeignBytes]:
    """Make every initializer that is not small and plain external, and return where all of them lie."""
    weights = {}
    for tensor in graph.initializer:
        length = tensor_bytes(tensor)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            weights[tensor.name] = foreign_bytes(tensor)
        elif not is_small(tensor):
            weights[tensor.name] = ForeignBytes(length=length, data=take_bytes(tensor))
        else:
            continue
        del tensor.external_data[:]
        point_to(tensor, ExternalTensor(location="source", offset=0, length=length))
    return weights


def is_small(tensor: onnx.TensorProto) -> bool:
    """Tell whether an initializer may stay in the graph, where rules can read it."""
    return tensor_bytes(tensor) <= INLINE_BYTES and from_onnx(tensor.data_type).is_plain


def foreign_bytes(tensor: onnx.TensorProto) -> ForeignBytes:
    """Return where the bytes of an external initializer lie.

    Raises:
        CheckpointError: it does not say, or not beside the graph, or another number of them than its shape needs.
    """
    length = tensor_bytes(tensor)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    path = Path(location)
    if not location or path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"weight '{tensor.name}' lies at '{location}', which is not beside the graph")
    try:
        offset, said = int(entries.get("offset", 0)), int(entries.get("length", length))
    except ValueError as error:
        raise CheckpointError(f"weight '{tensor.name}' does not say where its bytes lie: {entries}") from error
    if offset < 0 or said != length:
        raise CheckpointError(
            f"weight '{tensor.name}' of shape {list(tensor.dims)} takes {length} bytes, the graph says {said} "
            f"from byte {offset}"
        )
    return ForeignBytes(length=length, file=location, offset=offset)

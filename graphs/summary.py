"""Describes a model file without reading its weights."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from ortolan.contract import OPERATOR_DOMAIN
from ortolan.errors import ContractMismatchError

_LAYER = re.compile(r"^layers\.(\d+)/")


EXPERT_OPERATORS = ("MoeExperts", "LowBitExperts")  # the experts are the first axis of their port 3
SHARED_EXPERT = "/mlp/shared/"  # in the names of its nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The mixture of experts of a layer.

    Attributes:
        count: how many experts there are.
        per_token: how many of them a token takes.
        shared: whether every token takes one more.
    """

    count: int
    per_token: int
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """What a graph is made of.

    Attributes:
        operators: count of each operator type, most frequent first.
        layers: for each layer, the operators of Ortolan's domain in graph order.
        experts: for each layer, its mixture of experts; None where it has none.
        default_inputs: names of the inputs that need not be fed.
    """

    num_nodes: int
    operators: tuple[tuple[str, int], ...]
    layers: tuple[tuple[str, ...], ...]
    experts: tuple[Mixture | None, ...]
    default_inputs: tuple[str, ...]


def load_structure(path: Path) -> onnx.ModelProto:
    """Read a model file without its external data.

    Raises:
        ContractMismatchError: the file is not an ONNX model.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
        is_sound = _has_sound_texts(model)
    except Exception as error:  # protobuf's own exception types differ between its versions
        raise ContractMismatchError(f"{path} cannot be read as an ONNX model: {error}") from error
    if not is_sound:
        raise ContractMismatchError(f"{path} cannot be read as an ONNX model: a name in it is not UTF-8 text")
    return model


def _has_sound_texts(message: Any) -> bool:
    """Say whether all texts of a protobuf message are UTF-8; the parser hands on others as bytes."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            texts = [value] if isinstance(value, str | bytes) else value
            if any(isinstance(text, bytes) for text in texts):
                return False
        elif field.type == field.TYPE_MESSAGE:
            parts = [value] if hasattr(value, "ListFields") else value
            if not all(_has_sound_texts(part) for part in parts):
                return False
    return True


def summarize_model(path: Path) -> ModelSummary:
    """Summarize the graph of a model file.

    Raises:
        ContractMismatchError: the file is not an ONNX model.
    """
    graph = load_structure(path).graph
    layers: dict[int, list[str]] = {}
    experts = _experts(graph)
    for node in graph.node:
        match = _LAYER.match(node.name)
        if match and node.domain == OPERATOR_DOMAIN:
            layers.setdefault(int(match[1]), []).append(node.op_type)
    return ModelSummary(
        num_nodes=len(graph.node),
        operators=tuple(Counter(node.op_type for node in graph.node).most_common()),
        layers=tuple(tuple(layers.get(i, ())) for i in range(max(layers, default=-1) + 1)),
        experts=tuple(experts.get(i) for i in range(max(layers, default=-1) + 1)),
        default_inputs=default_inputs(graph),
    )


def default_inputs(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Return the names of the inputs that need not be fed: they are initializers, too."""
    values = {tensor.name for tensor in graph.initializer}
    return tuple(value.name for value in graph.input if value.name in values)


def _experts(graph: onnx.GraphProto) -> dict[int, Mixture]:
    """List the mixtures by layer."""
    dims = {tensor.name: tensor.dims for tensor in graph.initializer}
    taken = {node.output[0]: a.i for node in graph.node for a in node.attribute if a.name == "top_k"}
    shared = {node.name.split("/")[0] for node in graph.node if SHARED_EXPERT in node.name}
    found = {}
    for node in graph.node:
        match = _LAYER.match(node.name)
        if match and node.op_type in EXPERT_OPERATORS:
            found[int(match[1])] = Mixture(
                count=dims[node.input[3]][0],
                per_token=taken[node.input[1]],
                shared=node.name.split("/")[0] in shared,
            )
    return found

"""Opens the folder of a model that another exporter made: its graph, and what lies beside it.

Source: the folder layout of onnxruntime-genai's model builder (genai_config.json, a graph, its external data).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from ortolan.errors import CheckpointError, ConfigError, UnsupportedModelError
from ortolan.export.foreign_weights import inline_small_weights
from ortolan.export.reading import is_file, reading
from ortolan.folders import GENAI_FILE, GENERATION_FILE, TOKENIZER_FILE, checkpoint_not_source
from ortolan.graphs import SourceNames
from ortolan.graphs.summary import load_structure
from ortolan.manifest import MANIFEST_FILE

GRAPH_FILE = "model.onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSource:
    """A foreign model, without its external data.

    Attributes:
        folder: where the graph and its external data lie.
        tokenizer_folder: where the tokenizer lies: there, or one above.
        graph_file: the graph.
        model: the graph, with its small tensors.
        names: of its inputs and outputs.
        architecture: what the model calls itself.
        context_length: tokens that it was made for; None where it does not say.
        sliding_window: what its configuration says, tokens; 0 where it says nothing.
        bos_token_id: None where it does not say.
        eos_token_ids: empty where it does not say.
    """

    folder: Path
    tokenizer_folder: Path
    graph_file: Path
    model: onnx.ModelProto
    names: SourceNames
    architecture: str
    context_length: int | None
    sliding_window: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def open_source(path: Path) -> ForeignSource:
    """Read a folder, or a graph file in one.

    Raises:
        ConfigError: there is no such folder or file, or it is a model folder already.
        CheckpointError: its configuration cannot be read, or the file of its weights is missing or truncated.
        UnsupportedModelError: the model is split into several graphs.
        ContractMismatchError: the file is not an ONNX model.
    """
    if not os.path.exists(path):  # unlike Path's, it takes names that are too long
        raise ConfigError(f"{path} does not exist; give the folder of a model, or its .onnx file (not a Hub id)")
    folder = path if os.path.isdir(path) else path.parent
    if is_file(folder / MANIFEST_FILE):
        raise ConfigError(f"{folder} is a model folder of Ortolan already; load it as it is")
    side = _tokenizer_folder(folder)
    config = _read_config(folder, side)
    decoder = _section(config, "decoder")
    if "pipeline" in decoder:
        raise UnsupportedModelError(f"{folder / GENAI_FILE}: the model is split into several graphs (pipeline)")
    graph_file = path if is_file(path) else _find_graph(folder, decoder)
    inputs, outputs = _section(decoder, "inputs"), _section(decoder, "outputs")
    with reading(graph_file), graph_file.open("rb"):  # the parser's errors do not tell why
        model = load_structure(graph_file)
    inline_small_weights(model, graph_file.parent)
    default = SourceNames()
    return ForeignSource(
        folder=graph_file.parent,
        tokenizer_folder=side,
        graph_file=graph_file,
        model=model,
        names=SourceNames(
            token_ids=str(inputs.get("input_ids", default.token_ids)),
            positions=str(inputs.get("position_ids", default.positions)),
            logits=str(outputs.get("logits", default.logits)),
        ),
        architecture=str(config.get("type", "converted")),
        context_length=_number(config, "context_length"),
        sliding_window=_number(_section(decoder, "sliding_window"), "window_size") or 0,
        bos_token_id=_number(config, "bos_token_id"),
        eos_token_ids=_numbers(config, "eos_token_id"),
    )


def _tokenizer_folder(folder: Path) -> Path:
    """Return the folder, or the one above where that has the tokenizer (graphs in a folder of their own)."""
    above = folder.resolve().parent
    is_above = not is_file(folder / TOKENIZER_FILE) and os.path.isfile(above / TOKENIZER_FILE)
    return above if is_above else folder


def _read_config(folder: Path, side: Path) -> Mapping[str, Any]:
    """Return the section "model" of genai_config.json, or else generation_config.json, which names end tokens alike."""
    path = folder / GENAI_FILE
    if is_file(path):
        return _object(path, _read_json(path).get("model"))
    path = side / GENERATION_FILE
    return _read_json(path) if is_file(path) else {}


def _read_json(path: Path) -> Mapping[str, Any]:
    with reading(path):
        content = path.read_bytes()
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _object(path, value)


def _object(path: Path, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} cannot be read: found a {type(value).__name__}, expected an object")
    return value


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise CheckpointError(f"{GENAI_FILE}: '{name}' is a {type(section).__name__}, expected an object")
    return section


def _find_graph(folder: Path, decoder: Mapping[str, Any]) -> Path:
    named = folder / str(decoder.get("filename", GRAPH_FILE))
    if is_file(named):
        return named
    if checkpoint := checkpoint_not_source(folder):
        raise ConfigError(checkpoint)
    graphs = sorted(folder.glob("*.onnx"))
    if "filename" not in decoder and len(graphs) == 1:
        return graphs[0]
    found = ", ".join(str(graph.relative_to(folder)) for graph in (*graphs, *sorted(folder.glob("*/*.onnx")))) or "none"
    raise ConfigError(f"{named} does not exist; graphs in the folder: {found}; name the one to convert")


def _number(config: Mapping[str, Any], name: str) -> int | None:
    values = _numbers(config, name)
    return values[0] if values else None


def _numbers(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = config.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(number, int) or isinstance(number, bool) for number in values):
        raise CheckpointError(f"{GENAI_FILE}: '{name}' is {value!r}, expected a whole number")
    return tuple(values)

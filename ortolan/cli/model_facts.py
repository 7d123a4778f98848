"""What `ortolan inspect` says of a model folder besides its graph: parameters, bytes, weight formats, tokenizer."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortolan import contract
from ortolan.cli.table import format_bytes, format_table
from ortolan.errors import ContractMismatchError
from ortolan.folders import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from ortolan.graphs import StoredWeights
    from ortolan.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What tokenizer.json says of itself.

    Attributes:
        kind: "BPE", "Unigram", "WordPiece" or "WordLevel".
        tokens: size of its vocabulary, added tokens included.
        has_chat_template: whether conversations can be rendered.
    """

    kind: str
    tokens: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a model folder.

    Attributes:
        weights: by format.
        layer_weights: of each layer, by format.
        folder_bytes: of all files that the manifest names.
        cpu_bytes: what the weights take in memory on the CPU; None where it is what the file takes.
        layer_embedding_bytes: of these weights, the per-layer embeddings; 0 where there are none.
        vocab_size: of the graph.
        tokenizer: None where there is none.
    """

    weights: tuple[StoredWeights, ...]
    layer_weights: tuple[tuple[StoredWeights, ...], ...]
    folder_bytes: int
    cpu_bytes: int | None
    layer_embedding_bytes: int
    vocab_size: int
    tokenizer: TokenizerFacts | None


def read_facts(folder: Path, manifest: Manifest, graph: Any) -> ModelFacts:
    """Read what a folder holds; the weights' file is not needed.

    Raises:
        ContractMismatchError: the tokenizer's files are damaged.
    """
    from ortolan.graphs import summarize_layer_weights, summarize_weights
    from ortolan.runtime.device.memory import held_weight_bytes, weight_file_bytes

    held = held_weight_bytes(manifest, is_cuda=False)
    return ModelFacts(
        weights=summarize_weights(graph),
        layer_weights=summarize_layer_weights(graph, len(manifest.layers)),
        folder_bytes=sum(manifest.files.values()),
        cpu_bytes=held if held != weight_file_bytes(manifest) else None,
        layer_embedding_bytes=_layer_embedding_bytes(graph),
        vocab_size=manifest.vocab_size,
        tokenizer=_read_tokenizer(folder),
    )


def _layer_embedding_bytes(graph: Any) -> int:
    """Return the bytes of the table that `ortolan.load(host_embeddings=True)` keeps in host memory."""
    from ortolan.element_types import from_onnx

    tables = [tensor for tensor in graph.graph.initializer if tensor.name == contract.LAYER_TABLE]
    return sum(math.prod(table.dims) * from_onnx(table.data_type).bytes for table in tables)


def _read_tokenizer(folder: Path) -> TokenizerFacts | None:
    content = _read_object(folder / TOKENIZER_FILE)
    if content is None:
        return None
    try:
        model, added = content["model"], content.get("added_tokens") or []
        listed = model["vocab"]  # names, or pairs of a name and its score
        names = {entry if isinstance(entry, str) else entry[0] for entry in listed}
        tokens = len(names | {each["content"] for each in added})
        kind = str(model.get("type") or "BPE")
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ContractMismatchError(f"{folder / TOKENIZER_FILE} is not a tokenizer: {error!r}") from error
    template = os.path.isfile(folder / TEMPLATE_FILE) or "chat_template" in (
        _read_object(folder / TOKENIZER_CONFIG_FILE) or {}
    )
    return TokenizerFacts(kind=kind, tokens=tokens, has_chat_template=template)


def _read_object(path: Path) -> dict[str, Any] | None:
    if not os.path.isfile(path):
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ContractMismatchError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ContractMismatchError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def as_json(facts: ModelFacts) -> dict[str, Any]:
    """Return the facts as JSON holds them, with the sums."""
    return {
        **dataclasses.asdict(facts),
        "parameters": sum(row.parameters for row in facts.weights),
        "weight_bytes": sum(row.bytes for row in facts.weights),
    }


def facts_table(facts: ModelFacts) -> str:
    """Format the facts: a line for the folder, one for the tokenizer, and a table of the weights."""
    rows = [[row.format, str(row.tensors), f"{row.parameters:,}", format_bytes(row.bytes)] for row in facts.weights]
    sums = [sum(row.tensors for row in facts.weights), sum(row.parameters for row in facts.weights)]
    rows.append(["all", str(sums[0]), f"{sums[1]:,}", format_bytes(sum(row.bytes for row in facts.weights))])
    lines = [f"folder: {format_bytes(facts.folder_bytes)}", _tokenizer_line(facts)]
    if facts.cpu_bytes is not None:
        lines.append(
            f"on the CPU: ONNX Runtime holds these weights as float32, about {format_bytes(facts.cpu_bytes)} in memory"
        )
    if facts.layer_embedding_bytes:
        lines.append(
            f"per-layer embeddings: {format_bytes(facts.layer_embedding_bytes)} of the weights; on the device, or with "
            "--host-embeddings in the host's memory"
        )
    return "\n".join([*lines, "", format_table(["weights stored as", "tensors", "parameters", "size"], rows), ""])


def _tokenizer_line(facts: ModelFacts) -> str:
    tokenizer = facts.tokenizer
    if tokenizer is None:
        return f"tokenizer: none; the model takes and gives token ids ({facts.vocab_size} in its vocabulary)"
    template = "a chat template" if tokenizer.has_chat_template else "no chat template"
    return f"tokenizer: {tokenizer.kind}, {tokenizer.tokens} tokens (the graph has {facts.vocab_size}), {template}"

"""Runs a dense model over a text and sums the products of what its linear layers read, which rounding is weighed by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ortolan import contract, custom_ops
from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.checkpoint import Array
from ortolan.manifest import MODEL_FILE

_CHUNK_TOKENS = 512  # of a piece of text that the model reads, from its start
_MOST_CHUNKS = 64
_LEAST_TOKENS = 128
_DAMPING = 0.01  # of the mean of the diagonal
_GRAPH_FILE = "calibration.onnx"


def read_text(path: Path) -> str:
    """Read a calibration text. Raises ConfigError: the file cannot be read, or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"calibration {path} cannot be read as a UTF-8 text: {error}") from None
    if not text.strip():
        raise ConfigError(f"calibration {path} is empty; give a text like those that the model will read")
    return text


def feedbacks(folder: Path, text: str) -> dict[str, Array]:
    """Measure how rounding errors of each linear layer can make up for one another.

    Args:
        folder: of the dense float32 model, unfused, with its tokenizer.
        text: that it reads, 64 pieces of 512 tokens at most.

    Returns:
        By weight that a Gemm of a layer multiplies, the upper Cholesky factor [K, K] float32 of the inverse of
        sum(x x^T), damped; weights with the same input share the array.

    Raises:
        ConfigError: the text has less than 128 tokens, or the checkpoint does not have a tokenizer.
        CheckpointError: what a layer reads of the text is not finite.
    """
    token_ids = _token_ids(folder, text)
    graph = onnx.load(folder / MODEL_FILE, load_external_data=False)
    inputs = {
        node.input[1]: node.input[0]
        for node in graph.graph.node
        if node.op_type == "Gemm" and node.input[1].startswith("layers.")
    }
    read = list(dict.fromkeys(inputs.values()))
    graph.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in read)
    (folder / _GRAPH_FILE).write_bytes(graph.SerializeToString())
    options = onnxruntime.SessionOptions()
    custom_ops.register(options)
    session = onnxruntime.InferenceSession(folder / _GRAPH_FILE, options, providers=["CPUExecutionProvider"])
    sums: dict[str, Array] = {}
    for chunk in _chunks(token_ids):
        for name, rows in zip(read, session.run(read, _feeds(session, chunk)), strict=True):
            product = rows.T @ rows
            sums[name] = sums[name] + product if name in sums else product
    for weight, name in inputs.items():
        if not np.isfinite(sums[name]).all():
            raise CheckpointError(f"what {weight} multiplies is not finite for the calibration text")
    factors = {name: _feedback(sums.pop(name)) for name in read}
    return {weight: factors[name] for weight, name in inputs.items()}


def _token_ids(folder: Path, text: str) -> Array:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.exists():
        raise ConfigError("the checkpoint has no tokenizer.json, which calibration reads its text with; add the file")
    found = Tokenizer.from_file(str(file)).encode(text).ids
    if len(found) < _LEAST_TOKENS:
        raise ConfigError(f"the calibration text has {len(found)} tokens; at least {_LEAST_TOKENS} are needed")
    return np.array(found, np.int64)


def _chunks(token_ids: Array) -> Iterator[Array]:
    for begin in range(0, min(len(token_ids), _MOST_CHUNKS * _CHUNK_TOKENS), _CHUNK_TOKENS):
        yield token_ids[begin : begin + _CHUNK_TOKENS]


def _feeds(session: Any, token_ids: Array) -> Mapping[str, Array]:
    """Return the inputs of a step that reads one sequence from its start, with caches that hold all of it."""
    count = len(token_ids)
    feeds = {
        contract.TOKEN_IDS: token_ids,
        contract.POSITIONS: np.arange(count),
        contract.QUERY_START: np.array([0, count], np.int32),
        contract.LOGIT_ROWS: np.array([count - 1]),
    }
    for value in session.get_inputs():
        if value.name not in feeds:
            shape = [count if str(d).startswith("slots") else d if isinstance(d, int) else 1 for d in value.shape]
            feeds[value.name] = np.zeros(shape, np.int32 if value.type == "tensor(int32)" else np.float32)
    return feeds


def _feedback(sums: Array) -> Array:
    """Return the upper factor U of inverse(sums, damped) = U^T U."""
    damped = sums.astype(np.float64)
    diagonal = np.einsum("kk->k", damped)
    diagonal += _DAMPING * diagonal.mean() + np.finfo(np.float32).tiny
    return np.asarray(np.linalg.cholesky(np.linalg.inv(damped)).T, np.float32)

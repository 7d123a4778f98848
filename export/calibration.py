"""Runs a dense model over a text, layer by layer, and sums the products of what its linear layers read.

Rounding is weighed by them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ortolan import contract, custom_ops
from ortolan.errors import CheckpointError, ConfigError
from ortolan.export.checkpoint import Array
from ortolan.graphs import Stage, cut_by_layer
from ortolan.manifest import MODEL_FILE

_CHUNK_TOKENS = 512  # of a piece of text that the model reads, from its start
_MOST_CHUNKS = 64
_LEAST_TOKENS = 128
_BLOCK = 256  # columns of a factor that are computed at a time
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


def read_tokens(folder: Path, text: str) -> Array:
    """Turn a calibration text into the token ids that are read, int64.

    Args:
        folder: of the checkpoint, with its tokenizer.
        text: of at least 128 tokens; the first 32768 are read.

    Raises:
        ConfigError: the text has fewer tokens, or the checkpoint does not have a tokenizer.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.exists():
        raise ConfigError("the checkpoint has no tokenizer.json, which calibration reads its text with; add the file")
    found = Tokenizer.from_file(str(file)).encode(text).ids
    if len(found) < _LEAST_TOKENS:
        raise ConfigError(f"the calibration text has {len(found)} tokens; at least {_LEAST_TOKENS} are needed")
    return np.array(found[: _MOST_CHUNKS * _CHUNK_TOKENS], np.int64)


class Calibration:
    """Measures how rounding errors of linear layers can make up for one another, one layer of the model at a time.

    It holds what the next layers read of the text, and of one layer the weights and the sums of products. So weights
    are best asked for in the order of the layers.
    """

    def __init__(
        self,
        folder: Path,
        token_ids: Array,
        members: Mapping[str, Collection[str]],
        num_bytes: int,
        advance: Callable[[int], object],
    ) -> None:
        """Prepare to read a text.

        Args:
            folder: of the dense float32 model, unfused; it must stay as long as weights are asked for.
            token_ids: that the model reads, in pieces of 512.
            members: weights that will be asked for, once each, by the weight of the graph that they are part of; those
                that no Gemm multiplies are not calibrated.
            num_bytes: that the progress of the text through all layers is counted as.
            advance: called with the number of these bytes that are done since the last call.
        """
        self._folder, self._advance = folder, advance
        self._model = onnx.load(folder / MODEL_FILE, load_external_data=False)
        gemms = [node for node in self._model.graph.node if node.op_type == "Gemm"]
        self._inputs = {weight: node.input[0] for node in gemms for weight in members.get(node.input[1], ())}
        self._unasked = Counter(self._inputs.values())
        self._chunks = [token_ids[begin : begin + _CHUNK_TOKENS] for begin in range(0, len(token_ids), _CHUNK_TOKENS)]
        self._carried: list[dict[str, Array]] = [{} for _ in self._chunks]
        stages = cut_by_layer(self._model.graph, self._unasked)
        self._stages = iter(stages)
        self._steps = _parts(num_bytes, len(stages) * len(self._chunks))
        self._sums: dict[str, Array] = {}
        self._factors: dict[str, Array] = {}

    def feedback(self, weight: str) -> Array | None:
        """Let the text through the model as far as a weight, if need be.

        Returns:
            The upper Cholesky factor [K, K] float32 of the inverse of sum(x x^T), damped, over the inputs x that the
            weight multiplies; weights with the same input share the array. None: the weight is not calibrated.

        Raises:
            CheckpointError: what a layer reads of the text is not finite.
        """
        if weight not in self._inputs:
            return None
        name = self._inputs[weight]
        while name not in self._sums and name not in self._factors:
            self._read(next(self._stages))
        if name in self._sums:
            self._factors[name] = factor_of(self._sums.pop(name))
        self._unasked[name] -= 1
        return self._factors[name] if self._unasked[name] else self._factors.pop(name)

    def _read(self, stage: Stage) -> None:
        """Let all of the text through one stage."""
        session = self._session(stage)
        for index, chunk in enumerate(self._chunks):
            values = self._carried[index]
            found = session.run(list(stage.outputs), _feeds(session, chunk, values))
            values |= zip(stage.outputs, found, strict=True)
            for name in self._unasked.keys() & set(stage.outputs):
                with np.errstate(over="ignore", invalid="ignore"):  # checked below
                    product = values[name].T @ values[name]
                self._sums[name] = np.add(self._sums[name], product, out=product) if name in self._sums else product
            self._carried[index] = {name: value for name, value in values.items() if name in stage.carried}
            self._advance(next(self._steps))
        for weight, name in self._inputs.items():
            if name in stage.outputs and not np.isfinite(self._sums[name]).all():
                raise CheckpointError(f"what {weight} multiplies is not finite for the calibration text")

    def _session(self, stage: Stage) -> Any:
        types = {name: onnx.helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in self._carried[0].items()}
        (self._folder / _GRAPH_FILE).write_bytes(stage.model(self._model, types).SerializeToString())
        options = onnxruntime.SessionOptions()
        custom_ops.register(options)
        return onnxruntime.InferenceSession(self._folder / _GRAPH_FILE, options, providers=["CPUExecutionProvider"])


def _parts(total: int, count: int) -> Iterator[int]:
    """Yield so many whole numbers, nearly the same, that add up to a total."""
    yield from (total * (step + 1) // count - total * step // count for step in range(count))


def _feeds(session: Any, token_ids: Array, values: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the inputs of a step that reads one sequence from its start, with caches that hold all of it.

    Args:
        session: whose inputs are filled.
        token_ids: of the sequence.
        values: of earlier stages.
    """
    count = len(token_ids)
    known = {
        contract.TOKEN_IDS: token_ids,
        contract.POSITIONS: np.arange(count),
        contract.QUERY_START: np.array([0, count], np.int32),
        contract.LOGIT_ROWS: np.arange(count),  # behind the last cache, some models compute these rows alone
        contract.ROPE_VARIANT: np.zeros(count, np.int64),
        **values,
    }
    inputs = session.get_inputs()
    return {each.name: known[each.name] if each.name in known else _empty(each, count) for each in inputs}


def _empty(value: Any, count: int) -> Array:
    """Return what an input is before the first token: a length of 0, or a cache of so many slots."""
    shape = [count if str(d).startswith("slots") else d if isinstance(d, int) else 1 for d in value.shape]
    return np.zeros(shape, np.int32 if value.type == "tensor(int32)" else np.float32)


def factor_of(sums: Array) -> Array:
    """Return the upper factor U of inverse(sums, damped) = U^T U.

    Where the damped sums are R R^T and R is upper, U is the inverse of R. Both take the place of the damped sums, a
    block of columns at a time, so that large sums need no more room than that.
    """
    root = sums.astype(np.float64)
    diagonal = np.einsum("kk->k", root)
    diagonal += _DAMPING * diagonal.mean() + np.finfo(np.float32).tiny
    blocks = [slice(begin, min(begin + _BLOCK, len(root))) for begin in range(0, len(root), _BLOCK)]
    for number, block in reversed(list(enumerate(blocks))):
        corner = np.linalg.cholesky(root[block, block][::-1, ::-1])[::-1, ::-1]
        root[block, block] = corner
        root[: block.start, block] = root[: block.start, block] @ np.linalg.inv(corner).T
        for rows in blocks[:number]:
            columns = slice(rows.start, block.start)
            root[rows, columns] -= root[rows, block] @ root[columns, block].T
    for block in blocks:
        corner = np.linalg.inv(root[block, block])
        root[: block.start, block] = -(root[: block.start, : block.start] @ (root[: block.start, block] @ corner))
        root[block, block] = corner
        root[block, : block.start] = 0
    return np.asarray(root, np.float32)

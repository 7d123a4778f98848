"""Provides the graph's weights, checked before anything is written, and writes them one by one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ortolan.element_types import COMPUTE_TYPES, element_type
from ortolan.errors import CheckpointError
from ortolan.export.caller import warn_caller
from ortolan.export.checkpoint import Array, Checkpoint
from ortolan.export.families.base import Source
from ortolan.graphs import ExternalTensor
from ortolan.graphs.config import ModelConfig
from ortolan.graphs.formats import FORMATS
from ortolan.graphs.weights import weight_groups, weight_shapes

WEIGHTS_FILE = "model.onnx.data"
_READ_TYPES = tuple(element_type(name).safetensors for name in COMPUTE_TYPES)
ALIGNMENT_BYTES = 4096  # lets a loader map each tensor
_SLAB_BYTES = 64 * 2**20
# Tensors that carry nothing the graph needs: frequencies computed from the config, and tied heads.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


class WeightProvider(Protocol):
    """Gives a weight in slabs of rows, in any floating type."""

    def slabs(self, name: str) -> Iterator[Array]:
        """Yield consecutive rows of one weight."""


class CheckpointWeights:
    """Weights of a checkpoint, as a family's sources describe them."""

    def __init__(self, checkpoint: Checkpoint, sources: Mapping[str, Source], config: ModelConfig) -> None:
        self._checkpoint = checkpoint
        self._shapes = weight_shapes(config)
        self._sources = {name: sources[name] for name in self._shapes}
        self._check(config)

    def slabs(self, name: str) -> Iterator[Array]:
        """Yield consecutive rows of one weight, mapped from its file."""
        for source in self._tensors(name):
            tensor = self._checkpoint.read(source.name, source.rows)
            if source.strides:
                yield from _strided(tensor, source)
                continue
            step = max(1, source.interleaved)  # heads stay whole
            rows = step * max(1, _SLAB_BYTES // (step * max(1, tensor.nbytes // max(1, len(tensor)))))
            for begin in range(0, len(tensor), rows):
                slab = tensor[begin : begin + rows]
                yield _arranged(slab, source)

    def _tensors(self, name: str) -> list[Source]:
        """List the tensors that hold a weight."""
        source = self._sources[name]
        if source.name in self._checkpoint.entries or not source.parts:
            return [source]
        return [replace(source, name=part, parts=()) for part in source.parts]

    def _check(self, config: ModelConfig) -> None:
        """Check presence, type and shape of every tensor, and that none is left over."""
        used = set()
        for name, shape in self._shapes.items():
            tensors = self._tensors(name)
            each = shape if len(tensors) == 1 else (math.prod(shape[:-1]) // len(tensors), shape[-1])
            for source in tensors:
                used.add(source.name)
                self._check_tensor(source, (*each[:-2], *each[:-3:-1]) if source.transposed else each)
        tied = {"lm_head.weight"} if config.tied_embeddings else set()
        left = sorted(n for n in set(self._checkpoint.entries) - used - tied if not _IGNORED.search(n))
        if left:
            raise CheckpointError(
                f"the checkpoint has {len(left)} tensors that its config does not explain, e.g. {', '.join(left[:3])}"
            )

    def _check_tensor(self, source: Source, shape: tuple[int, ...]) -> None:
        entry = self._checkpoint.entries.get(source.name)
        if entry is None:
            raise CheckpointError(f"the checkpoint lacks the tensor {source.name} of shape {list(shape)}")
        if entry.element_type not in _READ_TYPES:
            raise CheckpointError(
                f"{source.name} in {entry.file} is {entry.element_type}; supported: {', '.join(_READ_TYPES)}"
            )
        if source.strides:
            taken = sum(end - begin for begin, end in source.strides)
            fits = entry.shape == (shape[0] // taken * source.period, *shape[1:]) and shape[0] % taken == 0
        elif source.rows is None:
            fits = entry.shape == ((shape[0], 1, *shape[1:]) if source.squeezed else shape)
        else:
            fits = len(entry.shape) == len(shape) and entry.shape[1:] == shape[1:] and entry.shape[0] >= source.rows[1]
        if not fits:
            raise CheckpointError(
                f"{source.name} in {entry.file} has shape {list(entry.shape)}, which does not hold "
                f"{list(shape)} at rows {source.rows or 'all'}; it contradicts config.json"
            )


def _strided(tensor: Array, source: Source) -> Iterator[Array]:
    """Yield the rows of each stride, one period after another."""
    periods = tensor.reshape(-1, source.period, *tensor.shape[1:])
    for begin, end in source.strides:
        for period in periods:
            yield period[begin:end]


def _arranged(slab: Array, source: Source) -> Array:
    """Turn leading rows of a tensor into those of the weight."""
    if source.squeezed:
        slab = slab.reshape(len(slab), *slab.shape[2:])
    if source.plus_one:
        return slab.astype(np.float32) + 1
    if source.transposed:
        slab = slab.swapaxes(-1, -2)
    if source.interleaved:
        heads = slab.reshape(-1, source.interleaved, *slab.shape[1:])
        return _even_first(heads).reshape(slab.shape)
    return _even_first(slab) if source.alternating else slab


def _even_first(values: Array) -> Array:
    """Move what has an odd place on the second axis behind what has an even one."""
    return np.concatenate([values[:, ::2], values[:, 1::2]], axis=1)


class RandomWeights:
    """Seeded random weights of a config's shapes: normal, with norms at one and biases at zero."""

    def __init__(self, config: ModelConfig, standard_deviation: float) -> None:
        self._shapes = weight_shapes(config)
        self._deviation = np.float32(standard_deviation)

    def slabs(self, name: str) -> Iterator[Array]:
        """Yield consecutive rows; equal names and shapes give equal values."""
        shape = self._shapes[name]
        if len(shape) == 1:
            yield np.full(shape, 0 if name.endswith(".bias") else 1, np.float32)
            return
        generator = np.random.default_rng(list(name.encode()))
        rows = max(1, _SLAB_BYTES // (4 * math.prod(shape[1:])))
        for begin in range(0, shape[0], rows):
            count = min(rows, shape[0] - begin)
            yield generator.standard_normal((count, *shape[1:]), dtype=np.float32) * self._deviation


def place_weights(config: ModelConfig, dtype: str, weight_format: str = "dense") -> dict[str, ExternalTensor]:
    """Decide where each weight lies in the weights file.

    A group of `weight_groups` starts at a multiple of the alignment and has no padding inside, so that a fused graph
    can read its members as one tensor.
    """
    shapes, stored = weight_shapes(config), FORMATS[weight_format]
    placed: dict[str, ExternalTensor] = {}
    end = 0
    for group in weight_groups(config):
        end += -end % ALIGNMENT_BYTES
        for name in group:
            for tensor, (element, shape) in stored.tensors(name, shapes[name], dtype).items():
                length = math.prod(shape) * element_type(element).bytes
                placed[tensor] = ExternalTensor(location=WEIGHTS_FILE, offset=end, length=length)
                end += length
    return placed


def placed_bytes(placed: Mapping[str, ExternalTensor]) -> int:
    """Return the size of the file that the weights make, padding included."""
    return max((where.end for where in placed.values()), default=0)


def write_weights(
    provider: WeightProvider,
    placed: Mapping[str, ExternalTensor],
    dtype: str,
    path: Path,
    advance: Callable[[int], object],
) -> None:
    """Write all weights to one file.

    Args:
        provider: gives the values.
        placed: where each weight goes, ascending.
        dtype: element type of the file.
        path: of the file, which is created.
        advance: called with the number of bytes written.

    Raises:
        CheckpointError: a weight has another size than its place.
    """
    element = element_type(dtype).numpy
    with path.open("xb") as stream:
        for name, where in placed.items():
            stream.write(bytes(where.offset - stream.tell()))
            for slab in provider.slabs(name):
                data = _stored(name, slab, element)
                stream.write(data.view(np.uint8).data)
                advance(data.nbytes)
            if stream.tell() != where.end:
                raise CheckpointError(f"{name} has {stream.tell() - where.offset} bytes, expected {where.length}")


def _stored(name: str, slab: Array, element: np.dtype[Any]) -> Array:
    """Return a slab in the type that is written; warn where that does not hold its values."""
    with np.errstate(over="ignore"):
        data = np.ascontiguousarray(slab, dtype=element)
    if element == np.float16 and not np.isfinite(data).all():
        warn_caller(f"{name} has values that float16 does not hold; export with a wider dtype")
    return data

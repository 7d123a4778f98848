"""Provides the graph's weights, checked before anything is written, and writes them one by one."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ortolan.element_types import COMPUTE_TYPES, element_type
from ortolan.errors import CheckpointError
from ortolan.export.caller import warn_caller
from ortolan.export.checkpoint import Array, Checkpoint
from ortolan.export.families.base import Source
from ortolan.export.packed import PublishedWeights
from ortolan.export.quantize import METHODS, quantize
from ortolan.graphs import ExternalTensor
from ortolan.graphs.config import ModelConfig
from ortolan.graphs.formats.low_bit import LowBit
from ortolan.graphs.formats.plan import stored_groups
from ortolan.graphs.parts import Formats
from ortolan.graphs.weights import weight_shapes

WEIGHTS_FILE = "model.onnx.data"
_READ_TYPES = tuple(element_type(name).safetensors for name in COMPUTE_TYPES)
ALIGNMENT_BYTES = 4096  # lets a loader map each tensor
_SLAB_BYTES = 64 * 2**20
_PIECE_WEIGHTS = 2**20  # that are quantized at a time
_MOST_DRAWN = 2**22 + 15  # an odd number, so that rows differ although values repeat
_MOST_PACKED = 2**20  # random weights of a tensor that are quantized; larger tensors repeat them
_ROW_BLOCK = 128  # rows of such a piece are a multiple: no block of fp8 is parted
# Tensors that carry nothing the graph needs: frequencies computed from the config, and tied heads.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


class WeightProvider(Protocol):
    """Gives a weight in slabs of rows, in any floating type, or as codes and scales that the checkpoint holds."""

    def slabs(self, name: str) -> Iterator[Array]:
        """Yield consecutive rows of one weight."""

    def packed(self, name: str) -> Iterator[dict[str, Array]] | None:
        """Return parts of codes and scales by port of LowBitLinear, each of consecutive rows; None: quantize it."""


class CheckpointWeights:
    """Weights of a checkpoint, as a family's sources describe them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        sources: Mapping[str, Source],
        config: ModelConfig,
        published: PublishedWeights | None = None,
    ) -> None:
        self._checkpoint, self._published = checkpoint, published
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
            step = source.padded_rows[0] if source.padded_rows else max(1, source.interleaved)  # heads stay whole
            rows = step * max(1, _SLAB_BYTES // (step * max(1, tensor.nbytes // max(1, len(tensor)))))
            for begin in range(0, len(tensor), rows):
                slab = tensor[begin : begin + rows]
                yield _arranged(slab, source)

    def packed(self, name: str) -> Iterator[dict[str, Array]] | None:
        """Return what the checkpoint holds of a weight in low bits, laid out anew."""
        return None if self._published is None else self._published.pieces(name)

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
            packed = None if self._published is None else self._published.check(name)
            if packed is not None:
                used |= packed
                continue
            tensors = self._tensors(name)
            for source, each in zip(tensors, self._part_shapes(tensors, shape), strict=True):
                used.add(source.name)
                given = _unpadded(source, each)
                self._check_tensor(source, (*given[:-2], *given[:-3:-1]) if source.transposed else given)
        tied = {"lm_head.weight"} if config.tied_embeddings else set()
        left = sorted(n for n in set(self._checkpoint.entries) - used - tied if not _IGNORED.search(n))
        if left:
            raise CheckpointError(
                f"the checkpoint has {len(left)} tensors that its config does not explain, e.g. {', '.join(left[:3])}"
            )

    def _part_shapes(self, tensors: list[Source], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """List the shapes of the tensors that hold a weight: with their own rows, where these are all of its rows."""
        entries = [self._checkpoint.entries.get(source.name) for source in tensors]
        is_one_expert = len(shape) == 3 and entries[0] is not None and len(entries[0].shape) == 2
        if len(tensors) == 1 and not is_one_expert:
            return [shape]
        wanted = math.prod(shape[:-1])
        rows = [entry.shape[0] if entry is not None and entry.shape else 0 for entry in entries]
        return [(each if sum(rows) == wanted else wanted // len(tensors), shape[-1]) for each in rows]

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


def _unpadded(source: Source, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor that a weight of a shape is padded from."""
    sizes = list(shape)
    for axis, heads in enumerate((source.padded_rows, source.padded_columns)):
        if heads is not None:
            sizes[axis] = sizes[axis] // heads[1] * heads[0]
    return tuple(sizes)


def _padded(slab: Array, axis: int, heads: tuple[int, int]) -> Array:
    """Put zeros behind each head of an axis."""
    given, whole = heads
    parted = slab.reshape(*slab.shape[:axis], -1, given, *slab.shape[axis + 1 :])
    widths = [(0, whole - given) if place == axis + 1 else (0, 0) for place in range(parted.ndim)]
    return np.pad(parted, widths).reshape(*slab.shape[:axis], -1, *slab.shape[axis + 1 :])


def _arranged(slab: Array, source: Source) -> Array:
    """Turn leading rows of a tensor into those of the weight."""
    if source.factor != 1.0:
        slab = slab.astype(np.float32) * np.float32(source.factor)
    for axis, sizes in enumerate((source.padded_rows, source.padded_columns)):
        if sizes is not None:
            slab = _padded(slab, axis, sizes)
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
    """Seeded random weights of a config's shapes: normal, with norms at one and biases at zero.

    A tensor of more than four million values repeats those, which takes a tenth of the time of drawing all. In low
    bits a tensor of more than a million repeats a block of rows, and one of experts its first expert.
    """

    def __init__(
        self, config: ModelConfig, standard_deviation: float, *, formats: Formats, dtype: str, method: str
    ) -> None:
        self._shapes = weight_shapes(config)
        self._deviation = np.float32(standard_deviation)
        self._formats, self._dtype, self._method = formats, dtype, method

    def packed(self, name: str) -> Iterator[dict[str, Array]] | None:
        """Return a large weight in low bits, of which one block is quantized; smaller ones are as others are."""
        stored, shape = self._formats.stored(name), self._shapes[name]
        if not isinstance(stored, LowBit) or math.prod(shape) <= _MOST_PACKED:
            return None
        *stack, rows, columns = shape
        height = rows if stack else max(1, _MOST_PACKED // columns // _ROW_BLOCK) * _ROW_BLOCK
        drawn = self._drawn(name, height * columns)
        block = quantize(name, np.resize(drawn, (height, columns)), stored, self._dtype, self._method)
        return _repeated(block, height, rows * math.prod(stack))

    def slabs(self, name: str) -> Iterator[Array]:
        """Yield consecutive rows; equal names and shapes give equal values."""
        shape = self._shapes[name]
        if len(shape) == 1:
            yield np.full(shape, 0 if name.endswith(".bias") else 1, np.float32)
            return
        columns = math.prod(shape[1:])
        drawn = self._drawn(name, math.prod(shape))
        if not isinstance(self._formats.stored(name), LowBit):
            drawn = drawn.astype(element_type(self._dtype).numpy)
        rows = max(1, _SLAB_BYTES // (4 * columns))
        for begin in range(0, shape[0], rows):
            count = min(rows, shape[0] - begin)
            first = np.roll(drawn, -(begin * columns % drawn.size))
            yield np.resize(first, (count, *shape[1:]))

    def _drawn(self, name: str, count: int) -> Array:
        generator = np.random.default_rng(list(name.encode()))
        return generator.standard_normal(min(count, _MOST_DRAWN), dtype=np.float32) * self._deviation


def _repeated(block: dict[str, Array], height: int, rows: int) -> Iterator[dict[str, Array]]:
    """Yield a block of so many rows until there are `rows`; scales of several rows each are cut with them."""
    for begin in range(0, rows, height):
        left = min(height, rows - begin)
        yield {port: values[: -(-left * len(values) // height)] for port, values in block.items()}


def place_weights(config: ModelConfig, dtype: str, formats: Formats, file: str) -> dict[str, ExternalTensor]:
    """Decide where each tensor lies in the weights file of that name.

    A group of `stored_groups` starts at a multiple of the alignment and has no padding inside, so that a fused graph
    can read its members as one tensor.
    """
    placed: dict[str, ExternalTensor] = {}
    end = 0
    for group in stored_groups(config, formats, dtype):
        for tensors in group:
            end += -end % ALIGNMENT_BYTES
            for tensor, (element, shape) in tensors.items():
                length = math.prod(shape) * element_type(element).bytes
                placed[tensor] = ExternalTensor(location=file, offset=end, length=length)
                end += length
    return placed


def placed_bytes(placed: Mapping[str, ExternalTensor]) -> int:
    """Return the size of the file that the weights make, padding included."""
    return max((where.end for where in placed.values()), default=0)


def no_feedback(name: str) -> None:
    """Calibrate no weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """What the weights file is to hold.

    Attributes:
        config: of the model.
        formats: of linear weights.
        placed: where each tensor goes.
        dtype: element type of dense weights, and of int scales.
        method: of quantization, see `ortolan.export.quantize`.
        feedback: asked once for each weight that is quantized, in the order of the file, see
            `ortolan.export.calibration`.
    """

    config: ModelConfig
    formats: Formats
    placed: Mapping[str, ExternalTensor]
    dtype: str
    method: str = METHODS[0]
    feedback: Callable[[str], Array | None] = no_feedback

    def write(self, provider: WeightProvider, path: Path, advance: Callable[[int], object]) -> None:
        """Write all weights, one at a time.

        Args:
            provider: gives the values.
            path: of the file, which is created.
            advance: called with the number of bytes written.

        Raises:
            CheckpointError: a weight has another size than its place, or values that its format does not hold.
        """
        with path.open("xb") as stream:
            stream.truncate(placed_bytes(self.placed))
            for name, shape in weight_shapes(self.config).items():
                cursors: dict[str, int] = {}
                for piece in self._pieces(provider, name, shape):
                    for tensor, data in piece.items():
                        stream.seek(cursors.get(tensor, self.placed[tensor].offset))
                        stream.write(data.view(np.uint8).data)
                        cursors[tensor] = stream.tell()
                        advance(data.nbytes)
                for tensor, end in cursors.items():
                    where = self.placed[tensor]
                    if end != where.end:
                        raise CheckpointError(f"{tensor} has {end - where.offset} bytes, expected {where.length}")

    def _pieces(self, provider: WeightProvider, name: str, shape: tuple[int, ...]) -> Iterator[dict[str, Array]]:
        """Yield parts of one weight's tensors, each with the rows that follow those of the part before."""
        stem, stored = name.removesuffix(".weight"), self.formats.stored(name)
        if not isinstance(stored, LowBit):
            element = element_type(self.dtype).numpy
            yield from ({name: _stored(name, slab, element)} for slab in provider.slabs(name))
            return
        packed = provider.packed(name)
        if packed is not None:
            for piece in packed:
                yield {f"{stem}.{port}": self._typed(port, values) for port, values in piece.items()}
            return

        feedback = self.feedback(name)

        def rounded(rows: Array) -> dict[str, Array]:
            arrays = quantize(name, rows, stored, self.dtype, self.method, feedback)
            return {f"{stem}.{port}": values for port, values in arrays.items()}

        yield from _in_parallel(rounded, _quantized_rows(provider.slabs(name), shape))

    def _typed(self, port: str, values: Array) -> Array:
        wanted = element_type(self.dtype).numpy if port == "scales" else values.dtype
        return _stored(port, values, wanted)


def _in_parallel(work: Callable[[Array], dict[str, Array]], pieces: Iterator[Array]) -> Iterator[dict[str, Array]]:
    """Yield what `work` makes of each piece, in order; as many are under way as there are CPUs."""
    count = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(count, thread_name_prefix="ortolan-quantize") as pool:
        under_way: deque[Future[dict[str, Array]]] = deque()
        for piece in pieces:
            if len(under_way) == count:
                yield under_way.popleft().result()
            under_way.append(pool.submit(work, piece))
        while under_way:
            yield under_way.popleft().result()


def _quantized_rows(slabs: Iterator[Array], shape: tuple[int, ...]) -> Iterator[Array]:
    """Yield the rows of a weight, or of each expert's, as many as are quantized at a time: no block is parted."""
    *_, rows, columns = shape
    count = max(1, _PIECE_WEIGHTS // columns // _ROW_BLOCK) * _ROW_BLOCK
    flat = (slab.reshape(-1, columns) for slab in slabs)
    if len(shape) == 2:
        yield from _regrouped(flat, count)
        return
    for expert in _regrouped(flat, rows):
        yield from (expert[begin : begin + count] for begin in range(0, rows, count))


def _regrouped(slabs: Iterator[Array], count: int) -> Iterator[Array]:
    """Yield the same rows, `count` at a time."""
    kept: list[Array] = []
    held = 0
    for slab in slabs:
        while held + len(slab) >= count:
            yield np.concatenate([*kept, slab[: count - held]])
            slab, kept, held = slab[count - held :], [], 0
        if len(slab):
            kept.append(slab)
            held += len(slab)
    if kept:
        yield np.concatenate(kept)


def _stored(name: str, slab: Array, element: np.dtype[Any]) -> Array:
    """Return a slab in the type that is written; warn where that does not hold its values."""
    with np.errstate(over="ignore"):
        data = np.ascontiguousarray(slab, dtype=element)
    if element == np.float16 and not np.isfinite(data).all():
        warn_caller(f"{name} has values that float16 does not hold; export with a wider dtype")
    return data

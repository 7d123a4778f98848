"""Copies the weights of a foreign model into one file, range by range, without holding them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from ortolan.errors import CheckpointError
from ortolan.export.reading import is_file, reading
from ortolan.export.weights import ALIGNMENT_BYTES, WEIGHTS_FILE
from ortolan.graphs import ExternalTensor, ForeignBytes, foreign_bytes, is_small

_SLAB_BYTES = 16 * 2**20


def inline_small_weights(model: onnx.ModelProto, folder: Path) -> None:
    """Put small external tensors into the graph, in place: shapes and axes, which the conversion must read.

    Raises:
        CheckpointError: a file is missing, or ends before such a tensor does.
    """
    sizes: dict[str, int] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL or not is_small(tensor):
            continue
        source = foreign_bytes(tensor)
        _check_range(tensor.name, source, folder, sizes)
        tensor.raw_data = b"".join(_slabs(tensor.name, source, folder))
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]


def place_foreign_weights(
    model: onnx.ModelProto,
    sources: Mapping[str, ForeignBytes],
    folder: Path,
    groups: Iterable[tuple[str, ...]],
) -> dict[str, ExternalTensor]:
    """Decide where each external weight of a converted graph goes, in the order of its initializers.

    Args:
        model: the converted graph.
        sources: where the bytes of its weights lie.
        folder: that the sources' files are relative to.
        groups: weights that follow each other without padding.

    Raises:
        CheckpointError: a source file is missing, or ends before a weight does.
    """
    placed: dict[str, ExternalTensor] = {}
    end = 0
    sizes: dict[str, int] = {}
    group_of = {name: group for group in groups for name in group}
    names = [t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    for group in dict.fromkeys(group_of.get(name, (name,)) for name in names):
        end += -end % ALIGNMENT_BYTES
        for name in group:
            _check_range(name, sources[name], folder, sizes)
            placed[name] = ExternalTensor(location=WEIGHTS_FILE, offset=end, length=sources[name].length)
            end += sources[name].length
    return placed


def _check_range(name: str, source: ForeignBytes, folder: Path, sizes: dict[str, int]) -> None:
    if source.file is None:
        return
    path = folder / source.file
    if source.file not in sizes:
        if not is_file(path):
            raise CheckpointError(f"{path} is missing; weight '{name}' lies in it")
        with reading(path):
            sizes[source.file] = path.stat().st_size
    if source.offset + source.length > sizes[source.file]:
        raise CheckpointError(
            f"{path} has {sizes[source.file]} bytes; weight '{name}' lies at {source.offset} .. "
            f"{source.offset + source.length}, so the file is truncated"
        )


@dataclass(frozen=True, slots=True)
class ForeignWeights:
    """The weights of a foreign model.

    Attributes:
        sources: where their bytes lie.
        folder: that the sources' files are relative to.
        turned: shapes [in, out] of those that are written as [out, in].
    """

    sources: Mapping[str, ForeignBytes]
    folder: Path
    turned: Mapping[str, tuple[int, int]]

    def slabs(self, name: str) -> Iterator[bytes | memoryview]:
        """Yield the bytes of one weight, in the order in which they are written."""
        if name in self.turned:
            return _turned_slabs(name, self.sources[name], self.folder, self.turned[name])
        return _slabs(name, self.sources[name], self.folder)


def write_foreign_weights(
    weights: ForeignWeights,
    placed: Mapping[str, ExternalTensor],
    target: Path,
    progress: Callable[[int, int], object],
) -> None:
    """Write the file of all weights.

    Args:
        weights: where the bytes lie.
        placed: where they go, ascending.
        target: the file, which is created.
        progress: called with (bytes written, bytes in all).

    Raises:
        CheckpointError: a source file ended while it was read, or cannot be read.
    """
    total, written = sum(where.length for where in placed.values()), 0
    with target.open("xb") as stream:
        for name, where in placed.items():
            stream.write(bytes(where.offset - stream.tell()))
            for slab in weights.slabs(name):
                stream.write(slab)
                written += len(slab)
                progress(written, total)


def _slabs(name: str, source: ForeignBytes, folder: Path) -> Iterator[bytes]:
    if source.file is None:
        yield source.data
        return
    left = source.length
    with reading(folder / source.file), (folder / source.file).open("rb") as stream:
        stream.seek(source.offset)
        while left:
            slab = stream.read(min(left, _SLAB_BYTES))
            if not slab:
                raise CheckpointError(f"{folder / source.file} ended while weight '{name}' was read")
            left -= len(slab)
            yield slab


def _turned_slabs(name: str, source: ForeignBytes, folder: Path, shape: tuple[int, int]) -> Iterator[memoryview]:
    """Yield a matrix [in, out] as rows of its transpose, mapped from its file."""
    element = np.dtype(f"u{source.length // (shape[0] * shape[1])}")
    if source.file is None:
        matrix = np.frombuffer(source.data, element).reshape(shape)
    else:
        with reading(folder / source.file):
            matrix = np.memmap(folder / source.file, element, "r", source.offset, shape)
    rows = max(1, _SLAB_BYTES // (shape[0] * element.itemsize))
    for begin in range(0, shape[1], rows):
        yield np.ascontiguousarray(matrix[:, begin : begin + rows].T).view(np.uint8).reshape(-1).data

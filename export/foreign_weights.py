"""Copies the weights of a foreign model into one file, range by range, without holding them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

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
    model: onnx.ModelProto, sources: Mapping[str, ForeignBytes], folder: Path
) -> dict[str, ExternalTensor]:
    """Decide where each external weight of a converted graph goes, in the order of its initializers.

    Args:
        model: the converted graph.
        sources: where the bytes of its weights lie.
        folder: that the sources' files are relative to.

    Raises:
        CheckpointError: a source file is missing, or ends before a weight does.
    """
    placed: dict[str, ExternalTensor] = {}
    end = 0
    sizes: dict[str, int] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        source = sources[tensor.name]
        _check_range(tensor.name, source, folder, sizes)
        end += -end % ALIGNMENT_BYTES
        placed[tensor.name] = ExternalTensor(location=WEIGHTS_FILE, offset=end, length=source.length)
        end += source.length
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


def write_foreign_weights(
    sources: Mapping[str, ForeignBytes],
    placed: Mapping[str, ExternalTensor],
    folder: Path,
    target: Path,
    progress: Callable[[int, int], object],
) -> None:
    """Write the file of all weights.

    Args:
        sources: where the bytes lie.
        placed: where they go, ascending.
        folder: that the sources' files are relative to.
        target: the file, which is created.
        progress: called with (bytes written, bytes in all).

    Raises:
        CheckpointError: a source file ended while it was read, or cannot be read.
    """
    total, written = sum(where.length for where in placed.values()), 0
    with target.open("xb") as stream:
        for name, where in placed.items():
            stream.write(bytes(where.offset - stream.tell()))
            for slab in _slabs(name, sources[name], folder):
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

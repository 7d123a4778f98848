"""Reads tensors of safetensors files, memory-mapped, one at a time.

Source: the safetensors format (huggingface/safetensors): eight bytes of header length, a JSON header, data.
"""

from __future__ import annotations

import json
import math
import operator
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortolan.element_types import from_safetensors
from ortolan.errors import CheckpointError, file_path
from ortolan.export.reading import is_file, reading
from ortolan.export.tokenizer_files import SIDE_FILES
from ortolan.folders import CHECKPOINT_FILE
from ortolan.hub import HubModel, is_hub_id

Array: TypeAlias = npt.NDArray[Any]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_COMPARED_VALUES = 2**22  # at a time


def _numpy_type(name: str) -> np.dtype[Any] | None:
    """Return NumPy's type for one of safetensors; None for one that is not known."""
    known = from_safetensors(name)
    return None if known is None else known.numpy


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies; `begin` is an offset into its file."""

    file: Path
    element_type: str
    shape: tuple[int, ...]
    begin: int
    length: int


class Checkpoint:
    """The tensors of a checkpoint folder, by name."""

    def __init__(self, entries: dict[str, TensorEntry]) -> None:
        self.entries = entries

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Array:
        """Map one tensor, or a half-open range of its rows, without copying it. Raises CheckpointError."""
        entry = self.entries[name]
        dtype = _numpy_type(entry.element_type)
        assert dtype is not None, "weights of other types are refused before they are read"
        with reading(entry.file):
            mapped = np.memmap(entry.file, dtype=dtype, mode="r", offset=entry.begin, shape=entry.shape)
        return mapped if rows is None else mapped[rows[0] : rows[1]]

    def are_equal(self, first: str, second: str) -> bool:
        """Say whether two tensors hold the same values, whatever their types. Raises CheckpointError."""
        entries = self.entries[first], self.entries[second]
        if entries[0].shape != entries[1].shape or any(_numpy_type(each.element_type) is None for each in entries):
            return False
        one, other = self.read(first).reshape(-1), self.read(second).reshape(-1)
        slabs = (slice(begin, begin + _COMPARED_VALUES) for begin in range(0, one.size, _COMPARED_VALUES))
        return all(np.array_equal(one[slab].astype(np.float32), other[slab].astype(np.float32)) for slab in slabs)

    def part(self, prefixes: Mapping[str, str], left_out: Sequence[str]) -> Checkpoint:
        """Return the checkpoint of a part of a larger model.

        Args:
            prefixes: beginnings of names, and what takes their place.
            left_out: modules whose tensors are not of this part.
        """
        others = tuple(f"{above}{module}." for module in left_out for above in ("", "model."))
        entries = {name: entry for name, entry in self.entries.items() if not name.startswith(others)}
        return Checkpoint({_renamed(name, prefixes): entry for name, entry in entries.items()})

    def only(self, module: str) -> Checkpoint:
        """Return the checkpoint of one module, whose tensors keep their names."""
        return Checkpoint({name: entry for name, entry in self.entries.items() if name.startswith(f"{module}.")})


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for prefix, replacement in prefixes.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def checkpoint_folder(given: object, *, weights: bool) -> Path:
    """Return the folder that a path or a Hub id stands for; of the hub's files only what an export reads is fetched.

    Raises:
        ConfigError: it is neither a path nor a Hub id, or the hub's model cannot be had.
        CheckpointError: the hub's index of weights is malformed.
        StorageError: the disk is full.
    """
    if not isinstance(given, str) or not is_hub_id(given):
        return file_path("hf_dir", given)
    model = HubModel(given, CHECKPOINT_FILE)
    model.fetch_present(SIDE_FILES)
    if weights:
        model.fetch_present([SINGLE_FILE, INDEX_FILE])
        is_sharded = is_file(model.folder / INDEX_FILE)
        model.fetch([file.name for file in _files(model.folder)] if is_sharded else [SINGLE_FILE])
    return model.folder


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of a folder's safetensors files.

    Raises:
        CheckpointError: no file, a missing shard, a file that cannot be read, a truncated or malformed one.
    """
    entries: dict[str, TensorEntry] = {}
    for file in _files(folder):
        if not is_file(file):
            raise CheckpointError(f"{file} is missing; {INDEX_FILE} names it")
        entries |= _read_header(file)
    return Checkpoint(entries)


def _files(folder: Path) -> list[Path]:
    """Return the files with the tensors; the single one comes before an index, as it does in transformers."""
    if is_file(folder / SINGLE_FILE):
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if is_file(index):
        try:
            with reading(index):
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [folder / name for name in sorted(set(weight_map.values()))]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    raise CheckpointError(
        f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors checkpoints are read "
        "(or export with weights='random')"
    )


def _read_header(file: Path) -> dict[str, TensorEntry]:
    with reading(file), file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise CheckpointError(f"{file} is truncated: {size} bytes do not hold its header")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} has a malformed header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a malformed header: found a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    return {name: _entry(file, name, raw, 8 + length, size) for name, raw in header.items()}


def _entry(file: Path, name: str, raw: Mapping[str, Any], data: int, size: int) -> TensorEntry:
    try:
        begin, end = (operator.index(offset) for offset in raw["data_offsets"])
        shape, element_type = tuple(operator.index(size) for size in raw["shape"]), str(raw["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the header's entry of {name} is malformed: {error!r}") from error
    if begin < 0 or min(shape, default=0) < 0:
        raise CheckpointError(f"{file}: the header's entry of {name} is malformed: {begin} .. {end}, shape {shape}")
    if data + end > size:
        raise CheckpointError(f"{file} is truncated: {name} ends at byte {data + end}, the file has {size}")
    known = _numpy_type(element_type)
    if known is not None:
        expected = math.prod(shape) * known.itemsize
        if end - begin != expected:
            raise CheckpointError(
                f"{file}: {name} of shape {shape} takes {expected} bytes, its entry has {end - begin}"
            )
    return TensorEntry(file=file, element_type=element_type, shape=shape, begin=data + begin, length=end - begin)

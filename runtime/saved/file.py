"""Writes and reads the file of a saved session: tensors and a description, under one checksum.

The file is a safetensors file: eight bytes of header length, a JSON header, data. The header's metadata holds the
format, its version and the description as JSON. The last tensor, "checksum", is the BLAKE2b digest of all bytes
before it; every version of the format ends that way, so that damage and another version can be told apart.

Source: the safetensors format (huggingface/safetensors), whose own library writes only what is in memory as a whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ortolan.element_types import from_safetensors
from ortolan.errors import ConfigError, ContractMismatchError, SessionFileError, StorageError

FORMAT = "ortolan-session"
VERSION = 2
CHECKSUM = "checksum"
CHECKSUM_BYTES = 32
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 * 2**20
BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor to be written; `parts` yields its elements in order, and is called once."""

    name: str
    element_type: str  # as safetensors spells it
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[npt.NDArray[Any]]]

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * _element_bytes(self.element_type)


def check_target(path: Path) -> None:
    """Raise ConfigError where no file can be written under that name."""
    if os.path.exists(path) and not os.path.isfile(path):  # unlike Path's, they take names that are too long
        raise ConfigError(f"{path} is not a regular file; give the name of the file to write")
    if not os.path.isdir(path.parent):
        raise ConfigError(f"{path.parent} is not a folder; make it, or give another name")
    folder = os.path.dirname(os.path.realpath(path))  # where a link leads, as that file is replaced
    if os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} may not be written to; save the session in another folder")


def write_session_file(path: Path, description: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """Write a file under a temporary name beside `path`, and rename it when all of it is on the disk.

    Only its owner may read or write the file, as it holds what was read; one that replaces another has its mode.

    Raises:
        ConfigError: no file can have that name, or none may be made there.
        StorageError: the disk is full, or writing failed otherwise; `path` is what it was before.
    """
    path = Path(os.path.realpath(path))
    check_target(path)
    temporary = path.with_name(f".ortolan-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=_open_private) as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            _write_content(file, description, tensors)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise StorageError(f"the session cannot be saved to {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _open_regular(path: str, flags: int) -> int:
    """Open a file that is not a pipe, a device or a folder; none of these is waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise SessionFileError(f"{path} is not a regular file; give the name of a file that a session was saved to")


def _write_content(file: BinaryIO, description: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    header = _header(description, tensors)
    for text in (struct.pack("<Q", len(header)), header):
        file.write(text)
        digest.update(text)
    for tensor in tensors:
        written = 0
        for part in tensor.parts():
            block = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            file.write(block)
            digest.update(block)
            written += block.nbytes
        assert written == tensor.bytes, tensor.name
    file.write(digest.digest())


def _header(description: Mapping[str, Any], tensors: Sequence[Tensor]) -> bytes:
    """Return the JSON header, padded so that the data behind it is aligned; NumPy's scalars become Python's."""
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "session": json.dumps(description, default=methodcaller("item")),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for tensor in [*tensors, _CHECKSUM_TENSOR]:
        begin, end = end, end + tensor.bytes
        header[tensor.name] = {
            "dtype": tensor.element_type,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % LENGTH_BYTES)


_CHECKSUM_TENSOR = Tensor(name=CHECKSUM, element_type="U8", shape=(CHECKSUM_BYTES,), parts=lambda: ())


def _sync_folder(folder: Path) -> None:
    """Bring the renaming to the disk, where the file system lets folders be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class SessionFile:
    """An open file whose checksum was found right; tensors are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Open and check a file.

        Raises:
            SessionFileError: it cannot be read, is not a saved session, or is truncated or altered.
            ContractMismatchError: another version of the format wrote it.
        """
        self.path = path
        with _reading(path), contextlib.ExitStack() as stack:
            self._file = stack.enter_context(open(path, "rb", opener=_open_regular))
            header, self._data_begin = _read_header(self._file, path)
            _check_sum(self._file, path)
            version = header["__metadata__"].get("version")
            if version != str(VERSION):
                raise ContractMismatchError(
                    f"{path} has version {version!r} of the format, this Ortolan reads {VERSION}"
                )
            self.description: dict[str, Any] = dict(json.loads(header.pop("__metadata__")["session"]))
            self._entries: dict[str, Any] = header
            self._check_entries(os.fstat(self._file.fileno()).st_size)
            stack.pop_all()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        with _reading(self.path):
            return tuple(self._entries[name]["shape"])

    def read(
        self,
        name: str,
        dtype: npt.DTypeLike,
        begin: int = 0,
        end: int | None = None,
        *,
        row_shape: tuple[int, ...] | None = None,
    ) -> npt.NDArray[Any]:
        """Return rows begin .. end of a tensor; `dtype` must be of its element size.

        Raises:
            SessionFileError: there are no such rows, or not of the `row_shape` that is given, or they cannot be read.
        """
        with _reading(self.path):
            entry = self._entries[name]
            rows, *rest = entry["shape"]
            end = rows if end is None else end
            row_bytes = math.prod(rest) * _element_bytes(entry["dtype"])
            if not 0 <= begin <= end <= rows:
                raise SessionFileError(f"{self.path}: {name} has {rows} rows, not {begin} .. {end}")
            if row_shape is not None and tuple(rest) != row_shape:
                raise SessionFileError(f"{self.path}: {name} has rows of shape {rest}, the model {list(row_shape)}")
            self._file.seek(self._data_begin + entry["data_offsets"][0] + begin * row_bytes)
            content = self._file.read((end - begin) * row_bytes)
            return np.frombuffer(content, dtype).reshape(end - begin, *rest)

    def _check_entries(self, file_bytes: int) -> None:
        """Check that each tensor lies in the file, and has the bytes that its shape says."""
        for name, entry in self._entries.items():
            shape, (begin, end) = entry["shape"], entry["data_offsets"]
            sizes = [*shape, begin, file_bytes - self._data_begin - end]
            is_whole = all(type(size) is int and size >= 0 for size in sizes)
            if not is_whole or end - begin != math.prod(shape) * _element_bytes(entry["dtype"]):
                raise SessionFileError(f"{self.path} is damaged: {name} has shape {shape} at {begin} .. {end}")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what reading a file meets into SessionFileError."""
    try:
        yield
    except OSError as error:
        raise SessionFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SessionFileError, ContractMismatchError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise SessionFileError(f"{path} is not a session as this version of Ortolan saves it: {error!r}") from error


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """Return the header, unchecked but for its format, and the offset of the data."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(LENGTH_BYTES)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == LENGTH_BYTES else size
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES - CHECKSUM_BYTES):
        raise SessionFileError(f"{path} is not a saved session, or is truncated")
    try:
        header = json.loads(file.read(length))
        found = header["__metadata__"]["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if found != FORMAT:
        raise SessionFileError(f"{path} is not a saved session, or its header is damaged")
    return header, LENGTH_BYTES + length


def _check_sum(file: BinaryIO, path: Path) -> None:
    """Read all of a file and compare its checksum."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    left = size - CHECKSUM_BYTES
    while left > 0:
        block = file.read(min(left, BLOCK_BYTES))
        if not block:
            break
        digest.update(block)
        left -= len(block)
    if digest.digest() != file.read(CHECKSUM_BYTES):
        raise SessionFileError(f"{path} is truncated or was altered: its checksum does not agree")


def _element_bytes(name: str) -> int:
    known = from_safetensors(name)
    if known is None:
        raise ValueError(f"element type {name!r} is not known")
    return known.bytes

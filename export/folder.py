"""Makes model folders, whole or not at all, and checks the arguments that all ways to make them share."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ortolan.contract import PAGE_SIZES
from ortolan.errors import MAX_LENGTH, ConfigError, StorageError, truth, whole_number
from ortolan.export.reading import is_file, reading
from ortolan.export.tokenizer_files import SIDE_FILES
from ortolan.graphs import build_evict_model
from ortolan.graphs.config import GatedDeltaConfig, MixerConfig
from ortolan.manifest import DEFAULT_CHUNK_SIZE, EVICT_FILE, MANIFEST_FILE, LayerInfo, Manifest

IDLE_SINK = "sink {} has no effect: no layer of the model has a window; evictions have a sink of their own"
LEAST_CONTEXT = 2  # tokens; the default eviction pools scores over so many to either side
DEFAULT_CONTEXT = 32768  # tokens of the longest sequence, where nobody named a number and the model allows it

_log = logging.getLogger(__name__)


def check_numbers(options: object, **least: int) -> None:
    """Check that attributes are whole numbers, each at least as large as given, and make them Python's.

    Raises:
        ConfigError: one is not, or more than a length can be.
    """
    for name, smallest in least.items():
        number = whole_number(name, getattr(options, name), smallest, MAX_LENGTH)
        object.__setattr__(options, name, number)  # the options are frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """What every way to make a folder asks of steps and caches, checked; see `export`."""

    chunk_size: int | None
    sink: int
    snapkv_window: int
    paged: bool
    page_size: int

    def __post_init__(self) -> None:
        if self.chunk_size is not None:
            check_numbers(self, chunk_size=1)
        check_numbers(self, sink=0, snapkv_window=0)
        truth("paged", self.paged)
        self._check_page_size()

    def _check_page_size(self) -> None:
        given = self.page_size
        with contextlib.suppress(ConfigError):  # the list of sizes says more
            check_numbers(self, page_size=1)
        if not isinstance(self.page_size, int) or isinstance(self.page_size, bool) or self.page_size not in PAGE_SIZES:
            raise ConfigError(f"page_size is {given!r}; allowed: {', '.join(map(str, PAGE_SIZES))}")

    @property
    def planned_chunk(self) -> int:
        """Prompt tokens per step that rings are planned for."""
        return DEFAULT_CHUNK_SIZE if self.chunk_size is None else self.chunk_size

    @property
    def graph_page_size(self) -> int:
        """Slots of a page; 0 for contiguous caches."""
        return self.page_size if self.paged else 0


def check_target(target: Path, overwrite: bool) -> None:
    """Check that a folder can be made, or replaced where that was asked for.

    Raises:
        ConfigError: something is in the way, or the folder cannot be read.
    """
    if not os.path.exists(target):  # unlike Path's, it takes names that are too long
        return
    if not target.is_dir():
        raise ConfigError(f"{target} exists and is not a folder; choose another output folder")
    try:
        is_empty = not _entries(target)
        is_model = os.path.isfile(target / MANIFEST_FILE)
    except OSError as error:
        raise ConfigError(f"{target} cannot be read: {error.strerror or error}; choose another folder") from error
    if not is_empty:
        if not overwrite:
            raise ConfigError(
                f"{target} is not empty; choose another folder, or overwrite it (overwrite=True, --overwrite)"
            )
        if not is_model:
            raise ConfigError(
                f"{target} holds something else than an exported model, so it is not overwritten; choose another folder"
            )


@contextlib.contextmanager
def temporary_folder(target: Path, weight_bytes: int) -> Iterator[Path]:
    """Make a folder on the target's disk: in it where it exists, else beside it; it is removed unless renamed away.

    Args:
        target: where `put_in_place` will put what is in the folder.
        weight_bytes: size of the file that will be written there besides small ones.

    Raises:
        ConfigError: no folder can be made there.
        StorageError: the disk is full or has no room for the weights, or writing failed otherwise.
    """
    real = _real(target)
    _check_free(real, weight_bytes)
    place = real if real.is_dir() else real.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        folder = place / f"{_prefix(real)}{secrets.token_hex(4)}"
        folder.mkdir()
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"no folder can be made at {target}: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot write at {target}: {error}") from error
    try:
        yield folder
    except StorageError:  # of a folder inside
        raise
    except OSError as error:
        raise StorageError(f"writing {target} failed, nothing was kept: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_free(target: Path, weight_bytes: int) -> None:
    """Raise StorageError where the disk has no room for the weights."""
    folder = next(folder for folder in (target, *target.parents) if os.path.isdir(folder))
    try:
        disk = shutil.disk_usage(folder)
    except OSError:  # writing will tell
        return
    if disk.total and disk.free < weight_bytes:  # some file systems tell nothing
        raise StorageError(
            f"the weights of {target} take {weight_bytes} bytes, and its disk has {disk.free} free; free "
            f"{weight_bytes - disk.free} more, or choose another disk"
        )


def put_in_place(folder: Path, target: Path) -> None:
    """Rename a finished folder to its target, or move its files to one that exists.

    What was there is removed once that is done, or stays. The target itself is never exchanged for another folder: it
    may be a mount, somebody's current folder, or lie where only its own files may be changed.
    """
    real = _real(target)
    if not real.exists():
        folder.rename(real)
        return
    with _locked(real):
        _exchange_files(folder, real)


def _exchange_files(folder: Path, real: Path) -> None:
    """Move all files from a folder to another, and remove what that one held; or leave both as they were."""
    aside = real / f"{folder.name}.old"
    aside.mkdir()
    moves = [(path, aside / path.name) for path in _entries(real)]  # the manifest goes first, and comes last
    moves += [(path, real / path.name) for path in reversed(_entries(folder))]
    try:
        for path, to in moves:
            path.rename(to)
    except BaseException:
        for path, to in reversed(moves):
            if not os.path.lexists(path):
                to.rename(path)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let other processes that change a folder wait, where its file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _entries(folder: Path) -> list[Path]:
    """List what is in a folder, its manifest first, without temporary folders."""
    prefix = _prefix(_real(folder))
    found = [path for path in folder.iterdir() if not path.name.startswith(prefix)]
    return sorted(found, key=lambda path: (path.name != MANIFEST_FILE, path.name))


def _prefix(real: Path) -> str:
    """Return how the names of temporary folders in or beside a target begin."""
    return f".{real.name}."


def _real(target: Path) -> Path:
    """Follow links, and give "." its name."""
    return Path(os.path.realpath(target))


def describe_layer(mixer: MixerConfig, *, evictable: bool) -> LayerInfo:
    """Say what the manifest does of a layer."""
    if isinstance(mixer, GatedDeltaConfig):
        return LayerInfo(
            window=mixer.window,
            num_heads=mixer.num_value_heads,
            num_kv_heads=mixer.num_key_heads,
            head_size=mixer.key_size,
            evictable=False,
            state=mixer.kind,
            value_size=mixer.value_size,
            conv_taps=mixer.conv_taps,
        )
    return LayerInfo(
        window=mixer.window,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_size=mixer.head_size,
        evictable=evictable,
        rope=mixer.rope,
        scale=mixer.scale,
        softcap=mixer.softcap,
        state=mixer.kind,
        cache_of=mixer.shares_cache_with,
    )


def complete_folder(folder: Path, manifest: Manifest, tokenizer_folder: Path) -> None:
    """Add what follows the decoder and its weights: evict.onnx, tokenizer, and ortolan.json with all files' sizes.

    Args:
        folder: with all else that belongs there.
        manifest: of the model.
        tokenizer_folder: has the tokenizer's files, as far as there are any.

    Raises:
        CheckpointError: one of these cannot be read.
    """
    if any(layer.evictable for layer in manifest.layers):
        (folder / EVICT_FILE).write_bytes(build_evict_model(manifest).SerializeToString(deterministic=True))
    for name in SIDE_FILES:
        if is_file(tokenizer_folder / name):
            with reading(tokenizer_folder / name):
                content = (tokenizer_folder / name).read_bytes()
            (folder / name).write_bytes(content)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    _log.info("wrote %d files, %d bytes: %s", len(files), sum(files.values()), ", ".join(files))
    (folder / MANIFEST_FILE).write_text(replace(manifest, files=files).to_json(), encoding="utf-8")

"""Identifies a model by all that its cached keys and values depend on: its layers, its graph and its weights."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ortolan.errors import ContractMismatchError
from ortolan.manifest import MODEL_FILE, Manifest

Fingerprint: TypeAlias = dict[str, Any]  # as JSON holds it

NAMED_FIELDS = (
    "architecture",
    "dtype",
    "weight_format",
    "cache_dtype",
    "vocab_size",
    "max_context",
    "sink",
    "rope_limits",
    "layers",
)
WEIGHT_SUFFIXES = (".data", ".safetensors")
WHOLE_BYTES = 64 * 2**20  # weight files up to this size are read as a whole
STRIDE_BYTES = 2**20
SAMPLE_BYTES = 4096
DIGEST_BYTES = 16


def take_fingerprint(folder: Path, manifest: Manifest) -> Fingerprint:
    """Identify the model of a folder.

    Covers the manifest's description of the model, all of model.onnx, and the weight files: all of each where it has
    at most 64 MiB; of a larger one its size, the first 4 KiB of every tensor and of every MiB, and the last 4 KiB.
    Weights that differ only between these samples pass for the same.

    Raises:
        ContractMismatchError: a file of the folder cannot be read.
    """
    described = dataclasses.asdict(manifest)
    result: Fingerprint = {name: _as_json(described[name]) for name in NAMED_FIELDS}
    weights = sorted(name for name in manifest.files if name.endswith(WEIGHT_SUFFIXES))
    try:
        graph = _digest(folder, [MODEL_FILE], {})
        return result | {"graph": graph, "weights": _digest(folder, weights, _tensor_offsets(folder / MODEL_FILE))}
    except OSError as error:
        raise ContractMismatchError(f"{folder} cannot be read any more: {error.strerror}") from error


def difference(saved: Fingerprint, model: Fingerprint) -> str | None:
    """Say in which way two fingerprints differ first; None where they are equal."""
    for name in NAMED_FIELDS:
        if saved.get(name) == model[name]:
            continue
        if name == "layers":
            return _layer_difference(saved.get(name), model[name])
        return f"its {name} is {saved.get(name)!r}, this model's {model[name]!r}"
    if saved.get("weights") != model["weights"]:
        return "its weights are others than this model's"
    if saved.get("graph") != model["graph"]:
        return "its graph is another one: exported with other options, from another config or by another version"
    return None


def _layer_difference(saved: Any, model: list[Any]) -> str:
    if not isinstance(saved, list) or len(saved) != len(model):
        count = len(saved) if isinstance(saved, list) else 0
        return f"it has {count} layers, this model {len(model)}"
    index = next(i for i, pair in enumerate(zip(saved, model, strict=True)) if pair[0] != pair[1])
    return f"its layer {index} is {saved[index]}, this model's {model[index]}"


def _as_json(value: Any) -> Any:
    """Turn tuples into lists, as reading JSON does."""
    return [_as_json(each) for each in value] if isinstance(value, tuple | list) else value


def _digest(folder: Path, names: list[str], offsets: Mapping[str, list[int]]) -> str:
    """Hash the names, sizes and contents of files; of large ones samples, at `offsets` and elsewhere."""
    result = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in names:
        with open(folder / name, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            result.update(f"{name}\0{size}\0".encode())
            if size <= WHOLE_BYTES:
                file.seek(0)
                result.update(file.read())
                continue
            for begin in sorted({*range(0, size, STRIDE_BYTES), size - SAMPLE_BYTES, *offsets.get(name, [])}):
                file.seek(begin)
                result.update(file.read(SAMPLE_BYTES))
    return result.hexdigest()


def _tensor_offsets(path: Path) -> dict[str, list[int]]:
    """Return where the tensors of a graph begin in each file of external data."""
    import onnx

    result: dict[str, list[int]] = {}
    for tensor in onnx.load_model(path, load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            result.setdefault(place["location"], []).append(int(place.get("offset", 0)))
    return result

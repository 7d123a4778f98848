"""Uses a model folder as a program would, so that whatever is wrong with it shows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import ortolan
from ortolan.manifest import MANIFEST_FILE


def copy_folder(source: Path, target: Path) -> Path:
    """Copy a model folder in place of what is there."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the object in a folder's manifest."""
    result: dict[str, Any] = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    return result


def write_manifest(folder: Path, manifest: Any, *, with_sizes: bool = True) -> None:
    """Write a manifest, with the sizes that the folder's files have now where that can be."""
    if with_sizes and isinstance(manifest, dict) and isinstance(manifest.get("files"), dict):
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        manifest["files"] = {name: sizes.get(name, size) for name, size in manifest["files"].items()}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")


def use(folder: Path) -> None:
    """Load a model, read, evict, generate, rewind, save; and serve, where it is paged."""
    model = ortolan.load(folder, device="cpu", num_threads=1)
    eviction = None
    if any(layer.evictable for layer in model.manifest.layers):
        eviction = ortolan.SnapKv(budget=24, window=8, sink=2)
    session = model.session(eviction=eviction)
    check_logits(session.prefill(list(range(3, 40))), model)
    list(session.generate([5, 6], 4))
    session.rewind(0)
    check_logits(session.step(7), model)
    if model.manifest.paged:
        with ortolan.Engine(model, max_sequences=2) as engine:
            streams = [engine.submit([5, 6, token], 4) for token in (7, 8)]
            for stream in streams:
                stream.result()


def check_logits(logits: np.ndarray, model: ortolan.Model) -> None:
    """Assert that there are as many as the vocabulary has tokens."""
    assert logits.shape == (model.manifest.vocab_size,)

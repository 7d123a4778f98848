"""Tells what a path is that a command cannot take, and what to run instead."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Literal, TypeAlias

MANIFEST_FILE = "ortolan.json"
CHECKPOINT_FILE = "config.json"
GENAI_FILE = "genai_config.json"
TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
SPECIALS_FILE = "special_tokens_map.json"
TEMPLATE_FILE, GENERATION_FILE = "chat_template.jinja", "generation_config.json"
POINTER_START = b"version https://git-lfs.github.com/spec/"
POINTER_BYTES = 1024  # the format allows no more

PathKind: TypeAlias = Literal["missing", "file", "onnx file", "model", "genai", "onnx", "checkpoint", "other"]

KIND_NAMES = {
    "checkpoint": "a Hugging Face checkpoint",
    "genai": "a model of onnxruntime-genai",
    "onnx": "a folder of ONNX graphs",
    "onnx file": "an ONNX file",
}


def identify(path: Path) -> PathKind:
    """Say what a path is, by the names of what lies there."""
    if not os.path.exists(path):  # unlike Path's, it takes names that are too long
        return "missing"
    if not os.path.isdir(path):
        return "onnx file" if path.suffix == ".onnx" else "file"
    if os.path.isfile(path / MANIFEST_FILE):
        return "model"
    if os.path.isfile(path / GENAI_FILE):
        return "genai"
    names = _listed(path)
    has_graph = any(name.endswith(".onnx") for name in names)
    if CHECKPOINT_FILE in names and not (has_graph and not any(name.endswith(".safetensors") for name in names)):
        return "checkpoint"
    return "onnx" if has_graph else "other"


def not_a_model(path: Path) -> str:
    """Say what a path is that should be a model folder, and what to do."""
    if problem := _unreadable(path):
        return problem
    kind = identify(path)
    if kind == "missing":
        return f"{path} does not exist; give a model folder, which `ortolan export` makes of a checkpoint"
    if kind == "onnx file" and os.path.isfile(path.parent / MANIFEST_FILE):
        return f"{path} is a file of a model folder; give the folder, {path.parent}"
    if kind in KIND_NAMES:
        return f"{path} is {KIND_NAMES[kind]}, not a model folder; {_making(kind, path)}, then give MODEL_DIR"
    if kind == "file":
        return f"{path} is a file, not a model folder; give a folder that `ortolan export` made"
    inside = [path / name for name in _listed(path) if os.path.isfile(path / name / MANIFEST_FILE)]
    advice = f"give {inside[0]}, which is one" if inside else "give a folder that `ortolan export` made"
    return f"{path} is not a model folder: it has no {MANIFEST_FILE}; {advice}"


def not_a_checkpoint(path: Path) -> str:
    """Say what a path is that should be a folder with config.json, and what to do."""
    kind = identify(path)
    if kind == "missing":
        return f"{path} does not exist; give the folder of a Hugging Face checkpoint, or its Hub id (owner/name)"
    if kind == "model":
        return f"{path} is a model folder of Ortolan already; load it as it is"
    if kind in KIND_NAMES:
        return f"{path} is {KIND_NAMES[kind]}, not a Hugging Face checkpoint; {_making(kind, path)}"
    if kind == "file":
        return f"{path} is a file; give the folder of a Hugging Face checkpoint"
    return f"{path} does not contain {CHECKPOINT_FILE}; give the folder of a Hugging Face checkpoint"


def checkpoint_not_source(path: Path) -> str | None:
    """Say that a source to convert is a checkpoint, and what to do; None where it is something else."""
    if identify(path) != "checkpoint":
        return None
    return f"{path} is {KIND_NAMES['checkpoint']}, which has no ONNX graph to convert; {_making('checkpoint', path)}"


def pointer_problem(path: Path) -> str | None:
    """Say that a file is git-lfs's stand-in for one that was not downloaded; None where it is not."""
    try:
        with path.open("rb") as stream:
            is_pointer = stream.read(len(POINTER_START)) == POINTER_START and path.stat().st_size <= POINTER_BYTES
    except OSError:
        return None
    if not is_pointer:
        return None
    return (
        f"{path} is a git-lfs pointer, not the file itself; download it: run `git lfs pull` in {path.parent} (git-lfs "
        "must be installed)"
    )


def _making(kind: str, path: Path) -> str:
    command = "export" if kind == "checkpoint" else "convert"
    return f"run `ortolan {command} {shlex.quote(str(path))} MODEL_DIR`"


def _unreadable(path: Path) -> str | None:
    """Say that a folder, or one that it lies in, may not be read; None where nothing keeps it from being read."""
    try:
        os.listdir(path)
        os.stat(path / MANIFEST_FILE)
    except PermissionError as error:
        return f"{path} cannot be read: {error.strerror}"
    except OSError:
        pass
    return None


def _listed(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []

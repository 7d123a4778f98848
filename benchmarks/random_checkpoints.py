"""Checkpoints of public models' shapes with random weights; shared by the model benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from model_shapes import shape_config

from ortolan.retrieval import shipped_model

Save = Callable[[dict[str, tuple[int, ...]], Path], None]
BLOCKS, SCALES = "_blocks", "_scales"  # endings of tensors of mxfp4: of 32 codes each, and one number for each block
BLOCK_SIZE = 32


def make_checkpoint(shape: str, folder: Path, dtype: str, save: Save, *, layers: int | None = None) -> Path:
    """Write a checkpoint of one shape, once.

    Args:
        shape: a key of SHAPES.
        folder: where to; reused where it holds one.
        dtype: what the config calls the weights' type.
        save: writes random weights of the given names and shapes to a safetensors file.
        layers: how many of the shape's layers; all where None.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    write_config(shape_config(shape, layers), folder, dtype, published=True)
    save(checkpoint_shapes(folder), folder / "model.safetensors")
    return folder


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that transformers' model of a folder's config would save.

    The experts of gpt-oss are those of its checkpoints: mxfp4, in the order of linear layers.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    if config.model_type != "gpt_oss":
        return shapes
    for name in [name for name in shapes if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = shapes.pop(name)
        shapes[name + BLOCKS] = (experts, outputs, inputs // BLOCK_SIZE, BLOCK_SIZE // 2)
        shapes[name + SCALES] = (experts, outputs, inputs // BLOCK_SIZE)
    return shapes


def write_config(config: dict[str, Any], folder: Path, dtype: str, *, published: bool = False) -> None:
    """Write what a checkpoint has beside its weights; `published`: these are in the format that is published."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config | {"torch_dtype": dtype}
    if published and config["model_type"] == "gpt_oss":
        config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):  # the peer's builder asks for a tokenizer
        (folder / name).write_bytes((shipped_model() / name).read_bytes())


def save_float32(shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Write float32 weights; norms are 1."""
    from safetensors.numpy import save_file

    generator = np.random.default_rng(0)
    tensors = {
        name: generator.standard_normal(size, dtype=np.float32) * np.float32(0.02)
        if len(size) > 1
        else np.ones(size, np.float32)
        for name, size in shapes.items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def save_bfloat16(shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Write bfloat16 weights, drawn on the GPU; norms are 1."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    bytes_of = {BLOCKS: (0, 256), SCALES: (118, 122)}  # any codes; 2^-9 to 2^-6
    tensors = {}
    for name, size in shapes.items():
        if limits := bytes_of.get("_" + name.rpartition("_")[2]):
            drawn = torch.randint(*limits, size, device="cuda", dtype=torch.uint8)
        elif len(size) > 1:
            drawn = torch.randn(size, device="cuda", dtype=torch.bfloat16) * 0.02
        else:
            drawn = torch.ones(size, device="cuda", dtype=torch.bfloat16)
        tensors[name] = drawn.cpu()
    save_file(tensors, str(path), metadata={"format": "pt"})

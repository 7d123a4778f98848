"""Writes weights as published checkpoints hold them, and what they stand for, each from its definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from families import tiny_checkpoint
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output feature of each nibble, lowest first
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 128}


@dataclass(frozen=True, slots=True)
class Written:
    """One linear layer: its tensors by ending, and the weight [N, K] that they stand for."""

    tensors: Tensors
    weight: np.ndarray


def _words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Pack integers along the last axis into int32 words."""
    each = 32 // bits
    grouped = values.reshape(*values.shape[:-1], -1, each).astype(np.uint64)
    words = np.zeros(grouped.shape[:-1], np.uint64)
    for place, which in enumerate(order or range(each)):
        words |= grouped[..., which] << np.uint64(place * bits)
    return words.astype(np.uint32).view(np.int32)


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _integers(rng: np.random.Generator, shape: tuple[int, int], bits: int, size: int) -> tuple[np.ndarray, ...]:
    """Draw codes [N, K], zero points and float16 scales [N, G]."""
    rows, columns = shape
    groups = columns // size
    codes = rng.integers(0, 1 << bits, shape, np.int64)
    zeros = rng.integers(1, 1 << bits, (rows, groups), np.int64)
    scales = (rng.random((rows, groups)) + 0.5).astype(np.float16) * np.float16(0.4 / (1 << bits))
    return codes, zeros, scales


def _value(codes: np.ndarray, zeros: np.ndarray | int, scales: np.ndarray) -> np.ndarray:
    size = codes.shape[1] // scales.shape[1]
    zeros = np.broadcast_to(zeros, scales.shape).repeat(size, axis=1)
    return (codes - zeros).astype(np.float32) * scales.astype(np.float32).repeat(size, axis=1)


def gptq(rng, shape, *, bits=4, size=64, offset=1, symmetric=False) -> Written:
    codes, zeros, scales = _integers(rng, shape, bits, size)
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    tensors = {
        ".qweight": _words(codes.T.reshape(-1, 32 // bits, shape[0]).swapaxes(1, 2), bits)[..., 0],
        ".qzeros": _words((zeros - offset).T, bits),
        ".scales": scales.T,
        ".g_idx": (np.arange(shape[1]) // size).astype(np.int32),
    }
    return Written({k: _tensor(v) for k, v in tensors.items()}, _value(codes, zeros, scales))


def awq(rng, shape, *, size=64) -> Written:
    codes, zeros, scales = _integers(rng, shape, 4, size)
    tensors = {
        ".qweight": _words(codes.T, 4, AWQ_ORDER),
        ".qzeros": _words(zeros.T, 4, AWQ_ORDER),
        ".scales": scales.T,
    }
    return Written({k: _tensor(v) for k, v in tensors.items()}, _value(codes, zeros, scales))


def packed(rng, shape, *, bits=4, size=64, symmetric=True) -> Written:
    codes, zeros, scales = _integers(rng, shape, bits, size)
    tensors = {
        ".weight_packed": _words(codes, bits),
        ".weight_scale": scales,
        ".weight_shape": np.array(shape, np.int64),
    }
    if symmetric:
        return Written({k: _tensor(v) for k, v in tensors.items()}, _value(codes, 1 << (bits - 1), scales))
    tensors[".weight_zero_point"] = _words(zeros.T, bits).T
    return Written({k: _tensor(v) for k, v in tensors.items()}, _value(codes, zeros, scales))


def int8_channels(rng, shape) -> Written:
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scales = (rng.random((shape[0], 1)) * 0.002 + 0.001).astype(np.float32)
    return Written({".weight": _tensor(codes), ".weight_scale": _tensor(scales)}, codes * scales)


def _float8(rng, shape) -> tuple[torch.Tensor, np.ndarray]:
    values = (rng.standard_normal(shape) * 40).astype(ml_dtypes.float8_e4m3fn)
    return _tensor(values.view(np.uint8)).view(torch.float8_e4m3fn), values.astype(np.float32)


def float8_channels(rng, shape) -> Written:
    codes, values = _float8(rng, shape)
    scales = (rng.random((shape[0], 1)) * 0.002 + 0.001).astype(np.float32)
    tensors = {".weight": codes, ".weight_scale": _tensor(scales), ".input_scale": torch.ones(1)}
    return Written(tensors, values * scales)


def float8_tensor(rng, shape) -> Written:
    codes, values = _float8(rng, shape)
    scale = np.float32(rng.random() * 0.002 + 0.001)
    return Written(
        {".weight": codes, ".weight_scale": torch.tensor(float(scale)), ".activation_scale": torch.tensor(0.5)},
        values * scale,
    )


def float8_blocks(rng, shape) -> Written:
    codes, values = _float8(rng, shape)
    scales = (rng.random((-(-shape[0] // 128), shape[1] // 128)) * 0.002 + 0.001).astype(np.float32)
    wide = scales.repeat(128, axis=0)[: shape[0]].repeat(128, axis=1)
    return Written({".weight": codes, ".weight_scale_inv": _tensor(scales)}, values * wide)


def nvfp4(rng, shape) -> Written:
    codes = rng.integers(0, 16, shape)
    scales = (rng.random((shape[0], shape[1] // 16)) * 200 + 20).astype(ml_dtypes.float8_e4m3fn)
    one = np.float32(rng.random() * 1000 + 2000)
    tensors = {
        ".weight_packed": _tensor((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)),
        ".weight_scale": _tensor(scales.view(np.uint8)).view(torch.float8_e4m3fn),
        ".weight_global_scale": _tensor(np.array([one])),
        ".input_global_scale": torch.ones(1),
    }
    factors = scales.astype(np.float64) * np.float64(np.float32(1) / one)
    return Written(tensors, (E2M1[codes] * factors.repeat(16, axis=1)).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Form:
    """A published form: what writes a layer, and config.json's section."""

    write: Callable[..., Written]
    section: dict[str, Any]
    options: dict[str, Any]


def _form(write: Callable[..., Written], method: str, options: dict[str, Any] | None = None, **section: Any) -> Form:
    return Form(write, {"quant_method": method, **section}, options or {})


FORMS = {
    "gptq": _form(gptq, "gptq", bits=4, group_size=64, desc_act=False, sym=False),
    "gptq-symmetric": _form(gptq, "gptq", {"symmetric": True}, bits=4, group_size=64, sym=True),
    "gptq-8": _form(gptq, "gptq", {"bits": 8}, bits=8, group_size=64),
    "gptq-v2": _form(gptq, "gptq", {"offset": 0}, bits=4, group_size=64, checkpoint_format="gptq_v2"),
    "awq": _form(awq, "awq", bits=4, group_size=64, version="gemm", zero_point=True),
    "packed-4": _form(packed, "compressed-tensors", format="pack-quantized"),
    "packed-8": _form(packed, "compressed-tensors", {"bits": 8}, format="pack-quantized"),
    "packed-zero-points": _form(packed, "compressed-tensors", {"symmetric": False}, format="pack-quantized"),
    "int8": _form(int8_channels, "compressed-tensors", format="int-quantized"),
    "float8": _form(float8_channels, "compressed-tensors", format="float-quantized"),
    "float8-tensor": _form(float8_tensor, "fp8", activation_scheme="static"),
    "float8-static": _form(
        float8_channels,
        "compressed-tensors",
        format="float-quantized",
        config_groups={"group_0": {"input_activations": {"num_bits": 8, "type": "float", "dynamic": False}}},
    ),
    "float8-blocks": _form(float8_blocks, "fp8", weight_block_size=[128, 128]),
    "nvfp4": _form(nvfp4, "compressed-tensors", format="nvfp4-pack-quantized"),
}


def write_published(
    folder: Path, form: Form, family: str = "llama", dense: tuple[str, ...] = (), **changes: Any
) -> Path:
    """Write a tiny checkpoint into `folder`/hf as a form has it, and the same weights, dense, into `folder`/dense.

    Args:
        folder: of both.
        form: of linear layers, without the head.
        family: of the model.
        dense: modules that are left as they are.
        changes: of the model's config.
    """
    rng = np.random.default_rng(7)
    source = tiny_checkpoint(family, folder / "dense", **{**SIZES, **changes})
    tensors = load_file(source / "model.safetensors")
    quantized: Tensors = {}
    for name, value in list(tensors.items()):
        stem = name.removesuffix(".weight")
        if not name.endswith("proj.weight") or stem.split(".")[-1] in dense:
            quantized[name] = value
            continue
        written = form.write(rng, tuple(value.shape), **form.options)
        tensors[name] = torch.from_numpy(written.weight)
        quantized |= {stem + ending: tensor for ending, tensor in written.tensors.items()}
    save_file(tensors, source / "model.safetensors")
    target = folder / "hf"
    target.mkdir()
    save_file(quantized, target / "model.safetensors")
    keys = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(keys | {"quantization_config": form.section}))
    for file in source.iterdir():
        if not (target / file.name).exists():
            (target / file.name).write_bytes(file.read_bytes())
    return target


def mxfp4_experts(rng: np.random.Generator, shape: tuple[int, int, int]) -> Written:
    """Draw a weight [E, N, K] in blocks of 32, as gpt-oss has it."""
    blocks = rng.integers(0, 256, (*shape[:2], shape[2] // 32, 16), np.uint8)
    scales = rng.integers(120, 125, (*shape[:2], shape[2] // 32), np.uint8)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = E2M1[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return Written({"_blocks": _tensor(blocks), "_scales": _tensor(scales)}, values.reshape(shape))


MXFP4_SECTION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def write_gpt_oss(folder: Path, **changes: Any) -> Path:
    """Write a tiny gpt-oss as it is published into `folder`/hf, and the same weights, dense, into `folder`/dense.

    A row of the published gate_up is a column of transformers' dense one; gate and up alternate in both.
    """
    rng = np.random.default_rng(11)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 4}
    source = tiny_checkpoint("gpt_oss", folder / "dense", **{**sizes, **changes})
    tensors = load_file(source / "model.safetensors")
    published: Tensors = {}
    for name, value in list(tensors.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            published[name] = value
            continue
        experts, columns, rows = value.shape
        written = mxfp4_experts(rng, (experts, rows, columns))
        tensors[name] = torch.from_numpy(np.ascontiguousarray(written.weight.swapaxes(1, 2)))
        published |= {name + ending: tensor for ending, tensor in written.tensors.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    target = folder / "hf"
    target.mkdir()
    save_file(published, target / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(keys | {"quantization_config": MXFP4_SECTION}))
    return target

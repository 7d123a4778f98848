"""Tiny models exported for the host and for a GPU, and what their logits may differ by."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import devices
import numpy as np
import torch
from families import shared_checkpoint, shared_model
from parity import oracle_logits
from tolerances import allowed_error
from transformers import AutoModelForCausalLM

import ortolan
from ortolan.element_types import COMPUTE_TYPES, element_type

MAX_CONTEXT, CHUNK_SIZE, VOCABULARY = 512, 16, 131
HELD_MODELS = devices.HELD_SESSIONS // 2  # of each kind; a model may have two sessions
FAMILIES = ("llama", "gemma3", "qwen3")
GRAPHS = {"plain": False, "fused": True}
ELEMENTS = {name: element_type(name).numpy for name in COMPUTE_TYPES}


@dataclass(frozen=True, slots=True)
class Pair:
    """One checkpoint: in float32 on the host, and on the GPU."""

    checkpoint: Path
    host: ortolan.Model
    device: ortolan.Model


def _checkpoint(family: str) -> Path:
    return shared_checkpoint(family, seed=5, num_key_value_heads=2)


def _export(family: str, dtype: str, **options: Any) -> Path:
    return shared_model(_checkpoint(family), dtype=dtype, max_context=MAX_CONTEXT, chunk_size=CHUNK_SIZE, **options)


@functools.lru_cache(maxsize=HELD_MODELS)
def open_pair(family: str, dtype: str, graph: str) -> Pair:
    """Open a family's models without end-of-sequence tokens, which random weights may choose at any time."""
    host = ortolan.load(_export(family, "float32"), device="cpu", num_threads=2)
    device = ortolan.load(_export(family, dtype), device="cuda", fused=GRAPHS[graph])
    for model in (host, device):
        object.__setattr__(model.manifest, "eos_token_ids", ())
    return Pair(_checkpoint(family), host, device)


@functools.lru_cache(maxsize=HELD_MODELS)
def open_device(family: str, dtype: str, graph: str, *, page_size: int, sink: int) -> ortolan.Model:
    """Open a family's model on the GPU with some pages (0: contiguous) and sinks, without end-of-sequence tokens."""
    pages = {"paged": True, "page_size": page_size} if page_size else {}
    model = ortolan.load(_export(family, dtype, sink=sink, **pages), device="cuda", fused=GRAPHS[graph])
    object.__setattr__(model.manifest, "eos_token_ids", ())
    return model


def draw_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


def allowed_logit_error(checkpoint: Path, token_ids: list[int], dtype: str) -> float:
    """Apply the rule of kernels to whole models: as wrong as plain arithmetic of that precision, twice."""
    return _allowed_logit_error(checkpoint, tuple(token_ids), dtype)


@functools.cache
def _allowed_logit_error(checkpoint: Path, token_ids: tuple[int, ...], dtype: str) -> float:
    """Let transformers read the tokens in that precision on the host, as plain arithmetic."""
    kind = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=kind, attn_implementation="eager").eval()
    with torch.no_grad():
        plain = model(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()
    return allowed_error(plain, oracle_logits(checkpoint, list(token_ids)), ELEMENTS[dtype])

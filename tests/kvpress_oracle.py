"""SnapKV and AdaKV as NVIDIA's kvpress defines them, on the queries and keys of transformers' own attention.

Source: kvpress (github.com/NVIDIA/kvpress), presses/snapkv_press.py and presses/adakv_press.py: the formulas, in words
of our own. Two things of the model are used where kvpress assumes them: its softmax scale, where kvpress divides by
sqrt(D), and its softcap, where kvpress has none. Models with neither are scored exactly as kvpress scores them.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

SAFEGUARD = 0.2  # of a budget, which AdaKV leaves to every head


@dataclass(frozen=True, slots=True)
class Projected:
    """What one layer's attention was computed from, after normalisation and RoPE; [heads, T, D] each."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float | None


def project(model: torch.nn.Module, token_ids: Sequence[int]) -> dict[int, Projected]:
    """Run a prompt through a model with eager attention, and return every layer's queries, keys and values."""
    seen: dict[int, Projected] = {}
    with _recorded(model, seen), torch.no_grad():
        model(torch.tensor([list(token_ids)]), use_cache=False)
    return seen


@contextlib.contextmanager
def _recorded(model: torch.nn.Module, seen: dict[int, Projected]) -> Iterator[None]:
    modeling = sys.modules[type(model).__module__]
    attend = modeling.eager_attention_forward

    def record(module, query, key, value, attention_mask, scaling, **options):
        seen[module.layer_idx] = Projected(query[0], key[0], value[0], scaling, options.get("softcap"))
        return attend(module, query, key, value, attention_mask, scaling=scaling, **options)

    with mock.patch.object(modeling, "eager_attention_forward", record):
        yield


def snapkv_scores(layer: Projected, window: int, kernel: int) -> np.ndarray:
    """Score every position, [Hkv, T]; those of the window come out above all others.

    Every query head's mean over the window is pooled by itself, over the positions before the window alone, and
    only then averaged over its group.
    """
    heads, length, _ = layer.query.shape
    kv_heads = layer.key.shape[0]
    keys = layer.key.repeat_interleave(heads // kv_heads, dim=0)
    logits = layer.query[:, -window:] @ keys.transpose(1, 2) * layer.scale
    if layer.softcap:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    newer = torch.arange(length)[None] > torch.arange(length - window, length)[:, None]
    weights = torch.softmax(logits.masked_fill(newer, -math.inf), dim=-1)[..., : length - window]
    pooled = torch.nn.functional.avg_pool1d(weights.mean(dim=1)[None], kernel, stride=1, padding=kernel // 2)[0]
    scores = pooled.reshape(kv_heads, heads // kv_heads, -1).mean(dim=1)
    return torch.nn.functional.pad(scores, (0, window), value=float(scores.max()) + 1).numpy()


def keep_snapkv(scores: np.ndarray, budget: int) -> list[np.ndarray]:
    """Keep every kv head's `budget` best, ascending."""
    return [np.sort(np.argsort(-row, kind="stable")[:budget]) for row in scores]


def keep_adakv(scores: np.ndarray, budget: int) -> list[np.ndarray]:
    """Keep the Hkv * `budget` best of all heads, among them each head's `SAFEGUARD` of the budget; ascending."""
    kv_heads, length = scores.shape
    ranked = scores.copy()
    for row in ranked:
        row[np.argsort(-row, kind="stable")[: int(budget * SAFEGUARD)]] = np.finfo(np.float32).max
    chosen = np.argsort(-ranked.ravel(), kind="stable")[: kv_heads * budget]
    return [np.sort(chosen[chosen // length == head] % length) for head in range(kv_heads)]


def differ_by_ties(got: list[np.ndarray], wanted: list[np.ndarray], scores: np.ndarray, rtol: float) -> bool:
    """Say whether two choices differ only where two runs of float32 cannot order the scores.

    Args:
        got: kept positions of each kv head.
        wanted: the same, of the oracle.
        scores: [Hkv, T], the oracle's.
        rtol: how far the scores of what only one side kept may lie apart, relatively.
    """
    only_got = [scores[head, list(set(a) - set(b))] for head, (a, b) in enumerate(zip(got, wanted, strict=True))]
    only_wanted = [scores[head, list(set(b) - set(a))] for head, (a, b) in enumerate(zip(got, wanted, strict=True))]
    extra, missing = np.sort(np.concatenate(only_got)), np.sort(np.concatenate(only_wanted))
    return len(extra) == len(missing) and bool(np.allclose(extra, missing, rtol=rtol, atol=0))

"""Runs a checkpoint through transformers and through Ortolan, and compares their logits."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import ortolan


@functools.cache
def oracle(folder: Path) -> torch.nn.Module:
    """Load the checkpoint with transformers: float32, eager attention, full attention masks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def oracle_logits(folder: Path, token_ids: list[int]) -> np.ndarray:
    """Return transformers' logits for every row of one prompt, [T, V] float32, without a cache."""
    with torch.no_grad():
        return oracle(folder)(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


def without_window(folder: Path, target: Path) -> Path:
    """Copy a checkpoint folder with every sliding window removed from its config."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    config["sliding_window"] = 100_000
    (target / "config.json").write_text(json.dumps(config))
    return target


def relative_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference of logits, relative to the spread of the expected ones."""
    return float(np.abs(actual - expected).max() / np.std(expected))


def decode_differences(session: ortolan.Session, folder: Path, prompt: list[int], steps: int) -> list[float]:
    """Prefill, then feed the oracle's greedy tokens; one relative difference per position.

    The oracle sees the whole sequence at once, so its rows are those of a run without any cache.
    """
    rows = [session.prefill(prompt)]
    tokens = list(prompt)
    for _ in range(steps):
        tokens.append(int(np.argmax(rows[-1])))
        rows.append(session.step(tokens[-1]))
    expected = oracle_logits(folder, tokens)[len(prompt) - 1 :]
    return [relative_difference(row, want) for row, want in zip(rows, expected, strict=True)]

"""What the choice of tokens is held against: float64 probabilities, the exact rule in whole numbers, chi-square."""

from __future__ import annotations

import math

import numpy as np

from ortolan import Sampling
from ortolan.runtime.generate.random import random_bits
from ortolan.runtime.generate.sampler import penalize


def draw_logits(rows: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * 3).astype(np.float32)


def distribution(logits: np.ndarray, options: Sampling) -> np.ndarray:
    """Return the float64 probabilities [V] that temperature, top_k, top_p and min_p leave."""
    scaled = (logits.astype(np.float64) - float(logits.max())) / options.temperature
    if 0 < options.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-options.top_k]] = -np.inf
    if options.top_p < 1.0:
        order = np.argsort(scaled, kind="stable")
        drop = np.cumsum(softmax(scaled)[order]) <= 1.0 - options.top_p
        drop[-1] = False
        scaled[order[drop]] = -np.inf
    if options.min_p > 0.0:
        probabilities = softmax(scaled)
        scaled[probabilities < options.min_p * probabilities.max()] = -np.inf
    return softmax(scaled)


def softmax(scaled: np.ndarray) -> np.ndarray:
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def choose_by_the_rule(logits: np.ndarray, options: Sampling, seed: int, position: int, seen=()) -> int:
    """Choose as the documents say, with whole numbers and one token at a time."""
    if options.repetition_penalty != 1.0:
        logits = penalize(logits, seen, options.repetition_penalty)
    inverse = np.float32(1 / options.temperature)
    with np.errstate(over="ignore"):
        shares = np.exp((logits - logits.max()) * inverse)
    weights = [int(weight) for weight in np.rint(shares * np.float32(2**40))]
    order = sorted(range(len(logits)), key=lambda token: (logits[token], token))
    if 0 < options.top_k < len(order):
        order = [token for token in order if logits[token] >= logits[order[-options.top_k]]]
    total = sum(weights[token] for token in order)
    limit = min(int((1.0 - options.top_p) * float(total)), total - 1) if options.top_p < 1 else -1
    dropped = end = 0
    for token in order:
        end += weights[token]
        if end <= limit or shares[token] < np.float32(options.min_p):
            dropped = end
    hit = dropped + (int(random_bits([seed], [position])[0]) * (total - dropped) >> 64)
    end = 0
    for token in order:
        end += weights[token]
        if hit < end:
            return token
    raise AssertionError(f"{hit} lies beyond {total}")


def assert_follows(drawn: np.ndarray, probabilities: np.ndarray) -> None:
    """Compare draws with probabilities [V] by chi-square; tokens that are expected less than five times are one."""
    expected = probabilities * len(drawn)
    assert (expected[drawn] > 0).all()
    counts, often = np.bincount(drawn, minlength=len(expected)), expected >= 5
    seen = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    assert ((seen - wanted) ** 2 / wanted).sum() <= freedom + 5 * math.sqrt(2 * freedom)

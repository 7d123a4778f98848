"""Kept positions after several evictions, against lists that are moved one by one."""

import numpy as np
import pytest
from evict_cases import KV_HEADS, manifest

from ortolan.runtime.state.lengths import Lengths


def draw_lists(rng, held, shared):
    """Draw what an eviction keeps of each head: ascending physical positions, -1 behind those of a shorter list."""
    heads = 1 if shared else KV_HEADS
    chosen = [np.sort(rng.choice(held[head], rng.integers(1, held[head] + 1), replace=False)) for head in range(heads)]
    lists = np.full((heads, max(map(len, chosen)) + int(rng.integers(2))), -1, np.int32)
    for head, positions in enumerate(chosen):
        lists[head, : len(positions)] = positions
    return lists


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_evictions_follow_one_another(seed, shared):
    rng = np.random.default_rng(seed)
    lengths = Lengths(manifest())
    holds = {layer: [[] for _ in range(KV_HEADS)] for layer in (0, 2)}
    for _ in range(4):
        count = int(rng.integers(1, 30))
        for head in (head for heads in holds.values() for head in heads):
            head.extend(range(lengths.logical, lengths.logical + count))
        lengths.advance(count)
        keep = {}
        for layer, heads in holds.items():
            lists = keep[layer] = draw_lists(rng, [len(head) for head in heads], shared)
            for head, row in zip(heads, np.broadcast_to(lists, (KV_HEADS, lists.shape[1])), strict=True):
                head[:] = [head[position] for position in row if position >= 0]
        lengths.record_eviction(keep)
        for lists in keep.values():
            lists[:] = -7  # the next eviction overwrites them
        for layer, heads in holds.items():
            assert lengths.physical[layer].tolist() == [len(head) for head in heads]
            assert lengths.physical[layer].dtype == np.int32
            width = max(map(len, heads))
            expected = [[*head, *[-1] * (width - len(head))] for head in heads]
            assert lengths.kept[layer].tolist() == expected
        assert lengths.evicted_at == lengths.logical

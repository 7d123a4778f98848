"""Kept positions after several evictions, against lists that are moved one by one."""

import numpy as np
import pytest
from evict_cases import KV_HEADS

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
    lengths = Lengths()
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
        lengths.record_eviction(keep, dict.fromkeys(holds, KV_HEADS))
        for lists in keep.values():
            lists[:] = -7  # the next eviction overwrites them
        for layer, heads in holds.items():
            counts = lengths.physical_of(layer, KV_HEADS)
            assert counts.tolist() == lengths.physical_at(lengths.logical)[layer].tolist() == [len(h) for h in heads]
            assert counts.dtype == np.int32
            assert lengths.held(layer) == max(map(len, heads))
            assert (lengths.physical_at(lengths.logical + 3)[layer] == counts + 3).all()
            width = max(map(len, heads))
            expected = [[*head, *[-1] * (width - len(head))] for head in heads]
            assert lengths.kept[layer].tolist() == expected
        assert lengths.most_held == max(len(head) for heads in holds.values() for head in heads)
        assert lengths.evicted_at == lengths.logical

"""KvCompact of lists so long that rows are written where other rows, on their way at the same time, came from."""

import devices
import numpy as np
import pytest
from harness import run_in_place

pytestmark = pytest.mark.usefixtures("target")

SHAPES = {"long": (2, 20_000), "short": (7, 2_000)}  # kv heads, slots
LISTS = {
    "all but the first": lambda rng, slots: np.arange(1, slots),
    "all but one in the middle": lambda rng, slots: np.delete(np.arange(slots), slots // 2),
    "most": lambda rng, slots: np.sort(rng.choice(slots, 19 * slots // 20, replace=False)),
    "few": lambda rng, slots: np.sort(rng.choice(slots, slots // 7, replace=False)),
    "the end": lambda rng, slots: np.arange(2 * slots // 3, slots),
}


def compacted(cache, lists):
    """Move rows of a cache [Hkv, C, D] as the lists say; -1 ends a list."""
    moved = cache.copy()
    for head, kept in enumerate(lists):
        kept = kept[kept >= 0]
        moved[head, : len(kept)] = cache[head, kept]
    return moved


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("head_size", [64, 200])
@pytest.mark.parametrize("page", [0, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_lists_move_rows_like_gathers(name, head_size, page, shape):
    heads, slots = SHAPES[shape]
    rng = np.random.default_rng(head_size + page)
    keep = np.full((1, heads, slots), -1, np.int32)
    for positions in keep[0]:
        kept = LISTS[name](rng, slots)
        positions[: len(kept)] = kept
    caches = [rng.integers(0, 1000, (heads, slots, head_size)).astype(devices.element()) for _ in range(2)]
    feeds = {"key_cache": caches[0][None], "value_cache": caches[1][None], "keep": keep}
    if page:
        table = rng.permutation(slots // page).astype(np.int32)
        for port, cache in zip(("key_cache", "value_cache"), caches, strict=True):
            feeds[port] = np.empty((len(table), heads, page, head_size), cache.dtype)
            feeds[port][table] = cache.reshape(heads, len(table), page, head_size).swapaxes(0, 1)
        feeds["block_table"] = table[None]
    results = run_in_place("KvCompact", feeds).values()
    for got, cache in zip(results, caches, strict=True):
        rows = got[table].swapaxes(0, 1).reshape(cache.shape) if page else got[0]
        devices.assert_same_bits(rows, compacted(cache, keep[0]))

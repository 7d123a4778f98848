"""Holds the memory of an engine's page pools, and shows an eviction the caches of one sequence in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ortolan import contract
from ortolan.manifest import Manifest
from ortolan.runtime.buffers import Array, Buffers
from ortolan.runtime.caches import LayerCache
from ortolan.runtime.engine_plan import EnginePlan


class Pools:
    """The pools of all layers, [N, Hkv, P, D] each; allocated once, never moved."""

    def __init__(self, manifest: Manifest, plan: EnginePlan, buffers: Buffers) -> None:
        self.manifest, self.buffers = manifest, buffers
        pages = {kind.name: kind.num_pages for kind in plan.kinds}
        self.layers: dict[int, LayerCache] = {}
        for kind in manifest.cache_kinds:
            for index in kind.layers:
                layer = manifest.layers[index]
                shape = (pages[kind.name], layer.num_kv_heads, manifest.page_size, layer.head_size)
                self.layers[index] = LayerCache(*(buffers.empty(shape, manifest.dtype) for _ in range(2)))

    @property
    def bytes(self) -> int:
        """Bytes of all pools."""
        return int(sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers.values()))

    def named(self) -> dict[str, Array]:
        """Map the graph's cache inputs to the pools."""
        keys = {contract.key_cache(index): layer.key for index, layer in self.layers.items()}
        return keys | {contract.value_cache(index): layer.value for index, layer in self.layers.items()}

    def make_captures(self, rows: int, sequences: int = 1) -> dict[int, Array]:
        """Allocate buffers [sequences, rows, Hq, D] for queries of the evictable layers."""
        return {
            index: self.buffers.empty((sequences, rows, layer.num_heads, layer.head_size), self.manifest.dtype)
            for index, layer in enumerate(self.manifest.layers)
            if layer.evictable
        }


class SequenceCaches:
    """One sequence's caches as `evict` takes them: the pools, its captured queries, and its block table."""

    def __init__(self, pools: Pools, captures: Mapping[int, Array], pages: Mapping[str, Sequence[int]]) -> None:
        self.buffers, self.layers, self.captures = pools.buffers, pools.layers, dict(captures)
        self.eviction: Any = None  # what `evict` bound to these buffers
        self._tables: dict[str, Array] = {}
        for kind in pools.manifest.cache_kinds:
            row = np.array([pages[kind.name]], np.int32)
            table = self._tables[kind.block_table] = self.buffers.allocate(row.shape, np.int32)
            self.buffers.write(table, row)

    def tables_in_use(self) -> dict[str, Array]:
        """Return the block tables, [1, pages in use] int32."""
        return self._tables

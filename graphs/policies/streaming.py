"""StreamingLLM: the first positions and the latest ones, whatever they say.

Source: Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453. (Keys keep their rotation here.)
"""

from __future__ import annotations

import numpy as np

from ortolan.graphs.builder import Tensor
from ortolan.graphs.evict_parts import EvictParts


def keep_streaming(parts: EvictParts) -> dict[int, Tensor]:
    """Keep `sink` first positions and the last `budget - sink`; every kv head keeps the same."""
    return {i: _keep(parts, i) for i in parts.layers}


def _keep(parts: EvictParts, i: int) -> Tensor:
    """Rank positions by themselves: the latest are the best, sinks above all."""
    path, graph, layer = f"layers.{i}/evict", parts.graph, parts.layers[i]
    slots = parts.cache_slots(i)
    positions = parts.positions(path, slots)
    lengths = parts.lengths(path, layer.kv_len, shared=False)
    budget = graph.node(f"{path}/count", "Min", [parts.budget, slots])
    recent = graph.node(f"{path}/recent", "Sub", [parts.budget, parts.sink])
    start = graph.node(f"{path}/recent_start", "Sub", [lengths, recent])
    is_recent = graph.node(f"{path}/is_recent", "GreaterOrEqual", [positions, start])
    is_sink = graph.node(f"{path}/is_sink", "Less", [positions, parts.sink])
    forced = graph.node(f"{path}/forced", "Or", [is_sink, is_recent])  # [B, Hkv, C]
    one, empty = graph.constant("float/one", 1, np.float32), graph.constant("float/empty", -1, np.float32)
    ranked = parts.held_or(path, graph.node(f"{path}/lifted", "Where", [forced, one, empty]), lengths, positions)
    held, chosen = parts.best(path, ranked, budget)
    return parts.ascending(path, held, chosen, slots, budget)

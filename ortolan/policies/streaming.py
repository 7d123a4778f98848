"""StreamingLLM: the first positions and the latest ones, whatever they say.

Source: Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453. (Keys keep their rotation here.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.policies.base import shared_lists
from ortolan.policies.eviction import Eviction
from ortolan.policies.parts import EMPTY, Kept, Parts, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming(Eviction):
    """Keeps the first `sink` positions and the last `budget - sink`."""

    summary = "the first positions and the latest ones"

    policy: str = "streaming"
    granularity: str = field(default="kv_head", metadata=shared_lists())

    def keep(self, parts: Parts) -> dict[int, Kept]:
        """Keep `sink` first positions and the last `budget - sink`; every kv head keeps the same."""
        graph = parts.graph
        recent = graph.node("recent/Sub", "Sub", [parts.budget, parts.sink])
        recent = graph.node("recent", "Max", [recent, graph.constant("int64/none", [0], "int64")])
        scores = parts.shared({i: _no_score(parts, i) for i in parts.layers}, self.granularity)
        return {i: parts.keep_best(i, score, parts.budget, recent) for i, score in scores.items()}


def _no_score(parts: Parts, i: int) -> Tensor:
    """Score no position, so that none is chosen but sinks and the window; [B, Hkv, C]."""
    path, graph, layer = f"layers.{i}/evict", parts.graph, parts.layers[i]
    lists = graph.node(f"{path}/lists/Shape", "Shape", [layer.kv_len])
    shape = graph.node(f"{path}/score/Concat", "Concat", [lists, parts.cache_slots(i)], {"axis": 0})
    return parts.filled(f"{path}/score", shape, EMPTY)

"""PyramidKV: SnapKV whose budget shrinks from the first layers to the last.

Source: PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, arXiv 2406.02069, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.policies.base import shared_lists
from ortolan.policies.parts import Kept, Parts, Tensor
from ortolan.policies.scored import ScoredEviction

STEEPNESS = 20  # beta of the paper: the last layer keeps about 1 / beta of the average beyond the window


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidKv(ScoredEviction):
    """SnapKV with more for early layers, so all layers together cannot share one list.

    The budgets average to `budget`, or to a little more where last layers are lifted to window and sinks.
    """

    summary = "as snapkv, with more for early layers"
    keeps_uneven = True

    policy: str = "pyramidkv"
    granularity: str = field(default="kv_head", metadata=shared_lists("kv_head", "layer"))

    def keep(self, parts: Parts) -> dict[int, Kept]:
        """Keep as SnapKV does, each layer within a budget of its own."""
        budgets = _budgets(parts)
        scores = parts.shared(self.scores(parts), self.granularity)
        return {i: parts.keep_best(i, score, budgets[i]) for i, score in scores.items()}


def _budgets(parts: Parts) -> dict[int, Tensor]:
    """Fall linearly from the first evictable layer to the last; no layer falls below window and sinks."""
    graph, layers = parts.graph, list(parts.layers)

    def whole(name: str, op: str, left: Tensor, right: Tensor | int) -> Tensor:
        if isinstance(right, int):
            right = graph.constant(f"int64/{right}", [right], "int64")
        return graph.node(f"pyramid/{name}", op, [left, right])

    rest = whole("rest", "Sub", parts.budget, parts.window)  # the average beyond the window
    smallest = whole("smallest", "Div", rest, STEEPNESS)
    largest = whole("largest", "Sub", whole("twice", "Mul", rest, 2), smallest)
    span = whole("span", "Sub", largest, smallest)
    least = whole("least", "Add", parts.window, parts.sink)
    budgets = {}
    for order, i in enumerate(layers):
        fall = whole(f"fall_{i}/Mul", "Mul", span, order)
        fall = whole(f"fall_{i}", "Div", fall, max(len(layers) - 1, 1))
        own = whole(f"own_{i}", "Sub", largest if len(layers) > 1 else rest, fall)
        budgets[i] = whole(f"budget_{i}", "Max", whole(f"with_window_{i}", "Add", own, parts.window), least)
    return budgets

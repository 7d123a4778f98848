"""StreamingLLM: the first positions and the latest ones, whatever they say.

Source: Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453. (Keys keep their rotation here.)
"""

from __future__ import annotations

import numpy as np
import onnx

from ortolan.graphs.builder import Tensor
from ortolan.graphs.evict_parts import EMPTY, EvictParts, Kept


def keep_streaming(parts: EvictParts) -> dict[int, Kept]:
    """Keep `sink` first positions and the last `budget - sink`; every kv head keeps the same."""
    graph = parts.graph
    recent = graph.node("recent/Sub", "Sub", [parts.budget, parts.sink])
    recent = graph.node("recent", "Max", [recent, graph.constant("int64/none", [0], np.int64)])
    scores = parts.shared_scores(lambda i: _no_score(parts, i))
    return {i: parts.keep_best(i, score, parts.budget, recent) for i, score in scores.items()}


def _no_score(parts: EvictParts, i: int) -> Tensor:
    """Score no position, so that none is chosen but sinks and the window; [B, Hkv, C]."""
    path, graph, layer = f"layers.{i}/evict", parts.graph, parts.layers[i]
    lists = graph.node(f"{path}/lists/Shape", "Shape", [layer.kv_len])
    shape = graph.node(f"{path}/score/Concat", "Concat", [lists, parts.cache_slots(i)], {"axis": 0})
    value = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], [EMPTY])
    return graph.node(f"{path}/score", "ConstantOfShape", [shape], {"value": value})

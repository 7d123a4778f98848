"""One budget for all kv heads of a layer, so that a head which needs more positions gets them."""

from __future__ import annotations

from ortolan.policies.parts import EMPTY, FORCED, Kept, Parts, Tensor


def keep_of_all_heads(parts: Parts, i: int, score: Tensor, safeguard_percent: int = 0) -> Kept:
    """Keep the best Hkv * budget positions of a layer, whichever kv heads they are of.

    Args:
        parts: the graph under construction.
        i: the layer.
        score: [B, Hkv, C]. Sinks and the last window are lifted above all scores; ties keep the lower head, then the
            lower position.
        safeguard_percent: share of the budget that every head keeps of its own best, whatever the others score.
    """
    path, graph = f"layers.{i}/evict", parts.graph
    slots = parts.slots(path, score)
    positions = parts.positions(path, slots)
    ranked = parts.rank(path, score, parts.lengths(path, parts.layers[i].kv_len), positions)
    if safeguard_percent:
        ranked = _safeguard(parts, path, ranked, safeguard_percent)
    mask = _best_of_all_heads(parts, path, i, ranked)  # [B, Hkv, C] bool
    chosen = graph.node(f"{path}/own", "Where", [mask, positions, slots])
    counts = parts.cast(f"{path}/counts/Cast", mask, "int64")
    axis = graph.constant("axes/slots", [2], "int64")
    counts = graph.node(f"{path}/counts", "ReduceSum", [counts, axis], {"keepdims": 0})
    longest = graph.node(f"{path}/longest/ReduceMax", "ReduceMax", [counts], {"keepdims": 0})
    longest = graph.node(f"{path}/longest", "Reshape", [longest, graph.constant("shapes/vector", [1], "int64")])
    held = graph.node(f"{path}/chosen", "Less", [chosen, slots])
    return parts.counted(i, parts.ascending(path, held, chosen, slots, longest))


def _safeguard(parts: Parts, path: str, ranked: Tensor, percent: int) -> Tensor:
    """Lift each head's best share of the budget above what other heads can outbid."""
    graph, slots = parts.graph, parts.slots(f"{path}/safe", ranked)
    safe = graph.node(f"{path}/safe/Mul", "Mul", [parts.budget, graph.constant("int64/safeguard", [percent], "int64")])
    safe = graph.node(f"{path}/safe/Div", "Div", [safe, graph.constant("int64/hundred", [100], "int64")])
    safe = graph.node(f"{path}/safe", "Min", [safe, slots])
    held, chosen = parts.best(f"{path}/safe", ranked, safe)
    top, empty = graph.constant("float/forced", FORCED, "float32"), graph.constant("float/empty", EMPTY, "float32")
    lifted = graph.node(f"{path}/safe/lifted", "Where", [held, top, empty])
    return graph.node(f"{path}/safe/ScatterElements", "ScatterElements", [ranked, chosen, lifted], {"axis": 2})


def _best_of_all_heads(parts: Parts, path: str, i: int, ranked: Tensor) -> Tensor:
    """Mark the Hkv * budget best positions of all heads together."""
    graph, heads = parts.graph, parts.manifest.layers[i].num_kv_heads
    flat = graph.node(f"{path}/flat", "Reshape", [ranked, graph.constant("shapes/flat", [0, -1], "int64")])
    shape = graph.node(f"{path}/flat/Shape", "Shape", [flat])
    available = graph.node(f"{path}/flat/size", "Gather", [shape, graph.constant("index/one", [1], "int64")])
    total = graph.node(f"{path}/total/Mul", "Mul", [parts.budget, graph.constant(f"int64/{heads}", [heads], "int64")])
    total = graph.node(f"{path}/total", "Min", [total, available])
    held, chosen = parts.best(f"{path}/all", flat, total)
    zeros = graph.node(f"{path}/zeros", "Mul", [flat, graph.constant("float/zero", 0, "float32")])
    ones = parts.cast(f"{path}/ones", held, "float32")
    marked = graph.node(f"{path}/marks", "ScatterElements", [zeros, chosen, ones], {"axis": 1})
    ranked_shape = graph.node(f"{path}/ranked/Shape", "Shape", [ranked])
    marks = graph.node(f"{path}/marks/Reshape", "Reshape", [marked, ranked_shape])
    return graph.node(f"{path}/marked", "Greater", [marks, graph.constant("float/half", 0.5, "float32")])

"""Builds evict.onnx: from captured queries to compacted caches, by the policy that the options name.

A policy that has the text read again has a second graph, which scores by one piece of that reading.
"""

from __future__ import annotations

import json

import onnx

from ortolan import contract
from ortolan.element_types import element_type
from ortolan.graphs.builder import FLOAT, INT32, GraphBuilder, emitters
from ortolan.graphs.evict_parts import EvictParts
from ortolan.graphs.score_parts import ScoreParts
from ortolan.manifest import Manifest
from ortolan.policies import STRUCTURE_METADATA, Eviction
from ortolan.policies.parts import Kept

DOC_STRING = (
    "Eviction by the policy {policy}: chooses `budget` positions of each full-attention cache (sinks and the last "
    "`window` always) and moves them to the front."
)
SCORE_DOC_STRING = (
    "Scores by the policy {policy}: how much the queries of one piece of a second reading attend to each position of "
    "the full-attention caches, and the largest of that and of what earlier pieces scored."
)


def build_evict_model(manifest: Manifest, eviction: Eviction | None = None) -> onnx.ModelProto:
    """Build the eviction graph of a model.

    Args:
        manifest: of a model with at least one evictable layer.
        eviction: the policy and the options that shape its graph; None takes the default policy. Budget, window and
            sink are inputs of the graph.

    Raises:
        ConfigError: the model does not have what the policy needs.
    """
    eviction = eviction or Eviction()
    eviction.check(manifest)
    parts = EvictParts(manifest, DOC_STRING.format(policy=eviction.policy))
    for i, kept in eviction.keep(parts).items():
        _compact(parts, i, kept, 1 if eviction.shares_lists else manifest.layers[i].num_kv_heads)
    model = parts.graph.finish()
    onnx.helper.set_model_props(model, {STRUCTURE_METADATA: json.dumps(eviction.structure)})
    return model


def build_score_model(manifest: Manifest, eviction: Eviction) -> onnx.ModelProto:
    """Build the graph that scores by one piece of a second reading.

    Args:
        manifest: of a model with at least one evictable layer.
        eviction: a policy with a `second_reading`.

    Raises:
        ConfigError: the model does not have what the policy needs.
    """
    eviction.check(manifest)
    graph = GraphBuilder("score", SCORE_DOC_STRING.format(policy=eviction.policy))
    parts = ScoreParts(manifest, graph)
    for i, score in eviction.score_piece(parts).items():
        largest = graph.node(f"layers.{i}/evict/Max", "Max", [parts.collected_score(i), score])
        graph.output(largest, contract.output(contract.score(i)), FLOAT, parts.score_shape(i))
    return graph.finish()


def _compact(parts: EvictParts, i: int, kept: Kept, lists: int) -> None:
    """Move the kept rows to the front, and say what was kept and how much each kv head holds."""
    path, graph, layer = f"layers.{i}/evict", parts.graph, parts.layers[i]
    shape, heads = parts.cache_shape(i), parts.manifest.layers[i].num_kv_heads
    dtype = element_type(parts.manifest.cache_dtype).onnx
    caches = graph.operator(
        f"{path}/KvCompact",
        emitters.kv_compact,
        {
            "key_cache": layer.key,
            "value_cache": layer.value,
            "keep": kept.keep,
            "key_scale": layer.key_scale,
            "value_scale": layer.value_scale,
            **parts.paging(i),
        },
        num_outputs=4 if parts.manifest.has_code_caches else 2,
    )
    graph.output(caches[0], contract.output(contract.key_cache(i)), dtype, shape)
    graph.output(caches[1], contract.output(contract.value_cache(i)), dtype, shape)
    for scale, name in zip(caches[2:], (contract.key_scale(i), contract.value_scale(i)), strict=False):
        graph.output(scale, contract.output(name), FLOAT, shape[:3])
    graph.output(kept.lengths, contract.output(contract.kv_len(i)), INT32, ["B", heads])
    graph.output(kept.keep, contract.keep(i), INT32, ["B", lists, f"kept_{i}"])

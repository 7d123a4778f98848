"""Builds evict.onnx: from captured queries to compacted caches, by the policy that the options name."""

from __future__ import annotations

import dataclasses
import difflib
import json

import onnx

from ortolan import contract
from ortolan.element_types import element_type
from ortolan.errors import ConfigError
from ortolan.graphs.builder import INT32, emitters
from ortolan.graphs.evict_parts import EvictOptions, EvictParts, Kept
from ortolan.graphs.policies import POLICIES
from ortolan.manifest import Manifest

SNAPKV_METADATA = "ortolan.snapkv"
DOC_STRING = (
    "Eviction by the policy {policy}: chooses `budget` positions of each full-attention cache (sinks and the last "
    "`window` always) and moves them to the front."
)


def build_evict_model(manifest: Manifest, **options: int | str) -> onnx.ModelProto:
    """Build the eviction graph of a model.

    Args:
        manifest: of a model with at least one evictable layer.
        **options: the fields of `EvictOptions`; those left out have its defaults.

    Raises:
        ConfigError: an option is not one of these, or no layer can be evicted.
    """
    if not any(layer.evictable for layer in manifest.layers):
        raise ConfigError("this model has no full-attention layer that captures queries, so nothing can be evicted")
    chosen = _read_options(options)
    parts = EvictParts(manifest, chosen, DOC_STRING.format(policy=chosen.policy))
    for i, kept in POLICIES[chosen.policy](parts).items():
        _compact(parts, i, kept)
    model = parts.graph.finish()
    onnx.helper.set_model_props(model, {SNAPKV_METADATA: json.dumps(dataclasses.asdict(chosen))})
    return model


def _read_options(given: dict[str, int | str]) -> EvictOptions:
    known = {field.name for field in dataclasses.fields(EvictOptions)}
    for name in given:
        if name not in known:
            raise ConfigError(f"eviction has no option {name!r}; there are: {', '.join(sorted(known))}")
    options = EvictOptions(**given)  # type: ignore[arg-type]  # the values' types are checked by the class
    if options.policy not in POLICIES:
        near = difflib.get_close_matches(str(options.policy), POLICIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"policy is {options.policy!r}; allowed: {', '.join(POLICIES)}{hint}")
    return options


def _compact(parts: EvictParts, i: int, kept: Kept) -> None:
    """Move the kept rows to the front, and say what was kept and how much each kv head holds."""
    path, graph, layer = f"layers.{i}/evict", parts.graph, parts.layers[i]
    shape, heads = parts.cache_shape(i), parts.manifest.layers[i].num_kv_heads
    dtype = element_type(parts.manifest.cache_dtype).onnx
    caches = graph.operator(
        f"{path}/KvCompact",
        emitters.kv_compact,
        {"key_cache": layer.key, "value_cache": layer.value, "keep": kept.keep, **parts.paging(i)},
        num_outputs=2,
    )
    graph.output(caches[0], contract.output(contract.key_cache(i)), dtype, shape)
    graph.output(caches[1], contract.output(contract.value_cache(i)), dtype, shape)
    graph.output(kept.lengths, contract.output(contract.kv_len(i)), INT32, ["B", heads])
    lists = heads if parts.options.granularity == "kv_head" else 1
    graph.output(kept.keep, contract.keep(i), INT32, ["B", lists, f"kept_{i}"])

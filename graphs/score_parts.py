"""The pieces of a graph that scores cached positions by captured queries: its inputs, and the scores."""

from __future__ import annotations

from collections.abc import Sequence

from ortolan import contract
from ortolan.element_types import element_type
from ortolan.graphs.builder import FLOAT, INT32, GraphBuilder, Shape, Tensor, emitters
from ortolan.manifest import Manifest
from ortolan.policies.parts import LayerInputs


class ScoreParts:
    """A graph under construction that reads captured queries and caches.

    It is the `ortolan.policies.parts.PieceParts` that policies score a piece of a second reading with.

    Attributes:
        manifest: of the model.
        graph: the graph itself.
        layers: the buffers of each evictable layer.
    """

    def __init__(self, manifest: Manifest, graph: GraphBuilder) -> None:
        """Declare the inputs."""
        self.manifest, self.graph = manifest, graph
        layers = [i for i, layer in enumerate(manifest.layers) if layer.evictable]
        self._tables = self._declare_tables(layers)
        self.layers = {i: self._declare(i) for i in layers}

    def _declare(self, i: int) -> LayerInputs:
        layer, graph, cache = self.manifest.layers[i], self.graph, self.cache_shape(i)
        dtype, cache_dtype = (element_type(name).onnx for name in (self.manifest.dtype, self.manifest.cache_dtype))
        return LayerInputs(
            capture=graph.input(contract.capture(i), dtype, ["B", "snapkv_window", layer.num_heads, layer.head_size]),
            key=graph.input(contract.key_cache(i), cache_dtype, cache),
            value=graph.input(contract.value_cache(i), cache_dtype, cache),
            kv_len=graph.input(contract.kv_len(i), INT32, ["B", layer.num_kv_heads]),
            **self._declare_scales(i),
        )

    def _declare_scales(self, i: int) -> dict[str, Tensor]:
        if not self.manifest.has_code_caches:
            return {}
        names, shape = (contract.key_scale(i), contract.value_scale(i)), self.cache_shape(i)[:3]
        key, value = (self.graph.input(name, FLOAT, shape) for name in names)
        return {"key_scale": key, "value_scale": value}

    def _declare_tables(self, layers: Sequence[int]) -> dict[int, Tensor]:
        """Declare the block tables of a paged model's evictable layers; returns each layer's."""
        tables: dict[int, Tensor] = {}
        for kind in self.manifest.cache_kinds:
            members = [i for i in kind.layers if i in layers]
            if members:
                shape = ["B", f"pages_per_sequence.{kind.name}"]
                tables |= dict.fromkeys(members, self.graph.input(kind.block_table, INT32, shape))
        return tables

    def paging(self, i: int) -> dict[str, Tensor]:
        """Return a layer's block table as an operator's input; none for contiguous caches."""
        return {"block_table": self._tables[i]} if i in self._tables else {}

    def cache_shape(self, i: int) -> Shape:
        """Shape of one layer's key or value cache."""
        layer = self.manifest.layers[i]
        if self.manifest.paged:
            pages = f"pages.{contract.cache_kind(layer.window)}"
            return [pages, layer.num_kv_heads, self.manifest.page_size, layer.head_size]
        return [f"pages_{i}", layer.num_kv_heads, f"slots_{i}", layer.head_size]

    def score(self, i: int, group_reduce: str, query_reduce: str = "mean") -> Tensor:
        """Score one layer's positions by the captured queries: [B, Hkv, C]."""
        graph, layer = self.graph, self.layers[i]
        (score,) = graph.operator(
            f"layers.{i}/evict/SnapKvScore",
            emitters.snap_kv_score,
            {
                "capture": layer.capture,
                "key_cache": layer.key,
                "kv_len": layer.kv_len,
                "key_scale": layer.key_scale,
                **self.paging(i),
            },
            scale=self.manifest.layers[i].scale,
            softcap=self.manifest.layers[i].softcap,
            group_reduce=group_reduce,
            query_reduce=query_reduce,
        )
        return score

    def collected_score(self, i: int) -> Tensor:
        """Declare the largest scores of all pieces of a second reading, [B, Hkv, C] float32."""
        return self.graph.input(contract.score(i), FLOAT, self.score_shape(i))

    def score_shape(self, i: int) -> Shape:
        """Shape of one layer's scores."""
        return ["B", self.manifest.layers[i].num_kv_heads, f"positions_{i}"]

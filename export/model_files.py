"""Writes the graphs and weights files of a model, and of its draft head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from ortolan.element_types import CPU_TYPES, cache_type
from ortolan.export.checkpoint import Array
from ortolan.export.folder import complete_folder, describe_layer
from ortolan.export.options import ExportOptions
from ortolan.export.weights import WEIGHTS_FILE, WeightProvider, WeightsFile, no_feedback
from ortolan.graphs import (
    ExternalTensor,
    attach_external_data,
    build_model,
    verify_fused_pair,
    verify_model,
)
from ortolan.graphs.cached_attention import is_evictable
from ortolan.graphs.config import ModelConfig, Rope
from ortolan.graphs.external_data import span_of
from ortolan.graphs.formats.plan import joint_tensors
from ortolan.graphs.options import Fusion
from ortolan.graphs.parts import Formats
from ortolan.manifest import (
    FUSED_FILES,
    HEAD_FILE,
    HEAD_FUSED_FILES,
    HEAD_WEIGHTS_FILE,
    MANIFEST_METADATA,
    MODEL_FILE,
    Manifest,
    cache_kinds,
)
from ortolan.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What the graphs and the weights file of a model, or of its draft head, are written from.

    Attributes:
        config: of the model.
        max_context: longest sequence.
        provider: gives the weights.
        options: of the export.
        placed: where each tensor of the weights file lies.
        formats: of linear weights.
        weight_format: what the manifest calls them.
        feedback: of weights that are calibrated, see `WeightsFile`.
    """

    config: ModelConfig
    max_context: int
    provider: WeightProvider
    options: ExportOptions
    placed: dict[str, ExternalTensor]
    formats: Formats
    weight_format: str
    feedback: Callable[[str], Array | None] = no_feedback

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(where.length for where in self.placed.values())

    def manifest(self) -> Manifest:
        """Describe the model to the runtime."""
        config, options = self.config, self.options
        graph = options.graph()
        layers = tuple(
            describe_layer(layer.mixer, evictable=is_evictable(layer.mixer, graph)) for layer in config.layers
        )
        ropes = [rope for rope in config.ropes if isinstance(rope, Rope)]  # checkpoints have frequencies, not tables
        return Manifest(
            architecture=config.architecture,
            dtype=options.dtype,
            weight_format=self.weight_format,
            cache_dtype=cache_type(options.cache_dtype, options.dtype),
            vocab_size=config.vocab_size,
            max_context=self.max_context,
            chunk_size=options.planned_chunk,
            chunk_chosen=options.chunk_size is not None,
            sink=options.sink,
            snapkv_window=options.snapkv_window,
            paged=options.paged,
            page_size=options.graph_page_size,
            cache_kinds=cache_kinds(layers) if options.paged else (),
            layers=layers,
            rope_limits=tuple(variant.limit for variant in ropes[0].variants) if ropes else (self.max_context,),
            bos_token_id=config.bos_token_id,
            eos_token_ids=config.eos_token_ids,
            fused_model=self._names.get("cuda"),
            cpu_model=self._names.get("cpu"),
            ropes={rope.name: tuple(variant.inv_freq for variant in rope.variants) for rope in ropes},
            hidden_size=config.hidden_size if config.gives_hidden else 0,
            drafts=config.drafts,
            ortolan_version=__version__,
        )

    def graphs(self, manifest: Manifest, shared: dict[str, ExternalTensor]) -> dict[str, onnx.ModelProto]:
        """Build and verify the graphs by file name; all read the one weights file.

        Args:
            manifest: of the model, which the graphs carry.
            shared: weights that lie in another model's file.
        """
        options, config, plain = self.options, self.config, self._names[None]
        graphs = {
            name: build_model(config, options.graph(device), self.formats) for device, name in self._names.items()
        }
        joints = joint_tensors(config, self.formats, options.dtype)
        whole = {name: span_of(self.placed, members) for name, members in joints.items()}
        places = shared | self.placed | whole
        for graph in graphs.values():
            graph.metadata_props.add(key=MANIFEST_METADATA, value=manifest.to_json())
            attach_external_data(graph, {t.name: places[t.name] for t in graph.graph.initializer if t.name in places})
            verify_model(graph)
            verify_fused_pair(graphs[plain], graph)
        return graphs

    def write_weights(self, path: Path, advance: Callable[[int], object]) -> None:
        """Write the weights file; `advance` is called with the number of bytes written."""
        file = WeightsFile(
            config=self.config,
            formats=self.formats,
            placed=self.placed,
            dtype=self.options.dtype,
            method=self.options.quantizer,
            feedback=self.feedback,
        )
        file.write(self.provider, path, advance)

    @property
    def _names(self) -> dict[Fusion | None, str]:
        """The files of the plain graph, which comes first, and of those for one device."""
        plain, fused = (HEAD_FILE, HEAD_FUSED_FILES) if self.config.drafts else (MODEL_FILE, FUSED_FILES)
        devices: list[Fusion] = ["cuda", "cpu"] if self.options.dtype in CPU_TYPES else ["cuda"]
        return {None: plain, **({device: fused[device] for device in devices} if self.options.fuse else {})}


class Progress:
    """Adds up the bytes of the parts of an export, and tells its caller of (bytes done, bytes in all)."""

    def __init__(self, told: Callable[[int, int], object] | None) -> None:
        self._done, self._total, self._told = 0, 0, told

    def expect(self, count: int) -> None:
        """Add to the bytes in all, before any is done."""
        self._total += count

    def advance(self, count: int) -> None:
        """Tell of so many more bytes."""
        self._done += count
        if self._told is not None:
            self._told(self._done, self._total)


def write_folder(
    folder: Path, source: Path, model: ModelFiles, head: ModelFiles | None, advance: Callable[[int], object]
) -> None:
    """Write a model folder.

    Args:
        folder: which is there, and empty.
        source: folder of the checkpoint, whose tokenizer goes with the model.
        model: what to write.
        head: the same of its draft head; None where it has none.
        advance: called with the number of bytes of weights written.
    """
    each = [model] if head is None else [model, head]
    manifests = [files.manifest() for files in each]
    for files, manifest in zip(each, manifests, strict=True):
        for name, graph in files.graphs(manifest, model.placed).items():
            (folder / name).write_bytes(graph.SerializeToString(deterministic=True))
    for files, name in zip(each, (WEIGHTS_FILE, HEAD_WEIGHTS_FILE), strict=False):
        files.write_weights(folder / name, advance)
    complete_folder(folder, replace(manifests[0], draft_head=manifests[1] if head else None), source)

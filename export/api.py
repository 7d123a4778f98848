"""Exports a checkpoint: reads and checks everything, then writes the model folder and renames it into place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import onnx

from ortolan.element_types import COMPUTE_TYPES, cache_type
from ortolan.errors import ConfigError, check_progress, file_path, one_of, truth
from ortolan.export.caller import warn_caller
from ortolan.export.checkpoint import checkpoint_folder, open_checkpoint
from ortolan.export.families.base import Family
from ortolan.export.folder import (
    DEFAULT_CONTEXT,
    IDLE_SINK,
    CacheOptions,
    check_numbers,
    check_target,
    complete_folder,
    describe_layer,
    put_in_place,
    temporary_sibling,
)
from ortolan.export.hf_config import HfConfig, read_hf_config
from ortolan.export.packed import Published, read_quantization
from ortolan.export.quantize import METHODS
from ortolan.export.registry import find_family
from ortolan.export.shapes import check_shapes
from ortolan.export.tokenizer_files import check_tokenizer
from ortolan.export.weights import (
    WEIGHTS_FILE,
    CheckpointWeights,
    RandomWeights,
    WeightProvider,
    WeightsFile,
    place_weights,
    placed_bytes,
)
from ortolan.graphs import (
    ExternalTensor,
    GraphOptions,
    attach_external_data,
    build_model,
    verify_fused_pair,
    verify_model,
)
from ortolan.graphs.cached_attention import is_evictable
from ortolan.graphs.config import ModelConfig, Rope
from ortolan.graphs.external_data import span_of
from ortolan.graphs.formats.dense import Dense
from ortolan.graphs.formats.low_bit import Kind
from ortolan.graphs.formats.plan import CHANNEL, GROUP_SIZES, MXFP4_GROUP, Wish, joint_tensors, wished_formats
from ortolan.graphs.parts import Formats
from ortolan.manifest import (
    FUSED_FILE,
    MANIFEST_METADATA,
    MODEL_FILE,
    Manifest,
    cache_kinds,
)
from ortolan.version import __version__

DENSE = "dense"
QUANTIZED = ("int4", "int8", "fp8", "mxfp4")
WEIGHT_FORMATS = (DENSE, *QUANTIZED)
HEADS = ("int8", DENSE)
FLOAT_GROUP_SIZES: Mapping[str | None, tuple[int | str, ...]] = {"fp8": (128, CHANNEL), "mxfp4": (MXFP4_GROUP,)}
WEIGHT_KINDS = ("checkpoint", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(CacheOptions):
    """Options of `export`, checked."""

    dtype: str
    max_context: int | None
    weights: str
    fuse: bool
    weight_format: str | None
    cache_dtype: str | None
    group_size: int | str | None = None
    asymmetric: bool = False
    quantizer: str = METHODS[0]
    head_format: str = HEADS[0]

    def __post_init__(self) -> None:
        CacheOptions.__post_init__(self)  # super() does not work in a class with slots
        one_of("dtype", self.dtype, COMPUTE_TYPES)
        self._check_weights()
        cache_type(self.cache_dtype, self.dtype)
        one_of("weights", self.weights, WEIGHT_KINDS)
        truth("fuse", self.fuse)
        if self.max_context is not None:
            check_numbers(self, max_context=1)
            if self.sink >= self.max_context:
                raise ConfigError(f"sink {self.sink} must be less than max_context {self.max_context}")

    def _check_weights(self) -> None:
        truth("asymmetric", self.asymmetric)
        one_of("quantizer", self.quantizer, METHODS)
        one_of("head_format", self.head_format, HEADS)
        if self.weight_format is not None:
            one_of("weight_format", self.weight_format, WEIGHT_FORMATS)
        if self.weight_format not in QUANTIZED:
            idle = {"group_size": self.group_size is not None, "asymmetric": self.asymmetric}
            given = [name for name, is_given in idle.items() if is_given]
            if given:
                raise ConfigError(f"{given[0]} needs a weight_format: {', '.join(QUANTIZED)}")
            return
        sizes = FLOAT_GROUP_SIZES.get(self.weight_format, (*GROUP_SIZES, CHANNEL))
        if self.group_size is not None and self.group_size not in sizes:
            allowed = ", ".join(f'or "{size}"' if size == CHANNEL else str(size) for size in sizes)
            raise ConfigError(f"group_size is {self.group_size!r}; allowed: {allowed}")
        if self.asymmetric and self.weight_format in FLOAT_GROUP_SIZES:
            raise ConfigError(f"asymmetric is for int4 and int8; {self.weight_format} has no zero points")

    @property
    def wish(self) -> Wish | None:
        """What is asked of weights that are quantized; None where none are."""
        if self.weight_format not in QUANTIZED:
            return None
        return Wish(
            kind=cast("Kind", self.weight_format),
            group_size=self.group_size,
            zero_points=self.asymmetric,
            head=self.head_format,
        )

    def graph(self, *, fused: bool) -> GraphOptions:
        """Return what the graph builder is asked for."""
        return GraphOptions(
            dtype=self.dtype,
            cache_dtype=cache_type(self.cache_dtype, self.dtype),
            sink=self.sink,
            snapkv_window=self.snapkv_window,
            page_size=self.graph_page_size,
            fused=fused,
        )


def export(
    hf_dir: str | Path,
    out_dir: str | Path,
    dtype: str = "float32",
    max_context: int | None = None,
    chunk_size: int | None = None,
    sink: int = 0,
    snapkv_window: int = 64,
    paged: bool = False,
    weights: str = "checkpoint",
    fuse: bool = True,
    overwrite: bool = False,
    progress: Callable[[int, int], object] | None = None,
    page_size: int = 64,
    weight_format: str | None = None,
    cache_dtype: str | None = None,
    group_size: int | str | None = None,
    asymmetric: bool = False,
    quantizer: str = METHODS[0],
    head_format: str = HEADS[0],
) -> Path:
    """Export a Hugging Face checkpoint folder to a model folder.

    Args:
        hf_dir: folder with config.json and safetensors files, or the id of such a model on the Hugging Face hub
            ("owner/name"), whose files come from the hub's cache or are downloaded there. A folder of that name wins.
        out_dir: folder to make; written under a temporary name beside it, and renamed when it is whole.
        dtype: "float32", "float16" or "bfloat16", of activations.
        max_context: longest sequence, tokens; None takes the model's own (max_position_embeddings), at most 32768.
        chunk_size: prompt tokens per step that the ring caches are planned for by default; None takes 2048, and lets
            sessions on CUDA read models without rings in steps of up to 16384.
        sink: first positions that every layer keeps and sees, beside its window (StreamingLLM, arXiv 2309.17453).
        snapkv_window: queries captured for SnapKV; 0 exports a model that cannot evict.
        paged: make caches pools of pages with block tables, which many sequences share.
        weights: "checkpoint", or "random", which needs config.json alone.
        fuse: write model.fused.onnx too, which CUDA runs: fewer, larger operators over the same weights file.
        overwrite: replace `out_dir` where it is a model folder.
        progress: called with (bytes written, bytes in all).
        page_size: slots of a page, 16, 32, 64, 128 or 256; kernels are fastest from 64 on, small pages waste least.
        weight_format: how linear weights are stored: "dense" (one element of `dtype` each), "int4", "int8", "fp8" or
            "mxfp4", and experts of mixtures likewise, while their routers stay dense; None: as the checkpoint
            publishes them.
        cache_dtype: of keys and values that layers keep: None for the `dtype`, or "fp8" or "int8", half the bytes of a
            16-bit type, with a float32 scale beside each row of a kv head.
        group_size: input features that share a scale: 32, 64 or 128 (of fp8: 128, blocks of 128 x 128; of mxfp4:
            32), or "channel". None takes "channel" for fp8, else the largest that divides all layers.
        asymmetric: give each group of int4 or int8 a zero point.
        quantizer: "search" for the scale of least squared error, or "nearest" for that of the largest magnitude.
        head_format: format of the head where weights are quantized, "int8" or "dense"; where it is the embedding, too,
            that of both.

    Returns:
        The model folder.

    Raises:
        ConfigError: an argument has a value that is not allowed, `out_dir` is in the way, or the hub does not have the
            model or cannot be reached.
        StorageError: the disk is full, or writing failed otherwise; what was in `out_dir` is still there.
        UnsupportedModelError: the checkpoint asks for something that Ortolan does not implement.
        CheckpointError: the checkpoint is incomplete, cannot be read, or contradicts its config.
    """
    options = ExportOptions(
        dtype=dtype,
        max_context=max_context,
        chunk_size=chunk_size,
        sink=sink,
        snapkv_window=snapkv_window,
        paged=paged,
        page_size=page_size,
        weights=weights,
        fuse=fuse,
        weight_format=weight_format,
        cache_dtype=cache_dtype,
        group_size=group_size,
        asymmetric=asymmetric,
        quantizer=quantizer,
        head_format=head_format,
    )
    target = file_path("out_dir", out_dir)
    check_progress(progress)
    check_target(target, truth("overwrite", overwrite))
    parts = _read(checkpoint_folder(hf_dir, weights=weights != "random"), options)
    with temporary_sibling(target, placed_bytes(parts.placed)) as folder:
        _write_folder(folder, parts, progress or (lambda done, total: None))
        put_in_place(folder, target)
    return target


def _read(source: Path, options: ExportOptions) -> _Parts:
    """Read and check a checkpoint folder, and warn of what its user may not expect."""
    hf_config = read_hf_config(source)
    top_config, family = hf_config, find_family(hf_config)
    hf_config = family.text_config(hf_config)
    own = hf_config.integer("max_position_embeddings", DEFAULT_CONTEXT)
    context = min(own, DEFAULT_CONTEXT) if options.max_context is None else options.max_context
    options = replace(options, max_context=context)
    config = family.read(hf_config, context)
    check_shapes(config)
    published = read_quantization(top_config)
    provider, formats = _provider(source, family, hf_config, config, options, published)
    check_tokenizer(source, is_wanted=options.weights != "random")
    if context > own:
        warn_caller(f"max_context {context} is beyond the model's max_position_embeddings {own}")
    if options.sink and all(layer.mixer.window < 0 for layer in config.layers):
        warn_caller(IDLE_SINK.format(options.sink))
    if family.left_out:
        warn_caller(
            f"{family.architecture} is exported without its {' and '.join(family.left_out)}: the model folder reads "
            "text alone"
        )
    placed = place_weights(config, options.dtype, formats)
    name = (options.weight_format or DENSE) if published is None else published.method
    return _Parts(source, config, context, provider, options, placed, formats, name)


def _provider(
    source: Path,
    family: Family,
    hf_config: HfConfig,
    config: ModelConfig,
    options: ExportOptions,
    published: Published | None,
) -> tuple[WeightProvider, Formats]:
    """Return what gives the weights, and their formats."""
    if published is not None:
        _check_published(published, options)
    formats = Formats(default=Dense()) if options.wish is None else wished_formats(config, options.wish)
    if options.weights == "random":
        return RandomWeights(config, hf_config.number("initializer_range", 0.02)), formats
    checkpoint = open_checkpoint(source).part(family.prefixes, family.left_out).part({}, family.unread(config))
    sources = family.sources(config)
    if published is None:
        return CheckpointWeights(checkpoint, sources, config), formats
    packed = published.weights(checkpoint, sources, config)
    return CheckpointWeights(checkpoint, sources, config, packed), packed.formats


def _check_published(published: Published, options: ExportOptions) -> None:
    """Refuse to quantize what is quantized. Raises ConfigError."""
    if options.weight_format is not None:
        raise ConfigError(
            f"weight_format is {options.weight_format!r}, but the checkpoint is quantized already "
            f"({published.method}); leave weight_format out, or give the checkpoint that is not quantized"
        )
    if options.weights == "random":
        raise ConfigError(
            f"weights='random' needs a config.json without quantization_config; this one names {published.method}"
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a model folder is written from."""

    source: Path
    config: ModelConfig
    max_context: int
    provider: WeightProvider
    options: ExportOptions
    placed: dict[str, ExternalTensor]
    formats: Formats
    weight_format: str


def _write_folder(folder: Path, parts: _Parts, progress: Callable[[int, int], object]) -> None:
    manifest = _manifest(parts)
    for name, model in _graphs(parts, manifest).items():
        (folder / name).write_bytes(model.SerializeToString(deterministic=True))
    total, written = sum(where.length for where in parts.placed.values()), 0

    def advance(count: int) -> None:
        nonlocal written
        written += count
        progress(written, total)

    file = WeightsFile(
        config=parts.config,
        formats=parts.formats,
        placed=parts.placed,
        dtype=parts.options.dtype,
        method=parts.options.quantizer,
    )
    file.write(parts.provider, folder / WEIGHTS_FILE, advance)
    complete_folder(folder, manifest, parts.source)


def _graphs(parts: _Parts, manifest: Manifest) -> dict[str, onnx.ModelProto]:
    """Build and verify the decoder graphs by file name; all read the one weights file."""
    options, config = parts.options, parts.config
    graphs = {MODEL_FILE: build_model(config, options.graph(fused=False), parts.formats)}
    if options.fuse:
        graphs[FUSED_FILE] = build_model(config, options.graph(fused=True), parts.formats)
    joints = joint_tensors(config, parts.formats, options.dtype)
    whole = {name: span_of(parts.placed, members) for name, members in joints.items()}
    places = parts.placed | whole
    for graph in graphs.values():
        graph.metadata_props.add(key=MANIFEST_METADATA, value=manifest.to_json())
        attach_external_data(graph, {t.name: places[t.name] for t in graph.graph.initializer if t.name in places})
        verify_model(graph)
        verify_fused_pair(graphs[MODEL_FILE], graph)
    return graphs


def _manifest(parts: _Parts) -> Manifest:
    config, max_context, options = parts.config, parts.max_context, parts.options
    graph = options.graph(fused=False)
    layers = tuple(describe_layer(layer.mixer, evictable=is_evictable(layer.mixer, graph)) for layer in config.layers)
    ropes = [rope for rope in config.ropes if isinstance(rope, Rope)]  # checkpoints have frequencies, not tables
    return Manifest(
        architecture=config.architecture,
        dtype=options.dtype,
        weight_format=parts.weight_format,
        cache_dtype=cache_type(options.cache_dtype, options.dtype),
        vocab_size=config.vocab_size,
        max_context=max_context,
        chunk_size=options.planned_chunk,
        chunk_chosen=options.chunk_size is not None,
        sink=options.sink,
        snapkv_window=options.snapkv_window,
        paged=options.paged,
        page_size=options.graph_page_size,
        cache_kinds=cache_kinds(layers) if options.paged else (),
        layers=layers,
        rope_limits=tuple(variant.limit for variant in ropes[0].variants) if ropes else (max_context,),
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        fused_model=FUSED_FILE if options.fuse else None,
        ropes={rope.name: tuple(variant.inv_freq for variant in rope.variants) for rope in ropes},
        ortolan_version=__version__,
    )

"""Converts a model that another exporter made: checks everything, writes a model folder and renames it into place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortolan.errors import ConfigError, check_progress, file_path, truth
from ortolan.export.caller import warn_caller
from ortolan.export.folder import (
    DEFAULT_CONTEXT,
    IDLE_SINK,
    LEAST_CONTEXT,
    CacheOptions,
    check_numbers,
    check_target,
    complete_folder,
    describe_layer,
    put_in_place,
    temporary_folder,
)
from ortolan.export.foreign_source import ForeignSource, open_source
from ortolan.export.foreign_weights import ForeignWeights, place_foreign_weights, write_foreign_weights
from ortolan.export.tokenizer_files import check_tokenizer
from ortolan.export.weights import WEIGHTS_FILE, placed_bytes
from ortolan.graphs import (
    Conversion,
    ConversionOptions,
    ExternalTensor,
    attach_external_data,
    convert_model,
    verify_fused_pair,
    verify_model,
)
from ortolan.graphs.cached_attention import is_evictable
from ortolan.graphs.external_data import span_of
from ortolan.graphs.options import Fusion
from ortolan.manifest import FUSED_FILES, MANIFEST_METADATA, MODEL_FILE, Manifest, cache_kinds
from ortolan.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertArguments(CacheOptions):
    """Options of `convert`, checked."""

    max_context: int | None
    sliding_window: int
    fuse: bool

    def __post_init__(self) -> None:
        CacheOptions.__post_init__(self)  # super() does not work in a class with slots
        check_numbers(self, sliding_window=0)
        truth("fuse", self.fuse)
        if self.max_context is not None:
            check_numbers(self, max_context=LEAST_CONTEXT)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a model folder is written of."""

    source: ForeignSource
    conversion: Conversion
    manifest: Manifest
    placed: Mapping[str, ExternalTensor]


def convert(
    source: str | Path,
    target: str | Path,
    max_context: int | None = None,
    chunk_size: int | None = None,
    sink: int = 0,
    snapkv_window: int = 64,
    paged: bool = False,
    page_size: int = 64,
    sliding_window: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], object] | None = None,
    fuse: bool = True,
) -> Path:
    """Convert a decoder with GroupQueryAttention, as onnxruntime-genai's model builder makes it, to a model folder.

    The graph keeps its weights, their types and its arithmetic. Attention and caches become Ortolan's operators,
    sequences are packed instead of padded, and logits are those of the last tokens, float32.

    Args:
        source: folder with the graph (genai_config.json names it, or model.onnx), or the .onnx file itself.
        target: folder to make; written under a temporary name beside it, and renamed when it is whole.
        max_context: longest sequence, 2 tokens or more; None takes what the graph's RoPE tables hold, at most 32768 and
            at most the source's context_length, where its configuration names one.
        chunk_size: prompt tokens per step that the ring caches are planned for by default; None takes 2048, and lets
            sessions on CUDA read models without rings in steps of up to 16384.
        sink: first positions that every layer keeps and sees, beside its window (StreamingLLM, arXiv 2309.17453).
        snapkv_window: queries captured for SnapKV; 0 makes a model that cannot evict.
        paged: make caches pools of pages with block tables, which many sequences share.
        page_size: slots of a page, 16, 32, 64, 128 or 256.
        sliding_window: window, tokens, of the layers whose attention has none in the graph; 0 leaves them as they
            are. For checkpoints whose windows the exporter left out: the converted model then differs from its source.
        overwrite: replace `target` where it is a model folder.
        progress: called with (bytes written, bytes in all).
        fuse: write model.fused.onnx and model.cpu.onnx too, which CUDA and the CPU run, where the graph has the form
            of a plain decoder.

    Returns:
        The model folder.

    Raises:
        ConfigError: an argument has a value that is not allowed, or `target` is in the way.
        StorageError: the disk is full, or writing failed otherwise; what was in `target` is still there.
        UnsupportedModelError: a node of the graph cannot be converted; the message names it.
        CheckpointError: weights or other files are missing, truncated, or cannot be read.
        ContractMismatchError: the file is not an ONNX model.
    """
    arguments = ConvertArguments(
        max_context=max_context,
        chunk_size=chunk_size,
        sink=sink,
        snapkv_window=snapkv_window,
        paged=paged,
        page_size=page_size,
        sliding_window=sliding_window,
        fuse=fuse,
    )
    folder, given = file_path("target", target), file_path("source", source)
    check_progress(progress)
    check_target(folder, truth("overwrite", overwrite))
    opened = open_source(given)
    conversion = convert_model(opened.model, opened.names, _graph_options(opened, arguments))
    if sink >= conversion.max_context:
        raise ConfigError(f"sink {sink} must be less than max_context {conversion.max_context}")
    check_tokenizer(opened.tokenizer_folder)
    _warn(opened, conversion)
    joints = {} if conversion.fused is None else conversion.fused.members
    placed = place_foreign_weights(conversion.model, conversion.weights, opened.folder, joints.values())
    parts = _Parts(opened, conversion, _manifest(opened, conversion, arguments), placed)
    graphs = _graphs(parts)
    with temporary_folder(folder, placed_bytes(placed)) as temporary:
        _write_folder(temporary, parts, graphs, progress or (lambda done, total: None))
        put_in_place(temporary, folder)
    return folder


def _graph_options(source: ForeignSource, arguments: ConvertArguments) -> ConversionOptions:
    return ConversionOptions(
        max_context=arguments.max_context,
        default_context=min(source.context_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT),
        sink=arguments.sink,
        snapkv_window=arguments.snapkv_window,
        page_size=arguments.graph_page_size,
        sliding_window=arguments.sliding_window,
        fuse=arguments.fuse,
    )


def _warn(source: ForeignSource, conversion: Conversion) -> None:
    if source.sliding_window > 0 and all(layer.window < 0 for layer in conversion.layers):
        warn_caller(
            f"the source's configuration names a sliding window of {source.sliding_window}, which its attention does "
            "not have; it is converted as it is, to full attention (sliding_window asks for rings)"
        )
    if conversion.options.sink and all(layer.window < 0 for layer in conversion.layers):
        warn_caller(IDLE_SINK.format(conversion.options.sink))
    if source.context_length is not None and conversion.max_context > source.context_length:
        warn_caller(
            f"max_context {conversion.max_context} is beyond the source's context_length {source.context_length}"
        )


def _manifest(source: ForeignSource, conversion: Conversion, arguments: ConvertArguments) -> Manifest:
    options = conversion.options
    layers = tuple(describe_layer(layer, evictable=is_evictable(layer, options)) for layer in conversion.layers)
    return Manifest(
        architecture=source.architecture,
        dtype=options.dtype,
        vocab_size=conversion.vocab_size,
        max_context=conversion.max_context,
        chunk_size=arguments.planned_chunk,
        chunk_chosen=arguments.chunk_size is not None,
        sink=arguments.sink,
        snapkv_window=arguments.snapkv_window,
        paged=arguments.paged,
        page_size=arguments.graph_page_size,
        cache_kinds=cache_kinds(layers) if arguments.paged else (),
        layers=layers,
        weight_format=conversion.weight_format,
        cache_dtype=options.dtype,
        fused_model=_fused_file(conversion, "cuda"),
        cpu_model=_fused_file(conversion, "cpu"),
        rope_limits=conversion.rope_limits,
        bos_token_id=source.bos_token_id,
        eos_token_ids=source.eos_token_ids,
        ortolan_version=__version__,
    )


def _fused_file(conversion: Conversion, device: Fusion) -> str | None:
    """Return the file of the graph for a device; None where there is none."""
    return FUSED_FILES[device] if conversion.fused is not None and device in conversion.fused.models else None


def _graphs(parts: _Parts) -> dict[str, onnx.ModelProto]:
    """Attach weights and manifest, and verify the graphs; returns them by file name."""
    conversion, fused = parts.conversion, parts.conversion.fused
    graphs, places = {MODEL_FILE: conversion.model}, dict(parts.placed)
    attach_external_data(conversion.model, places)
    if fused is not None:
        spans = {name: span_of(places, names) for name, names in fused.members.items()}
        for device, model in fused.models.items():
            graphs[FUSED_FILES[device]] = model
            attach_external_data(model, spans)
    for graph in graphs.values():
        graph.metadata_props.add(key=MANIFEST_METADATA, value=parts.manifest.to_json())
        verify_model(graph)
        verify_fused_pair(conversion.model, graph)
    return graphs


def _write_folder(
    folder: Path, parts: _Parts, graphs: Mapping[str, onnx.ModelProto], progress: Callable[[int, int], object]
) -> None:
    for name, graph in graphs.items():
        (folder / name).write_bytes(graph.SerializeToString(deterministic=True))
    source, conversion = parts.source, parts.conversion
    turned = {} if conversion.fused is None else conversion.fused.turned
    weights = ForeignWeights(conversion.weights, source.folder, turned)
    write_foreign_weights(weights, parts.placed, folder / WEIGHTS_FILE, progress)
    complete_folder(folder, parts.manifest, source.tokenizer_folder)

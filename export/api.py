"""Exports a checkpoint: reads and checks everything, then writes the model folder and renames it into place."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from ortolan.errors import ConfigError, check_progress, file_path, truth
from ortolan.export.calibration import Calibration, read_text, read_tokens
from ortolan.export.caller import warn_caller
from ortolan.export.checkpoint import Array, Checkpoint, checkpoint_folder, open_checkpoint
from ortolan.export.draft_head import (
    MODULE,
    can_have_head,
    head_config,
    head_sources,
    holds_head,
    promises_head,
    with_shared,
)
from ortolan.export.families.base import Family
from ortolan.export.folder import DEFAULT_CONTEXT, IDLE_SINK, check_target, put_in_place, temporary_folder
from ortolan.export.hf_config import HfConfig, read_hf_config
from ortolan.export.model_files import ModelFiles, Progress, write_folder
from ortolan.export.options import DENSE, ExportOptions
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
    place_weights,
    placed_bytes,
)
from ortolan.graphs.config import ModelConfig
from ortolan.graphs.formats.dense import Dense
from ortolan.graphs.formats.low_bit import LowBit
from ortolan.graphs.formats.plan import head_stem, wished_formats, with_head
from ortolan.graphs.parts import Formats
from ortolan.graphs.weights import joint_weights, weight_shapes
from ortolan.manifest import HEAD_WEIGHTS_FILE

_DENSE_COPY = ExportOptions(
    dtype="float32",
    max_context=None,
    chunk_size=None,
    sink=0,
    snapkv_window=0,
    paged=False,
    page_size=64,
    weights="checkpoint",
    fuse=False,
    weight_format=DENSE,
    cache_dtype=None,
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
    head_format: str | None = None,
    calibration: str | Path | None = None,
    activation_format: str | None = None,
) -> Path:
    """Export a Hugging Face checkpoint folder to a model folder.

    Args:
        hf_dir: folder with config.json and safetensors files, or the id of such a model on the Hugging Face hub
            ("owner/name"), whose files come from the hub's cache or are downloaded there. A folder of that name wins.
        out_dir: folder to make; written under a temporary name beside it, and renamed when it is whole.
        dtype: "float32", "float16" or "bfloat16", of activations.
        max_context: longest sequence, 2 tokens or more; None takes the model's own (max_position_embeddings), at most
            32768.
        chunk_size: prompt tokens per step that the ring caches are planned for by default; None takes 2048, and lets
            sessions on CUDA read models without rings in steps of up to 16384.
        sink: first positions that every layer keeps and sees, beside its window (StreamingLLM, arXiv 2309.17453).
        snapkv_window: queries captured for SnapKV; 0 exports a model that cannot evict.
        paged: make caches pools of pages with block tables, which many sequences share.
        weights: "checkpoint", or "random", which needs config.json alone.
        fuse: write model.fused.onnx and model.cpu.onnx too, which CUDA and the CPU run: fewer, larger operators over
            the same weights file.
        overwrite: replace `out_dir` where it is a model folder.
        progress: called with (bytes written, bytes in all); with a `calibration`, both count a float32 copy of the
            weights, too, twice: it is written, and it reads the text.
        page_size: slots of a page, 16, 32, 64, 128 or 256; kernels are fastest from 64 on, small pages waste least.
        weight_format: how linear weights are stored: "dense" (one element of `dtype` each), "int4", "int8", "fp8" or
            "mxfp4", and experts of mixtures likewise, while their routers stay dense; None: as the checkpoint
            publishes them.
        cache_dtype: of keys and values that layers keep: None for the `dtype`, or "fp8" or "int8", half the bytes of a
            16-bit type, with a float32 scale beside each row of a kv head.
        group_size: input features that share a scale: 32, 64 or 128 (of fp8: 128, blocks of 128 x 128; of mxfp4:
            32), or "channel". None takes "channel" for fp8, else the largest that divides all layers.
        asymmetric: give each group of int4 or int8 a zero point.
        quantizer: "search" for the scale of least squared error, "nearest" for that of the largest
            magnitude, or "gptq" for int4 and int8 whose errors make up for one another on the `calibration` text.
        head_format: format of the head, "int8", "int4" or "dense"; where it is the embedding, too, that of both. None
            takes "int8" with a `weight_format` of few bits, else leaves it as the checkpoint has it.
        calibration: path of a UTF-8 text like those that the model will read, at least 128 tokens; with "gptq" alone.
        activation_format: what linear layers of fp8 round their inputs to: None for the `dtype`, or "fp8" (W8A8), by
            the checkpoint's static scales where it has some, else by one for each token (and block of 128 inputs).

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
        calibration=None if calibration is None else file_path("calibration", calibration),
        activation_format=activation_format,
    )
    target = file_path("out_dir", out_dir)
    check_progress(progress)
    check_target(target, truth("overwrite", overwrite))
    source = checkpoint_folder(hf_dir, weights=weights != "random")
    _write(source, target, options, Progress(progress))
    return target


def _write(source: Path, target: Path, options: ExportOptions, progress: Progress) -> None:
    """Read and check a checkpoint, and write its model folder, or nothing."""
    model, head = _read(source, options)
    each = (model,) if head is None else (model, head)
    for files in each:
        progress.expect(files.num_bytes)
    with contextlib.ExitStack() as stack:
        if options.calibration is not None:
            token_ids = read_tokens(source, read_text(options.calibration))
            model = stack.enter_context(_calibrated(source, target, model, token_ids, progress))
        folder = stack.enter_context(temporary_folder(target, sum(placed_bytes(files.placed) for files in each)))
        write_folder(folder, source, model, head, progress.advance)
        put_in_place(folder, target)


@contextlib.contextmanager
def _calibrated(
    source: Path, target: Path, model: ModelFiles, token_ids: Array, progress: Progress
) -> Iterator[ModelFiles]:
    """Calibrate what is written of a model by a dense copy, which lies in or beside the target until the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model itself has warned
        dense, _ = _read(source, _DENSE_COPY)
    progress.expect(2 * dense.num_bytes)  # to write the copy, and to let the text through it
    with temporary_folder(target, dense.num_bytes + model.num_bytes) as folder:
        write_folder(folder, source, dense, None, progress.advance)
        calibration = Calibration(folder, token_ids, _quantized(model), dense.num_bytes, progress.advance)
        yield replace(model, feedback=calibration.feedback)


def _quantized(model: ModelFiles) -> dict[str, set[str]]:
    """List the weights of layers that are quantized, by the weight of the graph that they are part of."""
    config, formats = model.config, model.formats
    layers = {name for name in weight_shapes(config) if name.startswith("layers.")}
    quantized = {name for name in layers if isinstance(formats.stored(name), LowBit)}
    whole = {name: (name,) for name in quantized} | joint_weights(config)
    return {name: quantized.intersection(members) for name, members in whole.items()}


def _read(source: Path, options: ExportOptions) -> tuple[ModelFiles, ModelFiles | None]:
    """Read and check a checkpoint folder, and warn of what its user may not expect; returns model and draft head."""
    hf_config = read_hf_config(source)
    top_config, family = hf_config, find_family(hf_config)
    hf_config = family.text_config(hf_config)
    own = hf_config.integer("max_position_embeddings", DEFAULT_CONTEXT)
    context = min(own, DEFAULT_CONTEXT) if options.max_context is None else options.max_context
    options = replace(options, max_context=context)
    config = family.read(hf_config, context)
    check_shapes(config)
    published = read_quantization(top_config, options.input_format)
    if published is not None:
        _check_published(published, options)
    checkpoint = None if options.weights == "random" else open_checkpoint(source).part(family.prefixes, family.left_out)
    if checkpoint is not None and config.tied_embeddings:
        config = _with_own_head(config, family, checkpoint)
    has_head = promises_head(hf_config) if checkpoint is None else holds_head(checkpoint)
    if has_head and (has_head := can_have_head(config)):
        config = replace(config, gives_hidden=True)
    files = partial(_files, family, hf_config, checkpoint, published)
    model = files(options, config)
    _check_activations(options, model.formats)
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
    head_options = replace(
        options,
        snapkv_window=0,
        weight_format=None,
        head_format=None,
        group_size=None,
        asymmetric=False,
        quantizer=METHODS[0],
        calibration=None,
    )
    return model, files(head_options, head_config(config), model.formats) if has_head else None


def _with_own_head(config: ModelConfig, family: Family, checkpoint: Checkpoint) -> ModelConfig:
    """Leave the head untied where the checkpoint holds one that differs from the embedding, as transformers 5 does."""
    untied = replace(config, tied_embeddings=False)
    sources = family.sources(untied)
    head, embedding = sources["head.weight"].name, sources["embedding.weight"].name
    if not {head, embedding} <= checkpoint.entries.keys() or checkpoint.are_equal(head, embedding):
        return config
    warn_caller(
        f"config.json ties the head to the embedding (tie_word_embeddings), but {head} differs from {embedding}; the "
        "head is exported as the checkpoint has it"
    )
    return untied


def _files(
    family: Family,
    hf_config: HfConfig,
    checkpoint: Checkpoint | None,
    published: Published | None,
    options: ExportOptions,
    config: ModelConfig,
    shared: Formats | None = None,
) -> ModelFiles:
    """Return what is written of a model, or of its draft head, which takes the model's formats of what they share."""
    formats = Formats(default=Dense()) if options.wish is None else wished_formats(config, options.wish)
    provider: WeightProvider | None = None
    if checkpoint is not None:
        part = checkpoint.only(MODULE) if config.drafts else checkpoint.part({}, (MODULE, *family.unread(config)))
        sources = head_sources(family, config) if config.drafts else family.sources(config)
        packed = None if published is None else published.weights(part, sources, config)
        formats = formats if packed is None else packed.formats
        provider = CheckpointWeights(part, sources, config, packed)
    if options.head is not None:
        _check_head(formats, config, options.head)
        formats = with_head(config, formats, options.head)
    if shared is not None:
        formats = with_shared(formats, shared)
    if provider is None:
        deviation = hf_config.number("initializer_range", 0.02)
        provider = RandomWeights(config, deviation, formats=formats, dtype=options.dtype, method=options.quantizer)
    return ModelFiles(
        config=config,
        max_context=options.max_context or DEFAULT_CONTEXT,
        provider=provider,
        options=options,
        placed=place_weights(config, options.dtype, formats, HEAD_WEIGHTS_FILE if config.drafts else WEIGHTS_FILE),
        formats=formats,
        weight_format=(options.weight_format or DENSE) if published is None else published.method,
    )


def _check_activations(options: ExportOptions, formats: Formats) -> None:
    """Refuse to round the activations of a model in which no layer can. Raises ConfigError."""
    stored = formats.by_stem.values()
    if options.activation_format and not any(
        isinstance(each, LowBit) and each.input_format == "fp8" for each in stored
    ):
        raise ConfigError(
            "activation_format='fp8' needs linear layers of fp8; give weight_format='fp8', or a checkpoint that is "
            "published in fp8"
        )


def _check_head(formats: Formats, config: ModelConfig, kind: str) -> None:
    """Refuse to quantize a head that is published in low bits. Raises ConfigError."""
    stored = formats.of(head_stem(config))
    if isinstance(stored, LowBit):
        raise ConfigError(
            f"head_format is {kind!r}, but the checkpoint's head is quantized already ({stored.kind}); leave "
            "head_format out"
        )


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

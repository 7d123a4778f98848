"""Opens model folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ortolan import contract
from ortolan.element_types import CPU_TYPES, cache_type
from ortolan.errors import ConfigError, ContractMismatchError, truth, whole_number
from ortolan.hub import model_folder
from ortolan.manifest import Manifest, read_manifest
from ortolan.runtime.device.opening import Device, find_device
from ortolan.runtime.eviction.graphs import DecoderBuilder, EvictBuilder, GraphBuilders
from ortolan.runtime.model import Model

MAX_THREADS = 4096  # beyond any machine; a pool takes memory for each


def load(
    folder: str | Path,
    device: str | None = None,
    *,
    num_threads: int = 0,
    evict_builder: EvictBuilder | None = None,
    score_builder: EvictBuilder | None = None,
    decoder_builder: DecoderBuilder | None = None,
    fused: bool | None = None,
    cache_dtype: str | None = None,
    host_embeddings: bool = False,
    batch_invariant: bool = False,
) -> Model:
    """Open an exported model.

    Args:
        folder: what `ortolan.export` wrote, or the id of such a folder on the Hugging Face hub ("owner/name"), which
            comes from the hub's cache or is downloaded there. A folder of that name wins.
        device: "cpu", "cuda" or "cuda:N"; None takes CUDA where it is usable, else the CPU.
        num_threads: of ONNX Runtime's intra-op pool; 0 takes one per core.
        evict_builder: builds eviction graphs for options other than the folder's evict.onnx.
        score_builder: builds graphs that score by a piece of a second reading.
        decoder_builder: builds a decoder graph with caches of another type, or other products, of the folder's.
        fused: whether to run the graph with fused operators; None does so where the folder has one for the device.
        cache_dtype: of the caches: "fp8", "int8" or the model's dtype; None: as the model was exported.
        host_embeddings: whether per-layer embeddings (Gemma 4 E2B, E4B) stay in host memory, where kernels read the
            rows of a step's tokens; pinned on CUDA, mapped from the file on the CPU.
        batch_invariant: whether a request's tokens, and logits, must have the same bits alone, in any batch and in any
            chunking; see docs/tasks/same-answer.md for what that costs.

    Raises:
        ContractMismatchError: the folder is not a model, is incomplete, cannot be read, or is another version's.
        OpLibraryError: the operator library or ONNX Runtime cannot serve the device.
        ConfigError: `device` is not a device's name, or the model's dtype does not run there; num_threads, fused or
            cache_dtype, host_embeddings or batch_invariant has a value that is not allowed; host_embeddings is asked of
            a model without per-layer embeddings, or batch_invariant of one that cannot keep it; the hub does not have
            the model or cannot be reached.
        CapacityError: there is no memory for the weights, or none that can be pinned.
        StorageError: the disk is full.
    """
    num_threads = whole_number("num_threads", num_threads, 0, MAX_THREADS)
    if fused is not None:
        truth("fused", fused)
    truth("host_embeddings", host_embeddings)
    truth("batch_invariant", batch_invariant)
    folder = model_folder(folder)
    manifest = read_manifest(folder)
    if manifest.operator_version != contract.OPERATOR_VERSION:
        raise ContractMismatchError(
            f"{folder} uses version {manifest.operator_version} of the operators, this Ortolan has "
            f"{contract.OPERATOR_VERSION}; export the model again"
        )
    placed = find_device(device, num_threads)
    if placed.cuda is None and manifest.dtype not in CPU_TYPES:
        raise ConfigError(
            f"{folder} is a {manifest.dtype} model, and no CPU kernel computes {manifest.dtype}; load it on CUDA, or "
            f"export it as {' or '.join(CPU_TYPES)}"
        )
    wanted = manifest.cache_dtype if cache_dtype is None else cache_type(cache_dtype, manifest.dtype)
    if batch_invariant:
        _check_batch_invariance(manifest, placed)
    if wanted == manifest.cache_dtype and not batch_invariant:
        builders = GraphBuilders(evict=evict_builder, score=score_builder)
        return Model(folder, manifest, placed, builders, fused, host_embeddings=host_embeddings)
    if decoder_builder is None:
        raise _no_builder(folder, manifest, wanted)
    return Model(
        folder,
        dataclasses.replace(manifest, cache_dtype=wanted),
        placed,
        GraphBuilders(evict=evict_builder, score=score_builder, decoder=decoder_builder),
        fused,
        host_embeddings=host_embeddings,
        batch_invariant=batch_invariant,
    )


def _no_builder(folder: Path, manifest: Manifest, wanted: str) -> ConfigError:
    if wanted == manifest.cache_dtype:
        return ConfigError(
            f"batch_invariant is True, and the graph of {folder} must be changed for it; open it with ortolan.load, "
            "which can do that"
        )
    return ConfigError(
        f"{folder} has caches of {manifest.cache_dtype}, not {wanted}; open it with ortolan.load, which can change "
        "them, or export it with that cache_dtype"
    )


def _check_batch_invariance(manifest: Manifest, device: Device) -> None:
    """Refuse, by ConfigError, a model that reads generated tokens again as no step of its own had read them."""
    if device.cuda is not None and len(manifest.rope_limits) > 1:
        raise ConfigError(
            f"batch_invariant=True: past {manifest.rope_limits[0]} tokens this model rotates all keys anew and reads "
            "what was generated otherwise than before; on CUDA load it without batch_invariant"
        )

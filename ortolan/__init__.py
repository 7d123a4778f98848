"""Long-context LLM inference on ONNX Runtime with a bounded key/value cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortolan.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    ContractMismatchError,
    DeviceError,
    EngineClosedError,
    ForkedProcessError,
    NumericError,
    OpLibraryError,
    OrtolanError,
    RequestCancelledError,
    SessionFileError,
    SessionInterruptedError,
    StorageError,
    UnsupportedModelError,
)
from ortolan.version import __version__ as __version__

if TYPE_CHECKING:
    from ortolan import custom_ops
    from ortolan.export import convert, export
    from ortolan.manifest import Manifest
    from ortolan.policies import Eviction, SnapKv
    from ortolan.runtime import (
        DraftModel,
        Engine,
        Model,
        MtpHead,
        PromptLookup,
        Sampling,
        Session,
        Speculation,
        Stream,
        TextStream,
    )
    from ortolan.runtime.eviction.graphs import GraphChanges

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "ContractMismatchError",
    "DeviceError",
    "DraftModel",
    "Engine",
    "EngineClosedError",
    "Eviction",
    "ForkedProcessError",
    "Model",
    "MtpHead",
    "NumericError",
    "OpLibraryError",
    "OrtolanError",
    "PromptLookup",
    "RequestCancelledError",
    "Sampling",
    "Session",
    "SessionFileError",
    "SessionInterruptedError",
    "SnapKv",
    "Speculation",
    "StorageError",
    "Stream",
    "TextStream",
    "UnsupportedModelError",
    "convert",
    "custom_ops",
    "export",
    "load",
]

_SUBPACKAGES = ("custom_ops", "export", "graphs", "policies", "runtime")
_RUNTIME_NAMES = (
    "DraftModel",
    "Engine",
    "Model",
    "MtpHead",
    "PromptLookup",
    "Sampling",
    "Session",
    "Speculation",
    "Stream",
    "TextStream",
)
_POLICY_NAMES = ("Eviction", "SnapKv")


def load(
    folder: str | Path,
    device: str | None = None,
    *,
    num_threads: int = 0,
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
        fused: whether to run the graph with fused operators; None does so where the folder has one for the device.
        cache_dtype: of keys and values that layers keep: "fp8", "int8" or the model's dtype; None: as the model was
            exported. The graph is changed in memory; the folder stays as it is.
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
    open_model: Callable[..., Model] = _imported("ortolan.runtime", "load")
    return open_model(
        folder,
        device=device,
        num_threads=num_threads,
        evict_builder=_build_evict_graph,
        score_builder=_build_score_graph,
        decoder_builder=_build_decoder_graph,
        fused=fused,
        cache_dtype=cache_dtype,
        host_embeddings=host_embeddings,
        batch_invariant=batch_invariant,
    )


def _build_decoder_graph(path: Path, changes: GraphChanges) -> bytes:
    """Build a decoder graph with the caches and products that are wanted; weights stay where they are."""
    import onnx

    from ortolan import graphs

    model = onnx.load(path, load_external_data=False)
    graphs.change_cache_dtype(model, changes.manifest)
    if changes.batch_invariant:
        graphs.make_batch_invariant(model, cuda=changes.cuda)
    graph: bytes = model.SerializeToString()
    return graph


def _build_evict_graph(manifest: Manifest, options: Eviction) -> bytes:
    """Build evict.onnx for options that differ from those of the model folder."""
    from ortolan import graphs

    model = graphs.build_evict_model(manifest, options)
    graph: bytes = model.SerializeToString()
    return graph


def _build_score_graph(manifest: Manifest, options: Eviction) -> bytes:
    """Build the graph that scores by one piece of a second reading."""
    from ortolan import graphs

    model = graphs.build_score_model(manifest, options)
    graph: bytes = model.SerializeToString()
    return graph


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import ortolan` stays light."""
    if name in _SUBPACKAGES:
        return _imported(f"ortolan.{name}")
    if name == "convert":
        return _imported("ortolan.export.conversion", name)
    if name in _RUNTIME_NAMES:
        return _imported("ortolan.runtime", name)
    if name in _POLICY_NAMES:
        return _imported("ortolan.policies", name)
    raise AttributeError(f"module 'ortolan' has no attribute {name!r}")


def _imported(module: str, name: str | None = None) -> Any:
    """Import one of the package's modules, or a name of it; where something is not there, say why and what to do."""
    try:
        found = importlib.import_module(module)
        return found if name is None else getattr(found, name)
    except ModuleNotFoundError as error:
        folder = Path(__file__).resolve().parents[1]
        if not (folder / "pyproject.toml").is_file():
            raise
        raise ModuleNotFoundError(
            f"{error}: Python runs Ortolan from its source folder {folder}, and Ortolan is not installed for this "
            f"Python; run `pip install -e {folder}`, or start Python in another folder and with the environment in "
            "which Ortolan is installed",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})

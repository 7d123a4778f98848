"""Opens a model folder and makes sessions of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ortolan import contract
from ortolan.custom_ops import register
from ortolan.custom_ops.library import onnxruntime_problem
from ortolan.errors import ConfigError, ContractMismatchError, OpLibraryError
from ortolan.manifest import EVICT_FILE, MODEL_FILE, Manifest, read_manifest
from ortolan.runtime.device import resolve_device
from ortolan.runtime.options import SnapKv
from ortolan.runtime.plan import CachePlan, plan_caches
from ortolan.runtime.session import Session
from ortolan.runtime.tokenizer import Tokenizer

SNAPKV_METADATA = "ortolan.snapkv"
EvictBuilder = Callable[[Manifest, SnapKv], bytes]


class Model:
    """An exported model, ready to make sessions; made by `load`."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        provider: str,
        num_threads: int,
        evict_builder: EvictBuilder | None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self._provider = provider
        self._num_threads = num_threads
        self._evict_builder = evict_builder
        self._evict_sessions: dict[str, Any] = {}
        self._tokenizer: Tokenizer | None = None
        self._session = self._open(str(folder / MODEL_FILE))
        _check_graph(self._session, manifest)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model folder.

        Raises:
            ContractMismatchError: the folder has none.
        """
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.folder)
        return self._tokenizer

    def plan(self, max_context: int | None = None, chunk_size: int | None = None) -> CachePlan:
        """Plan the caches of a session without making it. Raises as `session` does."""
        return plan_caches(self.manifest, max_context, chunk_size)

    def session(
        self, max_context: int | None = None, chunk_size: int | None = None, snapkv: SnapKv | None = None
    ) -> Session:
        """Start a sequence with caches of its own.

        Args:
            max_context: longest sequence, tokens; at most the export's, which None takes.
            chunk_size: most tokens of one prefill step; None takes the export's.
            snapkv: eviction of full-attention caches; None never evicts.

        Raises:
            ConfigError: a number is not allowed, or the model was exported without SnapKV.
            CapacityError: there is no memory for the caches.
        """
        plan = plan_caches(self.manifest, max_context, chunk_size)
        if snapkv is not None and not any(layer.evictable for layer in self.manifest.layers):
            raise ConfigError(
                "snapkv: no layer of this model can evict; it has only sliding windows, or was exported with "
                "snapkv_window=0"
            )
        evict_session = None if snapkv is None else self._evict_session(snapkv)
        return Session(self.manifest, self._session, plan, snapkv, evict_session)

    def _evict_session(self, options: SnapKv) -> Any:
        """Open the eviction graph for these options, once for each structure."""
        key = json.dumps(options.structure, sort_keys=True)
        if key not in self._evict_sessions:
            self._evict_sessions[key] = self._open_evict_graph(options)
        return self._evict_sessions[key]

    def _open_evict_graph(self, options: SnapKv) -> Any:
        """Open the folder's graph where it has these options, else build one."""
        path = self.folder / EVICT_FILE
        recorded = "none"
        if path.is_file():
            session = self._open(str(path))
            recorded = session.get_modelmeta().custom_metadata_map.get(SNAPKV_METADATA, "{}")
            if json.loads(recorded) == options.structure:
                return session
        if self._evict_builder is None:
            raise ConfigError(
                f"{path} was built for {recorded}, not {json.dumps(options.structure)}; "
                "open the model with ortolan.load, which can build others"
            )
        return self._open(self._evict_builder(self.manifest, options))

    def _open(self, model: str | bytes) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = self._num_threads
        register(options)
        try:
            return onnxruntime.InferenceSession(model, options, providers=[self._provider])
        except Exception as error:  # the binding raises its own exception types, one per status code
            raise ContractMismatchError(f"ONNX Runtime cannot open the graph of {self.folder}: {error}") from error


def load(
    folder: str | Path,
    device: str | None = None,
    *,
    num_threads: int = 0,
    evict_builder: EvictBuilder | None = None,
) -> Model:
    """Open an exported model.

    Args:
        folder: what `ortolan.export` wrote.
        device: "cpu", "cuda" or "cuda:N"; None takes CUDA where it is usable, else the CPU.
        num_threads: of ONNX Runtime's intra-op pool; 0 takes one per core.
        evict_builder: builds eviction graphs for options other than the folder's evict.onnx.

    Raises:
        ContractMismatchError: the folder is no model, is incomplete, or was made by another version.
        OpLibraryError: the operator library or ONNX Runtime cannot serve the device.
        ConfigError: the device has no such spelling.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest.operator_version != contract.OPERATOR_VERSION:
        raise ContractMismatchError(
            f"{folder} uses version {manifest.operator_version} of the operators, this Ortolan has "
            f"{contract.OPERATOR_VERSION}; export the model again"
        )
    try:
        provider = resolve_device(device)
    except ModuleNotFoundError as error:
        raise OpLibraryError(onnxruntime_problem() or str(error)) from error
    return Model(folder, manifest, provider, num_threads, evict_builder)


def _check_graph(ort_session: Any, manifest: Manifest) -> None:
    """Check that the graph's inputs are those that the manifest promises."""
    inputs = {i.name for i in ort_session.get_inputs()}
    wanted = {contract.TOKEN_IDS, contract.QUERY_START, contract.PAST_LEN}
    for index, layer in enumerate(manifest.layers):
        wanted |= {contract.key_cache(index), contract.value_cache(index)}
        if layer.evictable:
            wanted |= {contract.kv_len(index), contract.capture(index)}
    if len(manifest.rope_limits) > 1:
        wanted.add(contract.ROPE_VARIANT)
    extra = inputs - wanted - {contract.POSITIONS}
    if not wanted <= inputs or extra:
        raise ContractMismatchError(
            f"{MODEL_FILE} lacks the inputs {sorted(wanted - inputs)} and has unknown ones {sorted(extra)}; "
            "export the model again"
        )
    shapes = {i.name: i.shape for i in ort_session.get_inputs()}
    for index, layer in enumerate(manifest.layers):
        for name in (contract.key_cache(index), contract.value_cache(index)):
            _, heads, _, size = shapes[name]
            if [heads, size] != [layer.num_kv_heads, layer.head_size]:
                raise ContractMismatchError(
                    f"{MODEL_FILE}: {name} has the shape {shapes[name]}, the manifest says "
                    f"{layer.num_kv_heads} kv heads of size {layer.head_size}; export the model again"
                )

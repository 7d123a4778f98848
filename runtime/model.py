"""Opens a model folder and makes sessions of it."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ortolan import contract
from ortolan.custom_ops import register
from ortolan.custom_ops.library import onnxruntime_problem
from ortolan.custom_ops.queries import DecodeScratchQuery, decode_scratch_bytes
from ortolan.errors import (
    CapacityError,
    ConfigError,
    ContractMismatchError,
    OpLibraryError,
    file_path,
    truth,
    whole_number,
)
from ortolan.manifest import EVICT_FILE, MODEL_FILE, Manifest, read_manifest
from ortolan.runtime.batch_stepper import BatchStepper, HostBatchStepper
from ortolan.runtime.cuda import CudaBuffers
from ortolan.runtime.cuda_batch import CudaBatchStepper
from ortolan.runtime.cuda_stepper import is_out_of_memory
from ortolan.runtime.device import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    check_device_number,
    cuda_options,
    device_number,
    preload_cuda_libraries,
    resolve_device,
)
from ortolan.runtime.device_session import DeviceModel, DeviceSession
from ortolan.runtime.engine_plan import EnginePlan, plan_engine
from ortolan.runtime.fingerprint import Fingerprint, take_fingerprint
from ortolan.runtime.graph_check import check_graph
from ortolan.runtime.memory import (
    capture_bytes,
    check_pools,
    check_room,
    estimate_chunk_bytes,
    estimate_evict_bytes,
    fit_chunk,
    weight_file_bytes,
)
from ortolan.runtime.options import SnapKv, check_snapkv
from ortolan.runtime.plan import CachePlan, plan_caches
from ortolan.runtime.restore import SavedSession
from ortolan.runtime.session import Session
from ortolan.runtime.tokenizer import Tokenizer

SNAPKV_METADATA = "ortolan.snapkv"
POOL_SHARE = 0.8  # of the free device memory, for an engine's page pools where nothing else is said
MAX_THREADS = 4096  # beyond any machine; a pool takes memory for each
EvictBuilder = Callable[[Manifest, SnapKv], bytes]
SnapKvCheck = Callable[[SnapKv | None], None]


class Model:
    """An exported model, ready to make sessions; made by `load`."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        provider: str,
        num_threads: int,
        evict_builder: EvictBuilder | None,
        *,
        buffers: CudaBuffers | None = None,
        fused: bool | None = None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self._provider = provider
        self._num_threads = num_threads
        self._evict_builder = evict_builder
        self._evict_sessions: dict[str, Any] = {}
        self._tokenizer: Tokenizer | None = None
        self._buffers = buffers
        free_before = buffers.memory()[0] if buffers else 0
        file_name = self._choose_file(fused)
        self._session = self._open(str(folder / file_name), graph=True)
        check_graph(self._session, manifest, file_name)
        self._device: DeviceModel | None = None
        if buffers:
            weights = max(0, free_before - buffers.memory()[0])
            self._device = DeviceModel(buffers, itertools.count(1), free_before, weights)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model folder.

        Raises:
            ContractMismatchError: the folder has none, or its files are damaged.
        """
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.folder)
        return self._tokenizer

    def plan(
        self, max_context: int | None = None, chunk_size: int | None = None, snapkv: SnapKv | None = None
    ) -> CachePlan:
        """Plan the caches of a session without making it. Arguments and errors are those of `session`."""
        check_snapkv(snapkv, self.manifest)
        budget = snapkv.budget if snapkv and snapkv.during_prefill else None
        return plan_caches(self.manifest, max_context, chunk_size, cuda=self._device is not None, budget=budget)

    def session(
        self, max_context: int | None = None, chunk_size: int | None = None, snapkv: SnapKv | None = None
    ) -> Session:
        """Start a sequence with caches of its own.

        Args:
            max_context: longest sequence, tokens; at most the export's, which None takes.
            chunk_size: most tokens of one prefill step. None takes the export's; where that was not chosen either,
                sessions on CUDA whose caches do not grow with it read up to 16384, as memory allows.
            snapkv: eviction of full-attention caches; None never evicts.

        Raises:
            ConfigError: a number is not allowed, or the model was exported without SnapKV.
            CapacityError: there is no memory for the caches, or on CUDA for reading a chunk.
        """
        plan = self.plan(max_context, chunk_size, snapkv)
        return self._make_session(plan if chunk_size else self._fitting(plan, snapkv), snapkv)

    def restore(self, path: str | Path, max_context: int | None = None, chunk_size: int | None = None) -> Session:
        """Make a session from the file that `Session.save` wrote, which goes on as the saved one would have.

        On the device and with the lengths that it was saved with, it goes on bit for bit. SnapKV options are the
        saved ones.

        Args:
            path: of the file; nothing is changed, so that it can be restored again.
            max_context: longest sequence, tokens; None takes the saved session's.
            chunk_size: most tokens of one prefill step; None takes the saved session's.

        Raises:
            SessionFileError: the file cannot be read, is no saved session, or is truncated or altered.
            ContractMismatchError: another model or another version of the format wrote it.
            ConfigError: a number is not allowed, or max_context is less than what was read.
            CapacityError: there is no memory for the caches.
        """
        with SavedSession(file_path("path", path)) as saved:
            saved.check_model(self.fingerprint)
            context = saved.max_context if max_context is None else max_context
            plan = self.plan(context, saved.chunk_size if chunk_size is None else chunk_size, saved.snapkv)
            capacities = saved.capacities(plan, self.manifest.sink)
            if chunk_size is None:
                plan = self._fitting(plan, saved.snapkv, capacities)
            session = self._make_session(plan, saved.snapkv, capacities)
            session.fill_from(saved)
        return session

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """What identifies the model to saved sessions; see `take_fingerprint` for what it covers."""
        return take_fingerprint(self.folder, self.manifest)

    def _make_session(self, plan: CachePlan, snapkv: SnapKv | None, capacities: list[int] | None = None) -> Session:
        """Make an empty session; `capacities` are the slots of each layer, where they are not the plan's."""
        evict_session = None if snapkv is None else self._evict_session(snapkv)
        if self._device is None:
            return Session(
                self.manifest,
                self._session,
                plan,
                snapkv,
                evict_session,
                weights_bytes=weight_file_bytes(self.manifest),
                identify=lambda: self.fingerprint,
                capacities=capacities,
            )
        self._check_room(plan if capacities is None else plan.with_capacities(capacities), snapkv)
        return DeviceSession(
            self.manifest,
            self._session,
            plan,
            snapkv,
            evict_session,
            self._device,
            identify=lambda: self.fingerprint,
            capacities=capacities,
        )

    def plan_engine(
        self,
        max_sequences: int,
        max_cache_bytes: int | None = None,
        chunk_tokens: int | None = None,
        max_context: int | None = None,
    ) -> EnginePlan:
        """Plan the page pools of an engine without making it; arguments and errors as of `Engine`."""
        on_cuda = self._device is not None
        plan = plan_engine(self.manifest, max_sequences, max_cache_bytes, chunk_tokens, max_context, cuda=on_cuda)
        if self._device is None or max_cache_bytes is not None:
            return plan
        free, _ = self._device.free_memory()
        scratch = _decode_scratch_bytes(self.manifest, plan, self._device.buffers.shared_bytes_per_block)
        most = int((free - scratch - estimate_chunk_bytes(self.manifest, plan)) * POOL_SHARE)
        if plan.bytes <= most:
            return plan
        try:
            return plan_engine(self.manifest, max_sequences, max(1, most), chunk_tokens, max_context, cuda=True)
        except CapacityError as error:
            raise CapacityError(
                f"{self._device.name} has {free} bytes free, too few for an engine and {scratch} bytes of attention's "
                f"scratch memory; lower max_sequences or max_context: {error}"
            ) from error

    def snapkv_check(self) -> SnapKvCheck:
        """Return what refuses, by ConfigError, options that `session` would; it opens nothing, in whatever thread."""
        recorded = self._recorded_eviction()[1] if self._evict_builder is None else None

        def check(options: SnapKv | None) -> None:
            check_snapkv(options, self.manifest)
            if options is not None and self._evict_builder is None and options.structure != recorded:
                raise self._no_graph(options, recorded)

        return check

    def batch_stepper(self, plan: EnginePlan) -> BatchStepper:
        """Allocate the page pools of an engine, and return what runs its steps. Raises CapacityError."""
        if self._device is None:
            return HostBatchStepper(self._session, self._evict_session, self.manifest, plan)
        device = self._device
        scratch = _decode_scratch_bytes(self.manifest, plan, device.buffers.shared_bytes_per_block)
        check_pools(plan, scratch, device.free_memory(), device.name)
        return CudaBatchStepper(
            self._session, self._evict_session, self.manifest, plan, device.buffers, device.graph_ids
        )

    def _fitting(self, plan: CachePlan, snapkv: SnapKv | None, capacities: list[int] | None = None) -> CachePlan:
        """Return the plan with chunks that there is memory for, where nobody chose their size."""
        if self._device is None or self.manifest.chunk_chosen:
            return plan

        def check(smaller: CachePlan) -> None:
            self._check_room(smaller if capacities is None else smaller.with_capacities(capacities), snapkv)

        return fit_chunk(plan, self.manifest.chunk_size, check)

    def _check_room(self, plan: CachePlan, snapkv: SnapKv | None) -> None:
        """Refuse a plan that the device has no memory for."""
        assert self._device is not None
        memory = self._device.free_memory()
        captured = capture_bytes(self.manifest, min(snapkv.captured_queries, plan.max_context) if snapkv else 0)
        largest = max(estimate_chunk_bytes(self.manifest, plan), estimate_evict_bytes(self.manifest, plan, snapkv))
        chunk = max(0, largest - self._device.arena_bytes())
        check_room(plan, captured, chunk, memory, self._device.name)

    def _choose_file(self, fused: bool | None) -> str:
        """Return the graph to open: on CUDA the fused one, where the manifest names one, unless told otherwise."""
        name = getattr(self.manifest, "fused_model", None)
        if fused and not name:
            raise ConfigError(f"{self.folder} has no fused graph; export the model again with fusion, or load it plain")
        if fused and self._provider == CPU_PROVIDER:
            raise ConfigError("the fused graph runs on CUDA only; load with device='cuda', or without fused=True")
        wanted = self._provider == CUDA_PROVIDER if fused is None else fused
        return str(name) if wanted and name else MODEL_FILE

    def _evict_session(self, options: SnapKv) -> Any:
        """Open the eviction graph for these options, once for each structure."""
        key = json.dumps(options.structure, sort_keys=True)
        if key not in self._evict_sessions:
            self._evict_sessions[key] = self._open_evict_graph(options)
        return self._evict_sessions[key]

    def _open_evict_graph(self, options: SnapKv) -> Any:
        """Open the folder's graph where it has these options, else build one."""
        session, recorded = self._recorded_eviction()
        if recorded == options.structure:
            return session
        if self._evict_builder is None:
            raise self._no_graph(options, recorded)
        return self._open(self._evict_builder(self.manifest, options))

    def _recorded_eviction(self) -> tuple[Any, dict[str, Any] | None]:
        """Open the folder's eviction graph; returns it and the options that it was built for, None without one."""
        path = self.folder / EVICT_FILE
        if not path.is_file():
            return None, None
        session = self._open(str(path))
        return session, json.loads(session.get_modelmeta().custom_metadata_map.get(SNAPKV_METADATA, "{}"))

    def _no_graph(self, options: SnapKv, recorded: dict[str, Any] | None) -> ConfigError:
        return ConfigError(
            f"{self.folder / EVICT_FILE} was built for {json.dumps(recorded)}, not {json.dumps(options.structure)}; "
            "open the model with ortolan.load, which can build others"
        )

    def _open(self, model: str | bytes, *, graph: bool = False) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = self._num_threads
        providers: list[Any] = [self._provider]
        if self._buffers:
            options.enable_mem_pattern = False  # patterns of every prompt length would each keep their memory
            options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
            settings = cuda_options(self._buffers.device_id, self._buffers.stream_pointer, graph=graph)
            providers = [(self._provider, settings), CPU_PROVIDER]
        register(options)
        try:
            fallback = int(self._provider != CPU_PROVIDER)  # from the CPU it would only print, to standard output
            session = onnxruntime.InferenceSession(model, options, providers=providers, enable_fallback=fallback)
        except Exception as error:  # the binding raises its own exception types, one per status code
            if self._buffers and is_out_of_memory(error):
                raise CapacityError(
                    f"cuda:{self._buffers.device_id} has no memory for {self.folder}: {error}"
                ) from error
            raise ContractMismatchError(f"ONNX Runtime cannot open the graph of {self.folder}: {error}") from error
        if session.get_providers()[0] != self._provider:
            raise OpLibraryError(
                f"ONNX Runtime cannot start {self._provider}: it offers {session.get_providers()} instead; check that "
                "the CUDA and cuDNN libraries of onnxruntime-gpu can be loaded"
            )
        return session


def load(
    folder: str | Path,
    device: str | None = None,
    *,
    num_threads: int = 0,
    evict_builder: EvictBuilder | None = None,
    fused: bool | None = None,
) -> Model:
    """Open an exported model.

    Args:
        folder: what `ortolan.export` wrote.
        device: "cpu", "cuda" or "cuda:N"; None takes CUDA where it is usable, else the CPU.
        num_threads: of ONNX Runtime's intra-op pool; 0 takes one per core.
        evict_builder: builds eviction graphs for options other than the folder's evict.onnx.
        fused: whether to run the graph with fused operators; None does so on CUDA where the folder has one.

    Raises:
        ContractMismatchError: the folder is no model, is incomplete, or was made by another version.
        OpLibraryError: the operator library or ONNX Runtime cannot serve the device.
        ConfigError: the device has no such spelling, or none for the model's dtype; num_threads is no such number, or
            fused no truth.
    """
    folder, num_threads = file_path("folder", folder), whole_number("num_threads", num_threads, 0, MAX_THREADS)
    if fused is not None:
        truth("fused", fused)
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
    if provider == CPU_PROVIDER and manifest.dtype == "bfloat16":
        raise ConfigError(
            f"{folder} is a bfloat16 model, which no CPU kernel computes; load it on CUDA, or export it as float32 or "
            "float16"
        )
    buffers = None
    if provider == CUDA_PROVIDER:
        number = device_number(device)
        check_device_number(number)
        preload_cuda_libraries()
        buffers = CudaBuffers(number)
    return Model(folder, manifest, provider, num_threads, evict_builder, buffers=buffers, fused=fused)


def _decode_scratch_bytes(manifest: Manifest, plan: EnginePlan, shared_bytes: int) -> int:
    """Return the bytes of attention's scratch memory in an engine's steps, at most, one layer after another."""
    tokens = max(plan.chunk_tokens, plan.max_sequences)
    most = 0
    for kind, planned in zip(manifest.cache_kinds, plan.kinds, strict=True):
        for layer in {manifest.layers[index] for index in kind.layers}:
            query = DecodeScratchQuery(
                dtype=manifest.dtype,
                num_heads=manifest.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                capacity=planned.table_pages * planned.page_size,
                window=layer.window,
                sink=manifest.sink,
                max_sequences=plan.max_sequences,
                max_tokens=tokens,
                shared_bytes_per_block=shared_bytes,
            )
            most = max(most, decode_scratch_bytes(query))
    return most

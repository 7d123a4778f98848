"""Says what holds how much memory, and whether a plan fits before anything is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortolan.custom_ops.queries import DecodeScratchQuery, decode_scratch_bytes
from ortolan.element_types import element_type
from ortolan.errors import CapacityError
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.policies.eviction import CacheShape
from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.device.host_memory import host_memory_bytes
from ortolan.runtime.device.opening import Device

if TYPE_CHECKING:
    from ortolan.runtime.session import Session

# Intermediate results of a chunk that live at once, in rows of Hq * D elements per token: residual, norm, query, key
# and value, the MLP's wide rows (up to seven such rows each), and what fragmentation leaves.
ROWS_PER_TOKEN = 32
LOGIT_BYTES = 4
LIBRARY_BYTES = 128 * 2**20  # kernels and workspaces that CUDA's libraries load with the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of one session and of its model; None where the device does not tell.

    Attributes:
        device: "cpu" or "cuda:N".
        weights_bytes: of the model: on CUDA what opening it took, elsewhere about what `held_weight_bytes` says.
        host_embedding_bytes: of per-layer embeddings that `host_embeddings` keeps in host memory: on CUDA besides
            `weights_bytes`, on the CPU among them.
        cache_bytes: key and value caches now.
        planned_cache_bytes: key and value caches before any eviction.
        free_page_bytes: of a paged session's pools, the pages that hold nothing now.
        capture_bytes: queries captured for SnapKV.
        step_bytes: inputs and outputs of steps, and the scratch memory of choosing tokens.
        draft_bytes: caches and buffers of a draft model or head that drafts for the session.
        other_session_bytes: caches and buffers of the model's other sessions, and what the pool holds for later ones.
        arena_bytes: what ONNX Runtime holds besides the weights, by difference: intermediate results, libraries.
        used_bytes: all of the above but what was planned.
        free_bytes: free on the device, for anyone.
        total_bytes: of the device.
    """

    device: str
    weights_bytes: int
    cache_bytes: int
    planned_cache_bytes: int
    capture_bytes: int
    step_bytes: int
    free_page_bytes: int = 0
    host_embedding_bytes: int = 0
    draft_bytes: int = 0
    other_session_bytes: int | None = None
    arena_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return dataclasses.asdict(self)


def weight_file_bytes(manifest: Manifest) -> int:
    """Return the bytes of the model's weights on disk."""
    return sum(size for name, size in manifest.files.items() if name.endswith((".data", ".safetensors")))


def held_weight_bytes(manifest: Manifest, *, is_cuda: bool) -> int:
    """Return about what the weights take in memory.

    ONNX Runtime's products on the CPU compute in float32, and it widens float16 weights once, when it opens the graph:
    they take twice their file. Low-bit products take float16 as it is.
    """
    widened = not is_cuda and manifest.dtype == "float16" and manifest.weight_format == "dense"
    return weight_file_bytes(manifest) * (2 if widened else 1)


def capture_bytes(manifest: Manifest, rows: int) -> int:
    """Return the bytes that `rows` captured queries of all evictable layers take."""
    row = sum(layer.num_heads * layer.head_size for layer in manifest.layers if layer.evictable)
    return rows * row * element_type(manifest.dtype).bytes


def _query_rows(plan: CachePlan, options: Eviction | None) -> int:
    """Return the captured queries of each evictable layer that are held at once, at most."""
    if options is None:
        return 0
    again = options.second_reading
    return min(max(options.captured_queries, again.piece_tokens if again else 0), plan.max_context)


def estimate_chunk_bytes(manifest: Manifest, plan: CachePlan) -> int:
    """Estimate what the first prefill step takes on a device besides the caches."""
    hidden = max(layer.num_heads * layer.head_size for layer in manifest.layers)
    tokens = min(plan.chunk_size, plan.max_context)
    rows = tokens * hidden * ROWS_PER_TOKEN * element_type(manifest.dtype).bytes
    return LIBRARY_BYTES + rows + 2 * manifest.vocab_size * LOGIT_BYTES


def estimate_evict_bytes(manifest: Manifest, plan: CachePlan, options: Eviction | None) -> int:
    """Estimate what an eviction takes on a device besides the caches, for the layer that takes most."""
    if options is None:
        return 0
    return max(
        options.workspace_bytes(
            CacheShape(
                slots=plan.layers[index].capacity,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
            )
        )
        for index, layer in enumerate(manifest.layers)
        if layer.evictable
    )


def fit_chunk(plan: CachePlan, smallest: int, check: Callable[[CachePlan], None]) -> CachePlan:
    """Return the plan with its chunk halved, down to `smallest`, until `check` raises no CapacityError."""
    while plan.chunk_size > smallest:
        try:
            check(plan)
            return plan
        except CapacityError:
            plan = dataclasses.replace(plan, chunk_size=max(plan.chunk_size // 2, smallest))
    return plan


def check_room(plan: CachePlan, captured: int, chunk: int, memory: tuple[int, int], device: str) -> None:
    """Refuse a plan that does not fit the device.

    Args:
        plan: the caches.
        captured: bytes of captured queries.
        chunk: bytes that intermediate results of a chunk, or of an eviction, still need, estimated.
        memory: free and all bytes of the device.
        device: its name.

    Raises:
        CapacityError: the sum is more than what is free.
    """
    needed = plan.bytes + captured + chunk
    free, total = memory
    if needed <= free:
        return
    per_token = plan.bytes // plan.max_context
    raise CapacityError(
        f"a session of max_context {plan.max_context} and chunk_size {plan.chunk_size} needs {needed} bytes on "
        f"{device}: {plan.bytes} of caches, {captured} of captured queries, about {chunk} for a chunk; {free} of "
        f"{total} are free, {needed - free} too few; lower max_context (--max-context; about {per_token} bytes a "
        "token) or chunk_size (--chunk-size), or free memory on the device"
    )


def check_host_room(plan: CachePlan, captured: int) -> None:
    """Refuse caches and captured queries that this machine could never hold, before any of them is allocated.

    Raises:
        CapacityError: they are more than all of its memory.
    """
    needed, total = plan.bytes + captured, host_memory_bytes()
    if needed > total:
        several = f" and max_sequences {plan.max_sequences}" if plan.max_sequences > 1 else ""
        advice = "max_sequences or max_context" if several else "max_context (--max-context)"
        raise CapacityError(
            f"there is no memory for the caches of max_context {plan.max_context}{several}: they need {plan.bytes} "
            f"bytes, captured queries {captured}, and this machine has {total}; lower {advice}"
        )


def check_pools(plan: CachePlan, scratch: int, memory: tuple[int, int], device: str) -> None:
    """Refuse an engine's page pools that do not fit the device, before any of them takes what others need.

    Args:
        plan: the pools.
        scratch: bytes of attention's scratch memory.
        memory: free and all bytes of the device.
        device: its name.

    Raises:
        CapacityError: they are more than what is free.
    """
    free, total = memory
    needed = plan.bytes + scratch
    if needed > free:
        raise CapacityError(
            f"an engine of {plan.max_sequences} sequences and max_context {plan.max_context} needs {plan.bytes} bytes "
            f"of page pools and {scratch} of attention's scratch memory on {device}; {free} of {total} are free, "
            f"{needed - free} too few; lower max_sequences, max_context or max_cache_bytes, or leave the last out to "
            "take what is free"
        )


def _scratch_query(manifest: Manifest, index: int, plan: CachePlan, shared_bytes: int) -> DecodeScratchQuery:
    """Describe one attention layer in the largest step of many sequences."""
    layer = manifest.layers[index]
    return DecodeScratchQuery(
        dtype=manifest.dtype,
        cache_dtype=manifest.cache_dtype,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        capacity=plan.layers[manifest.cache_owner(index)].capacity,
        window=layer.window,
        sink=manifest.sink,
        max_sequences=plan.max_sequences,
        max_tokens=max(plan.chunk_size, plan.max_sequences),
        shared_bytes_per_block=shared_bytes,
    )


class DeviceMemory:
    """What a model and its sessions take of a device; nothing is known of the host's."""

    def __init__(self, device: Device, manifest: Manifest) -> None:
        """Look at the device before the model takes anything."""
        self._device, self._manifest = device, manifest
        self._free_before = device.cuda.memory()[0] if device.cuda else 0
        self.weights_bytes = held_weight_bytes(manifest, is_cuda=device.cuda is not None)
        self.host_embedding_bytes = 0
        self.shared_weight_bytes = 0  # of the weights, those that lie in the pool of buffers

    def note_weights(self) -> None:
        """Take what was taken since for the weights; other programs on the device blur it."""
        if self._device.cuda:
            self.weights_bytes = self.used_bytes()

    def free_memory(self) -> tuple[int, int]:
        """Give back what no array uses; return the device's free and all bytes."""
        cuda = self._device.cuda
        assert cuda is not None
        cuda.trim()
        return cuda.memory()

    def used_bytes(self) -> int:
        """Device memory taken since the model began to open; other programs on the device blur it."""
        cuda = self._device.cuda
        return max(0, self._free_before - cuda.memory()[0]) if cuda else 0

    def arena_bytes(self) -> int:
        """Device memory that is neither weights nor buffers of sessions."""
        cuda = self._device.cuda
        return max(0, self.used_bytes() - self.weights_bytes - self._buffer_bytes()) if cuda else 0

    def _buffer_bytes(self) -> int:
        """Return what the pool holds besides weights."""
        cuda = self._device.cuda
        return max(0, cuda.pool_bytes - self.shared_weight_bytes) if cuda else 0

    def scratch_bytes(self, plan: CachePlan) -> int:
        """Return the scratch memory of attention that a step of many sequences takes, at most."""
        cuda = self._device.cuda
        if cuda is None:
            return 0
        return max(
            decode_scratch_bytes(_scratch_query(self._manifest, index, plan, cuda.shared_bytes_per_block))
            for index in range(len(self._manifest.layers))
        )

    def check_room(self, plan: CachePlan, options: Eviction | None) -> None:
        """Refuse a session's plan that the device has no memory for. Raises CapacityError."""
        captured = capture_bytes(self._manifest, _query_rows(plan, options))
        if self._device.cuda is None:
            check_host_room(plan, captured)
            return
        memory = self.free_memory()
        largest = max(estimate_chunk_bytes(self._manifest, plan), estimate_evict_bytes(self._manifest, plan, options))
        check_room(plan, captured, max(0, largest - self.arena_bytes()), memory, self._device.name)

    def check_pools(self, plan: CachePlan) -> None:
        """Refuse an engine's page pools that the device has no memory for. Raises CapacityError."""
        if self._device.cuda is None:
            check_host_room(plan, 0)
        else:
            check_pools(plan, self.scratch_bytes(plan), self.free_memory(), self._device.name)

    def report(self, session: Session) -> MemoryReport:
        """Say what holds how many bytes while a session runs."""
        room, stepper = session.feeder.room, session.feeder.stepper
        parts = {
            "weights_bytes": self.weights_bytes,
            "cache_bytes": room.bytes,
            "free_page_bytes": room.free_bytes,
            "capture_bytes": int(sum(capture.nbytes for capture in session.state.captures.values())),
            "step_bytes": stepper.bytes,
            "draft_bytes": session.draft_bytes,
        }
        planned = session.plan.bytes
        cuda = self._device.cuda
        hosted = self.host_embedding_bytes
        if cuda is None:
            return MemoryReport(
                device=self._device.name, planned_cache_bytes=planned, host_embedding_bytes=hosted, **parts
            )
        free, total = cuda.memory()
        own = sum(parts.values()) - self.weights_bytes
        parts |= {"other_session_bytes": max(0, self._buffer_bytes() - own), "arena_bytes": self.arena_bytes()}
        return MemoryReport(
            device=self._device.name,
            planned_cache_bytes=planned,
            host_embedding_bytes=hosted,
            used_bytes=sum(parts.values()),
            free_bytes=free,
            total_bytes=total,
            **parts,
        )

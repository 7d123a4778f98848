"""Says what holds how much memory, and whether a plan fits before anything is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ortolan.errors import CapacityError
from ortolan.manifest import Manifest
from ortolan.runtime.engine_plan import EnginePlan
from ortolan.runtime.options import SnapKv
from ortolan.runtime.plan import ELEMENT_BYTES, CachePlan

# Intermediate results of a chunk that live at once, in rows of Hq * D elements per token: residual, norm, query, key
# and value, the MLP's wide rows (up to seven such rows each), and what fragmentation leaves.
ROWS_PER_TOKEN = 32
SCORE_ARRAYS = 32  # of a layer's scores, ranks and positions, in float32 each; some graphs take 8 layers at once
LIBRARY_BYTES = 128 * 2**20  # kernels and workspaces that CUDA's libraries load with the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of one session and of its model; None where the device does not tell.

    Attributes:
        device: "cpu" or "cuda:N".
        weights_bytes: of the model: on CUDA what opening it took, elsewhere the size of its files.
        cache_bytes: key and value caches now.
        planned_cache_bytes: key and value caches before any eviction.
        free_page_bytes: of a paged session's pools, the pages that hold nothing now.
        capture_bytes: queries captured for SnapKV.
        step_bytes: inputs and outputs of steps, and the scratch memory of choosing tokens.
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


def capture_bytes(manifest: Manifest, rows: int) -> int:
    """Return the bytes that `rows` captured queries of all evictable layers take."""
    row = sum(layer.num_heads * layer.head_size for layer in manifest.layers if layer.evictable)
    return rows * row * ELEMENT_BYTES[manifest.dtype]


def estimate_chunk_bytes(manifest: Manifest, plan: CachePlan | EnginePlan) -> int:
    """Estimate what the first prefill step takes on a device besides the caches."""
    hidden = max(layer.num_heads * layer.head_size for layer in manifest.layers)
    chunk = plan.chunk_size if isinstance(plan, CachePlan) else plan.chunk_tokens
    tokens = min(chunk, plan.max_context)
    rows = tokens * hidden * ROWS_PER_TOKEN * ELEMENT_BYTES[manifest.dtype]
    return LIBRARY_BYTES + rows + 2 * manifest.vocab_size * ELEMENT_BYTES["float32"]


def estimate_evict_bytes(manifest: Manifest, plan: CachePlan, snapkv: SnapKv | None) -> int:
    """Estimate what an eviction takes on a device besides the caches, for the layer that takes most.

    The policy `expected` weighs every key by every query head's covariance, in float32; others hold scores alone.
    """
    if snapkv is None:
        return 0
    evictable = [(i, layer) for i, layer in enumerate(manifest.layers) if layer.evictable]
    rows = max(plan.layers[i].capacity * layer.head_size for i, layer in evictable)
    scores = max(plan.layers[i].capacity * layer.num_kv_heads for i, layer in evictable)
    most_heads = max(layer.num_heads for _, layer in evictable)
    products = 2 * most_heads * rows if snapkv.policy == "expected" else 0
    return ELEMENT_BYTES["float32"] * (products + SCORE_ARRAYS * scores)


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
    raise CapacityError(
        f"a session of max_context {plan.max_context} and chunk_size {plan.chunk_size} needs {needed} bytes on "
        f"{device}: {plan.bytes} of caches, {captured} of captured queries, about {chunk} for a chunk; {free} of "
        f"{total} are free, {needed - free} too few; lower max_context (about {plan.bytes // plan.max_context} bytes "
        "a token) or chunk_size, or free memory on the device"
    )


def check_pools(plan: EnginePlan, scratch: int, memory: tuple[int, int], device: str) -> None:
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

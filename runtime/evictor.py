"""Runs evict.onnx on one sequence's caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan import contract
from ortolan.errors import OrtolanError
from ortolan.runtime.caches import CacheBuffers
from ortolan.runtime.options import SnapKv
from ortolan.runtime.stepper import wrap


def evict(
    ort_session: Any,
    caches: CacheBuffers,
    options: SnapKv,
    physical: dict[int, npt.NDArray[np.int32]],
    logical: int,
) -> dict[int, npt.NDArray[np.int32]]:
    """Compact the full-attention caches to the budget, in place.

    Args:
        ort_session: session of the eviction graph.
        caches: whose evictable layers are changed.
        options: budget, window and sinks.
        physical: tokens in each evictable layer, per kv head [Hkv].
        logical: tokens read so far.

    Returns:
        For each layer, the physical positions kept, [Hkv or 1, K], ascending.

    Raises:
        OrtolanError: ONNX Runtime failed; the caches must then be taken as lost.
    """
    binding = ort_session.io_binding()
    arrays: dict[str, npt.NDArray[Any]] = {
        contract.EVICT_BUDGET: np.array([options.budget], np.int64),
        contract.EVICT_WINDOW: np.array([options.window], np.int64),
        contract.EVICT_SINK: np.array([options.sink], np.int64),
    }
    shared: dict[str, npt.NDArray[Any]] = {}
    for index, lengths in physical.items():
        # Rows were written by logical position, and are read by physical position.
        shift = (int(lengths[0]) - logical) % options.window
        arrays[contract.capture(index)] = np.roll(caches.captures[index], shift, axis=1)
        arrays[contract.kv_len(index)] = lengths[None].astype(np.int32)
        shared[contract.key_cache(index)] = caches.layers[index].key
        shared[contract.value_cache(index)] = caches.layers[index].value
    for name, array in arrays.items():
        binding.bind_ortvalue_input(name, wrap(array))
    for name, array in shared.items():
        value = wrap(array)
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(contract.output(name), value)
    for index in physical:
        binding.bind_output(contract.keep(index))
        binding.bind_output(contract.output(contract.kv_len(index)))
    try:
        ort_session.run_with_iobinding(binding)
    except Exception as error:  # the binding raises its own exception types, one per status code
        raise OrtolanError(f"the eviction graph failed: {error}") from error
    results = dict(zip(_names(shared, physical), binding.get_outputs(), strict=True))
    return {index: results[contract.keep(index)].numpy()[0].copy() for index in physical}


def _names(shared: dict[str, Any], physical: dict[int, Any]) -> list[str]:
    """List the bound outputs in the order of their binding."""
    names = [contract.output(name) for name in shared]
    for index in physical:
        names += [contract.keep(index), contract.output(contract.kv_len(index))]
    return names

"""Enqueues steps of the decoder graph on a CUDA device; nothing here waits for the device but `logits`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortolan import contract
from ortolan.errors import CapacityError, OrtolanError
from ortolan.manifest import Manifest
from ortolan.runtime.buffers import Array
from ortolan.runtime.caches import CacheBuffers
from ortolan.runtime.cuda import CudaBuffers
from ortolan.runtime.step_inputs import Lengths, StepLayout

NO_GRAPH = -1


class DeviceState:
    """The inputs of a decode step of one sequence, at fixed addresses, advanced on the device."""

    def __init__(self, manifest: Manifest, device: CudaBuffers) -> None:
        self.layout = StepLayout(manifest, 1, 1)
        self.block: Array = device.upload(np.zeros(self.layout.bytes, np.uint8))
        with device.scope():
            self.token_ids: Array = self.layout.token_ids.view(self.block)
            self.positions: Array = self.layout.positions.view(self.block)
            self.past_len: Array = self.layout.past_len[0].view(self.block)
            self.kv_len: Array = self.layout.kv_len[0].view(self.block)


class Prompt:
    """A prompt's chunks, whose inputs are on the device."""

    def __init__(self, layout: StepLayout, block: Array, chunks: list[tuple[int, int]]) -> None:
        self.layout, self.block, self.chunks = layout, block, chunks


class CudaStepper:
    """Feeds tokens of one sequence to the decoder graph.

    Decode steps replay a CUDA graph that ONNX Runtime captures at the first one, on the thread that runs it: a session
    that moves to another thread captures anew there. The graph reads lengths from `state` and advances nothing, so
    that the runs which capturing takes leave the caches as one run does.
    """

    def __init__(self, ort_session: Any, manifest: Manifest, caches: CacheBuffers, graph_ids: Iterator[int]) -> None:
        self._session, self._manifest, self._caches = ort_session, manifest, caches
        assert isinstance(caches.buffers, CudaBuffers)
        self._device = caches.buffers
        self._graph_ids = graph_ids
        self._graph_id = NO_GRAPH
        self._eager, self._graph = run_options(NO_GRAPH), run_options(NO_GRAPH)
        self._inputs = {i.name for i in ort_session.get_inputs()}
        self.captures = True  # False runs decode steps one kernel at a time
        self.state = DeviceState(manifest, self._device)
        self.logits: Array = self._device.allocate((1, manifest.vocab_size), np.float32)
        self._generation = -1
        self._chunk_binding: Any = None
        self._step_binding: Any = None
        self._captured: tuple[int, int] | None = None  # graph and thread

    @property
    def is_captured(self) -> bool:
        """Whether a step would replay a graph on this thread, not capture one."""
        if not self.captures:
            return True
        is_current = self._generation == self._caches.generation
        return is_current and self._captured == (self._graph_id, threading.get_ident())

    @property
    def bytes(self) -> int:
        """Device memory of the decode state and the logits."""
        return int(self.state.block.nbytes + self.logits.nbytes)

    def upload(
        self,
        tokens: npt.NDArray[np.int64],
        chunks: list[tuple[int, int]],
        lengths: tuple[int, Lengths],
        variant: int,
    ) -> Prompt:
        """Bring the inputs of all chunks to the device in one copy; arguments as `StepLayout.fill` takes them."""
        layout = StepLayout(self._manifest, len(tokens), len(chunks))
        block = np.zeros(layout.bytes, np.uint8)
        layout.fill(block, tokens, chunks, lengths, variant)
        return Prompt(layout, self._device.upload(block), chunks)

    def enqueue_chunk(self, prompt: Prompt, chunk: int) -> None:
        """Enqueue one chunk of a prompt; its last token's logits go to `logits`. Raises as `enqueue_step`."""
        self._bind_caches()
        with self._device.scope():
            inputs = prompt.layout.named(prompt.block, chunk, *prompt.chunks[chunk])
        self._bind(self._chunk_binding, inputs)
        self._run(self._chunk_binding, self._eager)

    def load(self, token: int, lengths: tuple[int, Lengths], variant: int) -> None:
        """Set the state for a step that feeds `token` after the given lengths."""
        layout = self.state.layout
        block = np.zeros(layout.bytes, np.uint8)
        layout.fill(block, np.array([token], np.int64), [(0, 1)], lengths, variant)
        self._device.write(self.state.block, block)

    def enqueue_step(self) -> None:
        """Enqueue the decode step that `state` describes; its logits go to `logits`.

        Raises:
            CapacityError: there is no device memory for the graph's intermediate results.
            OrtolanError: ONNX Runtime failed.
        """
        self._bind_caches()
        self._run(self._step_binding, self._graph if self.captures else self._eager)
        if self.captures:
            self._captured = (self._graph_id, threading.get_ident())

    def _bind_caches(self) -> None:
        """Bind the caches anew where one was replaced; the old graph holds addresses that are no longer theirs."""
        if self._generation == self._caches.generation:
            return
        if self._graph_id != NO_GRAPH:
            self._device.synchronize()
            release = getattr(self._session, "release_captured_graph", None)
            if release:
                release(self._graph_id)
        self._graph_id = next(self._graph_ids)
        self._graph = run_options(self._graph_id)
        self._chunk_binding, self._step_binding = self._session.io_binding(), self._session.io_binding()
        for binding in (self._chunk_binding, self._step_binding):
            for name, array in self._caches.named().items():
                self._device.bind_in_place(binding, name, array)
            self._bind(binding, self._caches.tables())
            self._device.bind_output(binding, contract.LOGITS, self.logits)
        with self._device.scope():
            inputs = self.state.layout.named(self.state.block, 0, 0, 1)
        self._bind(self._step_binding, inputs)
        self._generation = self._caches.generation

    def _bind(self, binding: Any, inputs: dict[str, Array]) -> None:
        for name, array in inputs.items():
            if name in self._inputs:
                self._device.bind_input(binding, name, array)

    def _run(self, binding: Any, options: Any) -> None:
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:  # the binding raises its own exception types, one per status code
            if is_out_of_memory(error):
                raise CapacityError(
                    f"cuda:{self._device.device_id} has no memory for the decoder's intermediate results: {error}; "
                    "make the session with a smaller chunk_size or max_context"
                ) from error
            raise OrtolanError(f"the decoder graph failed: {error}") from error


def run_options(graph_id: int) -> Any:
    """Return options of a run that does not wait for the device."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def is_out_of_memory(error: Exception) -> bool:
    """Say whether ONNX Runtime failed for want of device memory."""
    text = str(error).lower()
    return any(sign in text for sign in ("failed to allocate memory", "out of memory", "available memory of"))

"""Reads the file of a saved session back: refuses what does not fit the model, then fills a new session's caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, TypeVar

import numpy as np

from ortolan.errors import ConfigError, ContractMismatchError, SessionFileError
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.buffers import Array
from ortolan.runtime.caches import CacheBuffers
from ortolan.runtime.fingerprint import Fingerprint, difference
from ortolan.runtime.options import Sampling
from ortolan.runtime.plan import CachePlan, LayerPlan
from ortolan.runtime.sampler import Generation
from ortolan.runtime.session_file import SessionFile
from ortolan.runtime.session_state import SessionState, SlotRuns, capture_runs, head_runs

Options = TypeVar("Options")

# Of a file's description: a class, members of a dict, the form of a list's elements, or a choice of forms.
DESCRIPTION: dict[str, Any] = {
    "model": dict,
    "plan": {"max_context": int, "chunk_size": int, "slot_tile": int},
    "snapkv": (dict, NoneType),
    "layers": [{"capacity": int, "planned": int, "first": int}],
    "lengths": {"logical": int, "evicted_at": int, "captured_from": int, "physical": dict},
    "pending": [int],
    "variant": int,
    "generation": ({"sampling": dict, "max_new_tokens": int, "count": int}, NoneType),
    "finish_reason": (str, NoneType),
}


class SavedSession:
    """A checked file of a session."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises as `Model.restore` does for damaged files and other versions."""
        self._path = path
        self._file = SessionFile(path)
        self._description = self._file.description
        if not _has_form(self._description, DESCRIPTION):
            self._file.close()
            raise SessionFileError(
                f"{path} is no session as this version of Ortolan saves it: its description has another form"
            )

    def __enter__(self) -> SavedSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def check_model(self, identity: Fingerprint) -> None:
        """Raise ContractMismatchError where another model saved the session."""
        problem = difference(self._description["model"], identity)
        if problem:
            raise ContractMismatchError(f"{self._path} was saved with another model: {problem}")
        counts = len(self._description["layers"]), len(identity["layers"])
        if counts[0] != counts[1]:
            raise SessionFileError(f"{self._path} describes {counts[0]} layers of a model that has {counts[1]}")

    @property
    def logical_length(self) -> int:
        """Tokens that the session has read."""
        return int(self._description["lengths"]["logical"])

    @property
    def max_context(self) -> int:
        """The session's longest sequence, tokens."""
        return int(self._description["plan"]["max_context"])

    @property
    def chunk_size(self) -> int:
        """Most tokens of one prefill step."""
        return int(self._description["plan"]["chunk_size"])

    @property
    def snapkv(self) -> Eviction | None:
        """The session's eviction options."""
        saved = self._description["snapkv"]
        return None if saved is None else _options(Eviction.from_dict, saved, self._path)

    def capacities(self, plan: CachePlan, sink: int) -> list[int]:
        """Return the slots that each layer's cache needs in a session of that plan, to go on as the saved one.

        Args:
            plan: of the session to be made.
            sink: S.

        Raises:
            ConfigError: the plan's context is shorter than what was read, or a cache too small for what it held.
        """
        if plan.max_context < self.logical_length:
            raise ConfigError(
                f"max_context {plan.max_context} does not hold the {self.logical_length} tokens that {self._path} has "
                "read; restore it with a larger one"
            )
        same_tiles = plan.slot_tile == self._description["plan"]["slot_tile"]
        result = []
        for index, layer in enumerate(plan.layers):
            saved = self._description["layers"][index]
            if layer.kind == "ring" or saved["capacity"] == saved["planned"]:
                result.append(layer.capacity)
            elif same_tiles and saved["capacity"] <= layer.capacity:
                result.append(int(saved["capacity"]))
            else:
                result.append(plan.grown_capacity(index, max(self._held(index), sink + 1)))
            most = result[-1] if plan.bound is None else plan.bound
            if layer.kind == "full" and self._held(index) > most:
                raise ConfigError(
                    f"layer {index} holds {self._held(index)} tokens in {self._path}, and {most} in the session "
                    "that was asked for; restore it with the chunk_size that it was saved with"
                )
        return result

    def load(self, state: SessionState, manifest: Manifest) -> SessionState:
        """Fill the empty caches of a new session's state, and the state with what was saved; returns it.

        Raises:
            SessionFileError: the file cannot be read any more.
            CapacityError: there is no memory.
        """
        lengths, saved = state.lengths, self._description["lengths"]
        lengths.logical = lengths.highest = self.logical_length
        lengths.evicted_at, lengths.captured_from = int(saved["evicted_at"]), int(saved["captured_from"])
        lengths.physical = {int(i): np.array(held, np.int32) for i, held in saved["physical"].items()}
        for index, layer in enumerate(state.plan.layers):
            lengths.rings_from = max(lengths.rings_from, self._rings_from(index, layer, manifest.sink))
            self._load_cache(state, index, manifest.sink)
            if f"layer.{index}.kept" in self._file:
                lengths.kept[index] = self._file.read(f"layer.{index}.kept", np.int32).copy()
        self._load_captures(state)
        state.history = self._file.read("history", np.int32).tolist()
        state.pending = list(self._description["pending"])
        state.variant = int(self._description["variant"])
        state.finish_reason = self._description["finish_reason"]
        state.generation = self._generation()
        return state

    def _held(self, index: int) -> int:
        physical: dict[str, list[int]] = self._description["lengths"]["physical"]
        return max(physical.get(str(index), [self.logical_length]))

    def _rings_from(self, index: int, layer: LayerPlan, sink: int) -> int:
        """Return the shortest length that a ring can go back to."""
        first = int(self._description["layers"][index]["first"])
        return first + layer.window - 1 if layer.kind == "ring" and first > sink else 0

    def _load_cache(self, state: SessionState, index: int, sink: int) -> None:
        """Write keys and values to their slots; a smaller ring drops the oldest positions."""
        layer, length = state.plan.layers[index], self.logical_length
        first, begin = int(self._description["layers"][index]["first"]), 0
        dropped = max(0, length - first - (layer.capacity - sink)) if layer.kind == "ring" else 0
        for head, (oldest, *others) in enumerate(head_runs(state, index, first + dropped, sink)):
            self._write(state.caches, (index, head), oldest, begin)
            begin += oldest[1] + dropped
            for slots in others:
                self._write(state.caches, (index, head), slots, begin)
                begin += slots[1]

    def _write(self, caches: CacheBuffers, place: tuple[int, int], slots: tuple[int, int], begin: int) -> None:
        """Write rows of the file, from `begin` on, to slots (first, count) of one layer and kv head."""
        index, head = place
        for block in caches.blocks(index, head, *slots):
            end = begin + len(block[0])
            for name, target in zip(("key", "value"), block, strict=True):
                rows = self._file.read(f"layer.{index}.{name}", target.dtype, begin, end)
                caches.buffers.write(target, rows)
            begin = end

    def _load_captures(self, state: SessionState) -> None:
        lengths, rows, buffers = state.lengths, state.capture_rows, state.caches.buffers
        for index, capture in state.caches.captures.items():
            runs = capture_runs(lengths.captured_from, lengths.logical, rows)
            self._write_rows(state, f"layer.{index}.capture", capture, runs)
            name = f"layer.{index}.captured_at_eviction"
            if name in self._file and lengths.evicted_at:
                with buffers.scope():
                    copy = state.captured_at_eviction[index] = capture.copy()
                self._write_rows(state, name, copy, capture_runs(0, lengths.evicted_at, rows))

    def _write_rows(self, state: SessionState, name: str, capture: Array, runs: SlotRuns) -> None:
        begin = 0
        for slot, count in runs:
            with state.caches.buffers.scope():
                target = capture[0, slot : slot + count]
            state.caches.buffers.write(target, self._file.read(name, target.dtype, begin, begin + count))
            begin += count

    def _generation(self) -> Generation | None:
        saved = self._description["generation"]
        if saved is None:
            return None
        sampling = _options(lambda values: Sampling(**values), saved["sampling"], self._path)
        logits = self._file.read("logits", np.float32) if "logits" in self._file else None
        return Generation(
            sampling=sampling, max_new_tokens=saved["max_new_tokens"], count=saved["count"], logits=logits
        )


def _options(make: Callable[[dict[str, Any]], Options], values: dict[str, Any], path: Path) -> Options:
    """Rebuild options; those that this version does not have are refused."""
    try:
        return make(values)
    except (TypeError, ConfigError) as error:
        raise ContractMismatchError(
            f"{path} was saved with options that this Ortolan does not have: {error}"
        ) from error


def _has_form(value: object, form: Any) -> bool:
    """Say whether a value, as JSON holds it, is of a form as in `DESCRIPTION`."""
    if isinstance(form, tuple):
        return any(_has_form(value, choice) for choice in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(each, form[0]) for each in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            name in value and _has_form(value[name], part) for name, part in form.items()
        )
    return isinstance(value, form) and not isinstance(value, bool)

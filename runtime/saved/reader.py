"""Reads the file of a saved sequence back: refuses what does not fit the model, then fills empty caches and a state."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from ortolan.errors import ConfigError, ContractMismatchError, SessionFileError
from ortolan.manifest import Manifest
from ortolan.policies import Eviction
from ortolan.runtime.caches.layer_state import kind_of, own_layers
from ortolan.runtime.caches.plan import CachePlan, LayerPlan
from ortolan.runtime.caches.store import SequenceCaches
from ortolan.runtime.device.buffers import Array
from ortolan.runtime.saved.checks import check_sequence
from ortolan.runtime.saved.file import SessionFile
from ortolan.runtime.saved.fingerprint import Fingerprint, difference
from ortolan.runtime.saved.state import capture_runs
from ortolan.runtime.state.sequence import SequenceState

# Of a file's description: a class, members of a dict, the form of a list's elements, or a choice of forms.
DESCRIPTION: dict[str, Any] = {
    "model": dict,
    "plan": {"max_context": int, "chunk_size": int, "slot_tile": int},
    "eviction": (dict, NoneType),
    "layers": [{"capacity": int, "planned": int, "first": int}],
    "lengths": {"logical": int, "evicted_at": int, "captured_from": int, "counts": dict},
    "pending": [int],
    "variant": int,
    "generation": ({"turn": dict, "chosen": (list, NoneType), "ready": list}, NoneType),
    "finish_reason": (str, NoneType),
}


class SavedSequence:
    """A checked file of a sequence."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises as `Model.restore` does for damaged files and other versions."""
        self._path = path
        self._file = SessionFile(path)
        self._description = self._file.description
        if not _has_form(self._description, DESCRIPTION):
            self._file.close()
            raise SessionFileError(
                f"{path} is not a session as this version of Ortolan saves it: its description has another form"
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def check_model(self, identity: Fingerprint, manifest: Manifest) -> None:
        """Check that this model saved the sequence, and that what is known of it fits the model.

        Raises:
            ContractMismatchError: another model saved it.
            SessionFileError: a number is out of its range.
        """
        problem = difference(self._description["model"], identity)
        if problem:
            raise ContractMismatchError(f"{self._path} was saved with another model: {problem}")
        counts = len(self._description["layers"]), len(identity["layers"])
        if counts[0] != counts[1]:
            raise SessionFileError(f"{self._path} describes {counts[0]} layers of a model that has {counts[1]}")
        check_sequence(self._file, manifest)

    @property
    def logical_length(self) -> int:
        """Tokens that were read."""
        return int(self._description["lengths"]["logical"])

    @property
    def max_context(self) -> int:
        """The longest sequence that the session was made for, tokens."""
        return int(self._description["plan"]["max_context"])

    @property
    def chunk_size(self) -> int:
        """Most tokens of one prefill step."""
        return int(self._description["plan"]["chunk_size"])

    @property
    def eviction(self) -> Eviction | None:
        """The eviction options.

        Raises:
            ContractMismatchError: this version does not have them.
        """
        saved = self._description["eviction"]
        if saved is None:
            return None
        try:
            return Eviction.from_dict(saved)
        except (TypeError, ConfigError) as error:
            raise ContractMismatchError(
                f"{self._path} was saved with options that this Ortolan does not have: {error}"
            ) from error

    @property
    def generation(self) -> dict[str, Any] | None:
        """The generation that was under way, described."""
        generation: dict[str, Any] | None = self._description["generation"]
        return generation

    @property
    def finish_reason(self) -> str | None:
        """Why the last generation ended."""
        reason: str | None = self._description["finish_reason"]
        return reason

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
        return [self._capacity(index, layer, plan, sink) for index, layer in enumerate(plan.layers)]

    def load(self, state: SequenceState, caches: SequenceCaches, plan: CachePlan, manifest: Manifest) -> None:
        """Fill an empty state, and the empty caches of its pages, with what was saved.

        Raises:
            SessionFileError: the file cannot be read any more.
            CapacityError: there is no memory.
        """
        self.load_state(state, plan, manifest)
        self.load_caches(state, caches)

    def load_caches(self, state: SequenceState, caches: SequenceCaches) -> None:
        """Fill the empty caches of a state that `load_state` has filled. Raises as `load`."""
        for index in own_layers(caches.store.manifest):
            view = caches.view(index, state.lengths)
            kind_of(view.layer).load(view, self._file, int(self._description["layers"][index]["first"]))
        self._load_captures(state, caches)

    def load_state(self, state: SequenceState, plan: CachePlan, manifest: Manifest) -> None:
        """Fill a state but for the contents of caches."""
        lengths, saved = state.lengths, self._description["lengths"]
        lengths.clear()
        lengths.logical = lengths.highest = lengths.states_from = self.logical_length
        lengths.evicted_at, lengths.captured_from = int(saved["evicted_at"]), int(saved["captured_from"])
        lengths.counts = {int(i): np.array(held, np.int32) for i, held in saved["counts"].items()}
        for index, layer in enumerate(plan.layers):
            lengths.rings_from = max(lengths.rings_from, self._rings_from(index, layer, manifest.sink))
            if f"layer.{index}.kept" in self._file:
                lengths.kept[index] = self._file.read(f"layer.{index}.kept", np.int32).copy()
        state.tokens[:] = [*self._file.read("history", np.int32).tolist(), *self._description["pending"]]
        state.variant = int(self._description["variant"])

    def held(self, index: int) -> int:
        """Return the tokens that a full-attention cache held; where kv heads differ, the most."""
        lengths = self._description["lengths"]
        counts = lengths["counts"].get(str(index))
        later = lengths["logical"] - lengths["evicted_at"]
        return int(max(counts)) + later if counts else self.logical_length

    def _capacity(self, index: int, layer: LayerPlan, plan: CachePlan, sink: int) -> int:
        saved, result = self._description["layers"][index], layer.capacity
        if layer.kind != "full":
            return result
        same_tiles = plan.slot_tile == self._description["plan"]["slot_tile"]
        if saved["capacity"] != saved["planned"]:
            if same_tiles and saved["capacity"] <= layer.capacity:
                result = int(saved["capacity"])
            else:
                result = plan.grown_capacity(index, max(self.held(index), sink + 1))
        most = result if plan.bound is None else plan.bound
        if self.held(index) > most:
            raise ConfigError(
                f"layer {index} holds {self.held(index)} tokens in {self._path}, and {most} in the session "
                "that was asked for; restore it with the chunk_size and the eviction options that it was saved with"
            )
        return result

    def _rings_from(self, index: int, layer: LayerPlan, sink: int) -> int:
        """Return the shortest length that a ring can go back to."""
        first = int(self._description["layers"][index]["first"])
        return first + layer.window - 1 if layer.kind == "ring" and first > sink else 0

    def _load_captures(self, state: SequenceState, caches: SequenceCaches) -> None:
        """Fill captured queries, of which other options than the saved ones may take fewer, or more."""
        lengths = state.lengths
        for index, capture in state.captures.items():
            saved = self._write_queries(caches, f"layer.{index}.capture", capture, lengths.logical)
            if saved < capture.shape[1]:
                lengths.captured_from = max(lengths.captured_from, lengths.logical - saved)
            name = f"layer.{index}.captured_at_eviction"
            if name in self._file and lengths.evicted_at:
                with caches.buffers.scope():
                    copy = state.captured_at_eviction[index] = capture.copy()
                    copy[:] = 0  # as where none were kept
                self._write_queries(caches, name, copy, lengths.evicted_at)

    def _write_queries(self, caches: SequenceCaches, name: str, capture: Array, end: int) -> int:
        """Write the saved queries of the last positions before `end`, as many as fit; returns how many were saved."""
        saved = self._file.shape(name)[0] if name in self._file else 0
        rows = capture.shape[1]
        begin = max(0, saved - rows)
        for slot, count in capture_runs(end - saved, end, rows):
            with caches.buffers.scope():
                target = capture[0, slot : slot + count]
            caches.buffers.write(
                target, self._file.read(name, target.dtype, begin, begin + count, row_shape=target.shape[1:])
            )
            begin += count
        return saved


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

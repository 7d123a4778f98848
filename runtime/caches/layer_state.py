"""What a layer keeps between steps: one kind of state each, behind one protocol.

A kind says how many slots a sequence needs, which tensors hold them, how far the state can go back, and how it is saved
and restored. A new kind is one file and one line in `KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ortolan.element_types import element_type
from ortolan.errors import ContractMismatchError
from ortolan.manifest import LayerInfo, Manifest
from ortolan.runtime.device.buffers import Array, Buffers

if TYPE_CHECKING:
    from ortolan.runtime.caches.store import StoredLayer
    from ortolan.runtime.saved.file import SessionFile

SLOTS = -1  # in a tensor's shape: the axis of a page's slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a plan must hold.

    Attributes:
        max_context: longest sequence, tokens.
        step_tokens: most tokens that one step writes, or several steps that are under way at once.
        sink: S.
        bound: most tokens that a full-attention cache ever holds; None: the whole context.
        spare: tokens behind the longest sequence that are read and forgotten.
    """

    max_context: int
    step_tokens: int
    sink: int
    bound: int | None = None
    spare: int = 0

    @property
    def longest(self) -> int:
        """The most tokens that are ever written."""
        return self.max_context + self.spare


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a layer's state: a pool of pages.

    Attributes:
        role: what it is called within the layer, as "key".
        name: the graph's input; the output that aliases it is `contract.output(name)`.
        page_shape: of one page; `SLOTS` stands for the page's slots.
        dtype: element type.
    """

    role: str
    name: str
    page_shape: tuple[int, ...]
    dtype: str

    def shape(self, pages: int, slots: int) -> tuple[int, ...]:
        """Return the shape of a pool of `pages` pages of `slots` slots."""
        return pages, *(slots if size == SLOTS else size for size in self.page_shape)

    def page_bytes(self, slots: int) -> int:
        """Return the bytes of a page of `slots` slots."""
        return math.prod(self.shape(1, slots)) * element_type(self.dtype).bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor to be written; `parts` yields its elements in order, on the host."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Iterator[npt.NDArray[Any]]


class LayerState(Protocol):
    """A kind of state.

    Attributes:
        name: of the kind, as `LayerPlan.kind` has it.
        grows: whether a sequence takes more slots as it gets longer.
        needs_clear: whether a sequence must find its state cleared when it begins.
    """

    name: str
    grows: bool
    needs_clear: bool

    def tensors(self, index: int, layer: LayerInfo, manifest: Manifest) -> tuple[TensorSpec, ...]:
        """Describe what holds the state of a layer."""

    def slots(self, layer: LayerInfo, sizes: Sizes) -> int:
        """Return the slots that one sequence needs."""

    def clear(self, view: StoredLayer) -> None:
        """Make the state that of a sequence without tokens, where that needs anything."""

    def rewind_problem(self, view: StoredLayer, length: int) -> str | None:
        """Say why a sequence cannot go back to `length` tokens; None where it can."""

    def snapshot(self, view: StoredLayer) -> Mapping[str, Array] | None:
        """Copy what a step changes beyond the lengths; None where the lengths alone undo a step."""

    def restore(self, view: StoredLayer, snapshot: Mapping[str, Array] | None) -> None:
        """Put a snapshot back."""

    def save(self, view: StoredLayer, first: int) -> Iterator[SavedTensor]:
        """Describe what a saved sequence needs from position `first` on."""

    def load(self, view: StoredLayer, saved: SessionFile, first: int) -> None:
        """Fill an empty state with what `save` wrote from position `first` on. Raises SessionFileError."""


def kind_of(layer: LayerInfo) -> LayerState:
    """Return the kind of state that a layer keeps.

    Raises:
        ContractMismatchError: this version does not have the kind.
    """
    from ortolan.runtime.caches.kinds import KINDS

    name = layer.state
    if name == "attention":
        name = "ring" if layer.window > 0 else "full"
    if name not in KINDS:
        raise ContractMismatchError(
            f"the model has a layer with state {name!r}; this Ortolan has {', '.join(KINDS)}; update Ortolan"
        )
    return KINDS[name]


def own_layers(manifest: Manifest) -> list[int]:
    """List the layers that keep a state of their own; others read another layer's."""
    return [index for index, layer in enumerate(manifest.layers) if layer.cache_of is None]


def download(buffers: Buffers, array: Array) -> npt.NDArray[Any]:
    """Bring a part of a state to the host, as bytes of its elements."""
    return np.ascontiguousarray(buffers.download(array))

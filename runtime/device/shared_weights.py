"""Holds what a model and its draft head have in common, embedding and output head, once for both graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from ortolan.element_types import ElementType, from_onnx
from ortolan.manifest import HEAD_WEIGHTS_FILE
from ortolan.runtime.device.host_tables import SHARED_TYPES, HostTable


class Place(Protocol):
    """Where weights are put."""

    def weight(self, rows: npt.NDArray[Any], element: ElementType) -> Any:
        """Make an OrtValue of a weight that is mapped from a file."""


def find_shared_weights(graph: Path) -> list[HostTable]:
    """Find the weights of a draft head's graph that lie in its model's file; those of low-bit codes are left out."""
    import onnx

    found = []
    for tensor in onnx.load_model(graph, load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if not place or place["location"] == HEAD_WEIGHTS_FILE:
            continue
        element = from_onnx(tensor.data_type)
        if element.name in SHARED_TYPES:
            found.append(
                HostTable(
                    name=tensor.name,
                    file=place["location"],
                    offset=int(place.get("offset", 0)),
                    shape=tuple(tensor.dims),
                    element=element,
                )
            )
    return found


def give_shared_weights(graph: Path, place: Place) -> tuple[dict[str, Any], int]:
    """Put the weights that a draft head's graph shares where both graphs read them.

    Returns:
        The OrtValues by the initializers' names, and their bytes; none where this onnxruntime cannot take them.

    Raises:
        CapacityError: there is no memory for them.
    """
    import onnxruntime

    if not hasattr(onnxruntime.OrtValue, "from_dlpack"):
        return {}, 0
    tables = find_shared_weights(graph)
    values = {table.name: place.weight(table.map(graph.parent), table.element) for table in tables}
    return values, sum(table.bytes for table in tables)

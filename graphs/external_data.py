"""Points the weights of a finished graph into the files that hold their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from ortolan.errors import ContractMismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalTensor:
    """Where one weight lies: a file beside the model, and a byte range of it."""

    location: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte after the weight."""
        return self.offset + self.length


def span_of(placed: Mapping[str, ExternalTensor], names: Sequence[str]) -> ExternalTensor:
    """Return the range that weights make which follow each other in one file."""
    places = [placed[name] for name in names]
    length = sum(place.length for place in places)
    assert places[-1].end == places[0].offset + length, "a group of weights has no padding inside"
    return ExternalTensor(location=places[0].location, offset=places[0].offset, length=length)


def attach_external_data(model: onnx.ModelProto, tensors: Mapping[str, ExternalTensor]) -> None:
    """Fill in the location of every external initializer of `model`, in place.

    Raises:
        ContractMismatchError: a weight of the graph has no bytes, or bytes have no weight.
    """
    external = {t.name: t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    missing, unused = sorted(set(external) - set(tensors)), sorted(set(tensors) - set(external))
    if missing or unused:
        raise ContractMismatchError(f"weights without data: {missing[:5]}; data without weights: {unused[:5]}")
    for name, tensor in external.items():
        point_to(tensor, tensors[name])


def point_to(tensor: onnx.TensorProto, where: ExternalTensor) -> None:
    """Make an initializer external, with its bytes at `where`."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", where.location), ("offset", where.offset), ("length", where.length)):
        tensor.external_data.add(key=key, value=str(value))


def read_external_data(tensor: onnx.TensorProto) -> ExternalTensor:
    """Read where the bytes of an external initializer lie.

    Raises:
        ContractMismatchError: it does not say.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        return ExternalTensor(
            location=entries["location"], offset=int(entries["offset"]), length=int(entries["length"])
        )
    except (KeyError, ValueError) as error:
        raise ContractMismatchError(
            f"weight '{tensor.name}' does not say where its bytes lie: {entries or 'nothing is attached'}"
        ) from error

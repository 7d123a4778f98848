"""Weights of few bits in blocks with a scale each, multiplied by ONNX Runtime's MatMulNBits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ortolan.element_types import element_type
from ortolan.graphs.builder import MICROSOFT, Tensor
from ortolan.graphs.options import Fusion
from ortolan.graphs.parts import Linear, Parts

PORTS = ("blocks", "scales", "zero_points")  # of MatMulNBits, after its first input


@dataclass(frozen=True, slots=True)
class Blocks:
    """One linear weight as MatMulNBits takes it.

    Attributes:
        attributes: of the operator: K, N, bits, block_size, accuracy_level.
        stored: element type and shape of its tensors, by port; the first axis of all of them follows N.
    """

    attributes: Mapping[str, int]
    stored: Mapping[str, tuple[str, tuple[int, ...]]]

    takes_factors = False

    def folds(self, device: Fusion | None) -> bool:
        """Tell that MatMulNBits takes no norm, gate or residual."""
        return False

    def tensors(self, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """List the tensors."""
        stem = name.removesuffix(".weight")
        return {f"{stem}.{port}": stored for port, stored in self.stored.items()}

    def joined(self, others: list[Blocks]) -> Blocks | None:
        """Describe the product of this weight and others of the same input as one; None where they differ."""
        alike = {name: value for name, value in self.attributes.items() if name != "N"}
        for other in others:
            if {**other.attributes, **alike} != dict(other.attributes) or other._layout != self._layout:
                return None
        rows = {port: sum(each.stored[port][1][0] for each in (self, *others)) for port in self.stored}
        stored = {port: (element, (rows[port], *shape[1:])) for port, (element, shape) in self.stored.items()}
        count = sum(each.attributes["N"] for each in (self, *others))
        return replace(self, attributes={**self.attributes, "N": count}, stored=stored)

    @property
    def _layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {port: (element, shape[1:]) for port, (element, shape) in self.stored.items()}

    def plain(self, parts: Parts, linear: Linear) -> Tensor:
        """Add the product, and Adds of bias and residual."""
        graph, path = parts.graph, linear.path
        weights = [
            graph.weight(f"{linear.stem}.{port}", element_type(element).onnx, shape)
            for port, (element, shape) in self.stored.items()
        ]
        inputs = [parts.value(linear.x), *weights]
        y = graph.node(f"{path}/MatMulNBits", "MatMulNBits", inputs, self.attributes, MICROSOFT)
        bias = parts.bias(linear.stem)
        if bias is not None:
            y = graph.node(f"{path}/bias/Add", "Add", [y, bias])
        if linear.in_float32:
            y = parts.in_float32(f"{path}/Cast", y)
        return parts.add_residual(path, y, linear.residual)

    def fused(self, parts: Parts, linear: Linear) -> Tensor:
        """Add the same: what stands around the product is fused, the product is not."""
        return self.plain(parts, linear)

"""Weights of 4 or 8 bits: what is stored of them, and the nodes that multiply and look them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from ortolan.element_types import element_type
from ortolan.graphs.builder import FLOAT, MICROSOFT, Tensor, emitters
from ortolan.graphs.formats.blocks import Blocks
from ortolan.graphs.options import Fusion
from ortolan.graphs.parts import EXPERT_WEIGHTS, Linear, Normed, Parts

Kind: TypeAlias = Literal["int4", "int8", "fp8", "mxfp4", "nvfp4"]
InputFormat: TypeAlias = Literal["none", "fp8"]
Stored: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]  # element type and shape by port or tensor

BITS: dict[Kind, int] = {"int4": 4, "int8": 8, "fp8": 8, "mxfp4": 4, "nvfp4": 4}
INTEGERS: tuple[Kind, ...] = ("int4", "int8")
BLOCK_SIZES = (16, 32, 64, 128, 256)  # that MatMulNBits has on every device
# On the CPU, MatMulNBits then rounds activations to 8 bits, which is many times faster: see docs/quantisation.md.
ACCURACY_LEVEL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBit:
    """Codes of 4 or 8 bits, with scales, as the operator LowBitLinear describes them.

    Attributes:
        kind: what codes mean.
        group_size: columns that share a scale; 0: all of a row.
        zero_points: whether each group has one; int4 and int8 alone.
        scale_rows: rows that share a float scale; fp8 alone.
        input_format: "fp8" where inputs are rounded to e4m3, too; fp8 alone.
        input_scale: of all rounded inputs; 0: each token has one for each group.
    """

    kind: Kind
    group_size: int = 0
    zero_points: bool = False
    scale_rows: int = 1
    input_format: InputFormat = "none"
    input_scale: float = 0.0

    takes_factors = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.kind]

    def folds(self, device: Fusion | None) -> bool:
        """Tell that LowBitLinear takes norms, gates and residuals on every device."""
        return True

    def groups(self, columns: int) -> int:
        """Return how many groups a row has."""
        return columns // (self.group_size or columns)

    def ports(self, shape: tuple[int, ...], dtype: str) -> Stored:
        """List what is stored of a weight [N, K], or of a stack of them, by the ports of LowBitLinear."""
        *stack, rows, columns = shape
        groups = self.groups(columns)
        stored: Stored = {"codes": ("uint8", (*stack, rows, columns * self.bits // 8))}
        if self.kind in INTEGERS:
            stored["scales"] = (dtype, (*stack, rows, groups))
            if self.zero_points:
                stored["zero_points"] = ("uint8", (*stack, rows, -(-groups * self.bits // 8)))
        if self.kind in ("mxfp4", "nvfp4"):
            stored["scale_codes"] = ("uint8", (*stack, rows, groups))
        if self.kind in ("fp8", "nvfp4"):
            width = groups if self.kind == "fp8" else 1
            stored["float_scales"] = ("float32", (*stack, -(-rows // self.scale_rows), width))
        return stored

    def tensors(self, name: str, shape: tuple[int, ...], dtype: str) -> Stored:
        """List the tensors."""
        stem = name.removesuffix(".weight")
        return {f"{stem}.{port}": stored for port, stored in self.ports(shape, dtype).items()}

    def plain(self, parts: Parts, linear: Linear) -> Tensor:
        """Add ONNX Runtime's product where it has one of the format, else LowBitLinear."""
        if not self._has_product:
            return self.fused(parts, replace(linear, x=parts.value(linear.x)))
        shape, dtype = parts.shapes[f"{linear.stem}.weight"], parts.options.dtype
        attributes = {"K": shape[1], "N": shape[0], "bits": self.bits, "block_size": self.group_size}
        stored = self.ports(shape, dtype) | {"codes": ("uint8", self._blocks(shape))}
        return Blocks({**attributes, "accuracy_level": ACCURACY_LEVEL}, stored).plain(parts, linear)

    def fused(self, parts: Parts, linear: Linear) -> Tensor:
        """Add a LowBitLinear with the norm before it, its gate, and the residual.

        The sum's shape is written down, so that it can be formed in the residual's buffer.
        """
        norm = linear.x if isinstance(linear.x, Normed) else None
        shape = parts.shapes[f"{linear.stem}.weight"]
        inputs = {port: self._tensor(parts, linear.stem, port, stored) for port, stored in self._ports(parts, shape)}
        (y,) = parts.graph.operator(
            f"{linear.path}/LowBitLinear",
            emitters.low_bit_linear,
            {
                "x": linear.x if norm is None else norm.x,
                **inputs,
                "norm_weight": None if norm is None else parts.weight(norm.weight),
                "bias": parts.bias(linear.stem),
                "residual": linear.residual,
            },
            skipped_outputs=(0,) if linear.in_float32 and parts.options.onnx_type != FLOAT else (),
            format=self.kind,
            group_size=self.group_size,
            scale_rows=self.scale_rows,
            input_format=self.input_format,
            input_scale=self.input_scale,
            epsilon=parts.config.norm_epsilon,
            activation=linear.activation,
        )
        if linear.residual is not None:
            parts.graph.describe(y, parts.options.onnx_type, (parts.row_axis, shape[0]))
        return y

    def experts(
        self, parts: Parts, path: str, inputs: Mapping[str, Tensor | None], attributes: Mapping[str, Any]
    ) -> Tensor:
        """Add a LowBitExperts."""
        weights = {}
        for name in EXPERT_WEIGHTS:
            stem = f"{path}.experts.{name}".replace("/", ".")
            for port, stored in self._ports(parts, parts.shapes[stem]):
                weights[f"{name}_{port}"] = self._tensor(parts, stem, port, stored)
        (y,) = parts.graph.operator(
            f"{path}/LowBitExperts",
            emitters.low_bit_experts,
            {**inputs, **weights},
            format=self.kind,
            group_size=self.group_size,
            scale_rows=self.scale_rows,
            **attributes,
        )
        return y

    def rows(self, parts: Parts, stem: str, indices: Tensor) -> Tensor:
        """Look up rows, [T] -> [T, K]; int4 and int8 in groups alone.

        The codes have the shape in which the graph's product reads them, so that a session holds them once.
        """
        shape, graph = parts.shapes[f"{stem}.weight"], parts.graph
        stored = self.ports(shape, parts.options.dtype)
        scales = self._tensor(parts, stem, "scales", stored["scales"])
        fused = parts.options.fused
        codes = self._tensor(parts, stem, "codes", stored["codes"] if fused else ("uint8", self._blocks(shape)))
        if self.bits == 4:
            return self._half_byte_rows(parts, stem, codes, scales, indices)
        if not fused:
            scales = graph.reshape(f"{stem}/scales/Reshape", scales, (0, 0, 1))
        last_axis = 1 if fused else 2
        attributes = {"bits": self.bits, "block_size": self.group_size, "gather_axis": 0, "quantize_axis": last_axis}
        inputs = [codes, indices, scales]
        y = graph.node(f"{stem}/GatherBlockQuantized", "GatherBlockQuantized", inputs, attributes, MICROSOFT)
        return y if fused else graph.reshape(f"{stem}/Reshape", y, (0, -1))

    def _half_byte_rows(self, parts: Parts, stem: str, codes: Tensor, scales: Tensor, indices: Tensor) -> Tensor:
        """Look up rows of int4 by arithmetic: on CUDA, GatherBlockQuantized does not find rows of packed codes."""
        graph, dtype = parts.graph, parts.options.onnx_type
        path = f"{stem}/rows"
        picked = graph.node(f"{path}/Gather", "Gather", [codes, indices])
        pairs = graph.node(
            f"{path}/Cast", "Cast", [graph.reshape(f"{path}/Reshape", picked, (0, -1, 1))], {"to": dtype}
        )
        sixteen = parts.scalar(f"{path}/sixteen", 16.0)
        upper = graph.node(f"{path}/upper/Floor", "Floor", [graph.node(f"{path}/Div", "Div", [pairs, sixteen])])
        shifted = graph.node(f"{path}/upper/Mul", "Mul", [upper, sixteen])
        lower = graph.node(f"{path}/lower/Sub", "Sub", [pairs, shifted])
        values = graph.node(f"{path}/Concat", "Concat", [lower, upper], {"axis": 2})
        signed = graph.node(f"{path}/Sub", "Sub", [values, parts.scalar(f"{path}/eight", 8.0)])
        groups = graph.reshape(f"{path}/groups/Reshape", signed, (0, -1, self.group_size))
        factors = graph.node(f"{path}/scales/Gather", "Gather", [scales, indices])
        factors = graph.reshape(f"{path}/scales/Reshape", factors, (0, -1, 1))
        scaled = graph.node(f"{path}/Mul", "Mul", [groups, factors])
        return graph.reshape(f"{path}/whole/Reshape", scaled, (0, -1))

    @property
    def _has_product(self) -> bool:
        """Whether ONNX Runtime multiplies the format on every device."""
        return self.kind in INTEGERS and self.group_size in BLOCK_SIZES

    def _blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], self.groups(shape[1]), self.group_size * self.bits // 8)

    def _ports(self, parts: Parts, shape: tuple[int, ...]) -> list[tuple[str, tuple[str, tuple[int, ...]]]]:
        return list(self.ports(shape, parts.options.dtype).items())

    @staticmethod
    def _tensor(parts: Parts, stem: str, port: str, stored: tuple[str, tuple[int, ...]]) -> Tensor:
        element, shape = stored
        return parts.graph.weight(f"{stem}.{port}", element_type(element).onnx, shape)

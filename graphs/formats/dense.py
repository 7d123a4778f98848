"""Dense weights [out, in] in the model's type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ortolan.graphs.builder import FLOAT, Tensor, emitters
from ortolan.graphs.options import Fusion
from ortolan.graphs.parts import EXPERT_WEIGHTS, Linear, Normed, Parts


@dataclass(frozen=True, slots=True)
class Dense:
    """One element of the model's type for each weight."""

    takes_factors = True

    def folds(self, device: Fusion | None) -> bool:
        """Tell whether a FusedLinear is used: on the CPU, ONNX Runtime multiplies faster."""
        return device == "cuda"

    def tensors(self, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """List the tensors: the weight itself."""
        return {name: (dtype, shape)}

    def experts(
        self, parts: Parts, path: str, inputs: Mapping[str, Tensor | None], attributes: Mapping[str, Any]
    ) -> Tensor:
        """Add a MoeExperts."""
        weights = {name: parts.weight(f"{path}.experts.{name}".replace("/", ".")) for name in EXPERT_WEIGHTS}
        (y,) = parts.graph.operator(f"{path}/MoeExperts", emitters.moe_experts, {**inputs, **weights}, **attributes)
        return y

    def plain(self, parts: Parts, linear: Linear) -> Tensor:
        """Add a Gemm, a Cast where the result is float32, and an Add of the residual."""
        inputs = [parts.value(linear.x), parts.weight(f"{linear.stem}.weight"), parts.bias(linear.stem)]
        given = [tensor for tensor in inputs if tensor is not None]
        y = parts.graph.node(f"{linear.path}/Gemm", "Gemm", given, {"transB": 1})
        if linear.in_float32:
            y = parts.in_float32(f"{linear.path}/Cast", y)
        return parts.add_residual(linear.path, y, linear.residual)

    def fused(self, parts: Parts, linear: Linear) -> Tensor:
        """Add a FusedLinear with the norm before it, its gate, and the residual.

        The sum's shape is written down, so that it can be formed in the residual's buffer. On the CPU it is the plain
        layer.
        """
        if not self.folds(parts.options.fused_for):
            return self.plain(parts, linear)
        norm = linear.x if isinstance(linear.x, Normed) else None
        (y,) = parts.graph.operator(
            f"{linear.path}/FusedLinear",
            emitters.fused_linear,
            {
                "x": linear.x if norm is None else norm.x,
                "weight": parts.weight(f"{linear.stem}.weight"),
                "norm_weight": None if norm is None else parts.weight(norm.weight),
                "bias": parts.bias(linear.stem),
                "residual": linear.residual,
                "factor": None if linear.factor is None else linear.factor.rows,
            },
            skipped_outputs=(0,) if linear.in_float32 and parts.options.onnx_type != FLOAT else (),
            epsilon=parts.config.norm_epsilon if norm is None else norm.epsilon,
            activation=linear.activation,
            factor_offset=0 if linear.factor is None else linear.factor.offset,
        )
        if linear.residual is not None:
            rows = parts.shapes[f"{linear.stem}.weight"][0]
            parts.graph.describe(y, parts.options.onnx_type, (parts.row_axis, rows))
        return y
